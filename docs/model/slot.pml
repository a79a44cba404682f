// A model of the life of one slot of a mailbox (csrc/dtorch/shm/layout.h), for the checker spin.
// `make model` runs it: every configuration must hold. `make model-mistakes`: each must be found.
// `tests/model.sh CONFIGURATION [MISTAKE]` runs one of them, and shows the steps to its error.
// Beside it: fork.pml, a producer that forks; listen.pml, who listens while callbacks block;
// lookout.pml, threads that look out before they wait; ask.pml, claimants that ask for memory of a
// device; blocks.pml, the memory of large values.
//
// What stands here for what:
//
//   Producer()  a producer process: Attachment::ClaimLane, Hold, HandOver, Claim, Prepare, Publish,
//               Abandon, Drop, Attend, Ring. It may be killed between any two steps.
//   Reservation()  another thread of it, which has claimed the promise: Publish, or Abandon.
//   Service()   the consumer's listening thread, Service::Run: Mailbox::Collect (WatchNewLanes, Look,
//               Take, BreakUnlessHeld, OnDeath), Service::Deliver, Mailbox::Sleep.
//   Waiter()    a thread of the consumer that waits on the slot itself, with or without a time limit.
//   Owner()     the thread that made the promise: Mailbox::Allocate, Retract, ClaimAtHome with
//               FulfilAtHome or AbandonAtHome, and the slot's reuse.
//   Kernel()    kills producers, and reports the death to the pidfd some time later.
//   Monitor()   runs when nothing can move any more, and asks whether all has happened that must:
//                 - what was published was delivered, whole, once, whoever has died since;
//                 - what nobody is left to fulfil is broken; what somebody can fulfil is not;
//                 - no thread waits for a future that is complete; dead processes' lanes are free.
//               Other assertions stand where the step is that would violate them.
//
// One statement is one access to shared memory, or one system call; they interleave in every way.
// d_step{} is one such access, with the bookkeeping of the proof. Taken together with an access is what
// interleaves with nothing: a test of what was just read, a lock, what only the dead have written.
// Where COARSE is defined, steps are taken together that another configuration takes apart.
//
// The states form no cycle (checked: pan -l, with no progress label anywhere; for some configurations
// always, for all by `tests/model.sh --cycles`), so every run comes to an end, and "eventually" is "at the
// end". No fairness is assumed, but that the machine runs some thread that can run; and that a killed
// process's pidfd becomes readable.
//
// Counters that are only compared with what was read before (bell, handovers, the number in armed)
// are a bit: has it the value that was read? That is exact, and has no wrapping.
//
// Left out: memory orders (all accesses here are sequentially consistent, and must be in the code:
// word, bits, waiters, bell, armed, hold, held, handed_over, handovers); more than one slot, so that
// bits and summary are one bit each; lanes_used; one process that holds the promise several times, or
// is its owner (HoldAtHome), or has inherited it from that; tokens pickled more than once by a producer
// (handed_over is no count); a process wrongly taken for dead; wrapped generations.
//
// Mistakes, of which one may be defined: the words that begin with BUG_. Those that were made once
// in the code or in its design are worth a word more:
//   BUG_DISARM_BEFORE_WRITE    a ringer killed (or stopped) in between silences everybody else
//   BUG_DROP_UNRECORDED        one killed between giving up its hold and telling so: never broken
//   BUG_GIVE_BACK_LAST         a holder that drops meanwhile sees the claim, and tells nobody
//   BUG_HANDED_OVER_LAST, BUG_HANDED_OVER_FIRST  the token moves behind the back of the look at it
//   BUG_HOLD_BEFORE_LOOK       an old token, unpickled late, wipes out the hold of a newer one
//   BUG_HELD_GOES_BACK         the same, for what all producers share
//   BUG_COMPLETE_BEFORE_LEAVE  callbacks run while producers still believe in a waiter
//   BUG_ABANDON_UNRECORDED     one killed between giving a claim back and telling so, whose hold
//                              another of its threads has dropped meanwhile: never broken

#if defined(PUBLISH)     // one producer, in small steps; a waiter
# define PRODUCERS 1
# define GENERATIONS 1
# define WAITERS 1
# define KILL_0
# define ATTACHED
# define CAN_ABANDON
#elif defined(CROWD)     // two threads wait for one future, one of them with a time limit
# define PRODUCERS 1
# define COARSE
# define GENERATIONS 1
# define WAITERS 2
# define ATTACHED
# define CAN_RETRACT
#elif defined(TWO)       // two producers of one promise; one may be killed
# define PRODUCERS 2
# define COARSE
# define FINE_RING
# define GENERATIONS 1
# define WAITERS 0
# define KILL_0
# define ATTACHED        // the producers have their lanes before it begins
# define CAN_ABANDON
#elif defined(ATTACH)    // as TWO, but they have yet to claim their lanes
# define PRODUCERS 2
# define COARSE
# define FINE_RING
# define ONLY_PUBLISH
# define GENERATIONS 1
# define WAITERS 0
# define KILL_0
#elif defined(LANES1)    // as ATTACH, but there is one lane: the second waits for it
# define PRODUCERS 2
# define LANES 1
# define COARSE
# define FINE_RING
# define GENERATIONS 1
# define WAITERS 0
# define KILL_0
#elif defined(REUSE)     // the slot is used twice; a waiter of each generation; the first may give up
# define PRODUCERS 2
# define ONLY_PUBLISH
# define COARSE
# define GENERATIONS 2
# define WAITERS 2
# define ATTACHED
#elif defined(HANDOVER)  // a producer passes its token on; the owner's process may have a claim
# define PRODUCERS 2
# define COARSE
# define GENERATIONS 1
# define WAITERS 0
# define KILL_0
# define KILL_1
# define ATTACHED
#elif defined(RESERVED)  // one thread of a producer has it claimed while another drops it
# define PRODUCERS 1
# define COARSE
# define GENERATIONS 1
# define WAITERS 0
# define KILL_0
# define ATTACHED
#elif defined(HOME)      // the owner's process claims it, too, and fulfils it or gives it back
# define PRODUCERS 1
# define COARSE
# define FINE_RING
# define GENERATIONS 1
# define WAITERS 0
# define KILL_0
# define ATTACHED
# define CAN_ABANDON
#elif defined(STALE)     // a token of the first generation arrives when the slot is in its second
# define PRODUCERS 2
# define COARSE
# define GENERATIONS 2
# define WAITERS 0
# define KILL_0
# define KILL_1
# define ATTACHED
# define MUST_RETRACT
#elif defined(CALLBACK)  // a callback of the first future waits for the second, in the same slot
# define PRODUCERS 2
# define ONLY_PUBLISH
# define COARSE
# define GENERATIONS 2
# define WAITERS 1
# define ATTACHED
#else
# error "choose a configuration"
#endif

#if defined(KILL_0) || defined(KILL_1)
# define KILLS
#endif
#ifndef LANES
# define LANES PRODUCERS
#endif
#if WAITERS > 0
# define SLEEPERS WAITERS
#else
# define SLEEPERS 1
#endif

mtype = { FREE, PENDING, CLAIMED, READY };
mtype = { NOTHING, VALUE, BROKEN, OWN };  // how a future was completed

// ---- Shared memory --------------------------------------------------------------------------------

mtype word_state = FREE;        // Slot::word, which is read and changed as one
byte word_lane, word_gen;
byte held;                      // Slot::held: only goes forward, and is never reset
byte handed_over;               // Slot::handed_over
bit handovers_as_seen;          // Slot::handovers, how often that was set
bit bell_is_as_seen[SLEEPERS];  // Slot::bell, a futex; for each waiter
byte waiters;                   // Slot::waiters
byte half_a, half_b;            // Slot::description, in two parts: a torn value shows

bit ready_bit, summary_bit;
bit new_lane, armed;            // Header; `armed` is 0, or another number each time,
byte armed_as_seen;             // ... a bit for each process that has read the present one

byte lane_owner[LANES];         // Lane::owner: 0 is kFreeLane
byte hold[LANES];               // the generation in which the lane holds the slot
bit dropping[LANES];            // Lane::dropping: its process is giving up its hold of the slot

// ---- The kernel -----------------------------------------------------------------------------------

bit pipe_full, pipe_edge;  // the bell's pipe; the edge that epoll has yet to report
bit dead[PRODUCERS];       // killed: takes no further step
bit pidfd[PRODUCERS];      // ... and its pidfd has become readable
bit asleep[SLEEPERS];      // in futex_wait on `bell`

// ---- The consumer's own memory --------------------------------------------------------------------

bit mailbox_lock;
bit outstanding;              // Local
byte generation;
byte watched[LANES];          // Mailbox::lanes_: the producer, counted from 1
bit registered[LANES];        // its pidfd is in epoll
bit fired[LANES];             // ... and has been reported once (EPOLLONESHOT)
bit ended[LANES];             // Mailbox::ended_
mtype outcome[GENERATIONS + 1] = NOTHING;  // the futures
byte linked[GENERATIONS + 1]; // waiters linked to them

// ---- Bookkeeping of the proof ---------------------------------------------------------------------

byte allocated;                    // generations that were allocated
byte published[GENERATIONS + 1];   // by whom
bit was_held[GENERATIONS + 1];     // some Hold() has returned
byte heirs[GENERATIONS + 1];       // live holders, and tokens that were handed over
bit orphaned[GENERATIONS + 1];     // there was a moment without heirs in this BreakUnlessHeld
byte heir_of[PRODUCERS];           // the generation a producer is counted for
bit attached[PRODUCERS];           // ClaimLane() has returned
bit token_sent, in_flight, token_lost;
bit in_futex[SLEEPERS];            // has not returned
bit doomed[PRODUCERS];             // will be killed, at some time

inline LoseHeir(p) {  // inside of a d_step
  if
  :: heir_of[p] ->
    heirs[heir_of[p]]--;
    if
    :: heirs[heir_of[p]] == 0 -> orphaned[heir_of[p]] = 1
    :: else -> skip
    fi;
    heir_of[p] = 0
  :: else -> skip
  fi
}

// ---- What both sides do ---------------------------------------------------------------------------

inline WriteToPipe() {
  d_step { pipe_edge = pipe_edge || !pipe_full; pipe_full = 1 }  // no new edge if it is not empty
}

inline Ring() {  // Attachment::Ring; the consumer's threads ring in the same way
#if defined(COARSE) && !defined(FINE_RING)
  d_step {
    pipe_edge = pipe_edge || (armed && !pipe_full);
    pipe_full = pipe_full || armed;
    armed = 0
  }
#elif defined(BUG_DISARM_BEFORE_WRITE)
  if
  :: d_step { armed -> armed = 0 }; WriteToPipe()
  :: else
  fi
#else
  if
  :: d_step { armed -> armed_as_seen = armed_as_seen | (1 << _pid) };
    WriteToPipe();
    d_step {  // a compare-and-swap of what was read against 0: not if it was armed anew
      armed = armed && !(armed_as_seen & (1 << _pid));
      armed_as_seen = armed_as_seen & (255 - (1 << _pid))
    }
  :: else
  fi
#endif
}

inline AddToBell() { bell_is_as_seen[0] = 0; bell_is_as_seen[SLEEPERS - 1] = 0 }

inline FutexWake() {
#ifdef BUG_WAKE_ONE
  if
  :: asleep[0] -> asleep[0] = 0
  :: else -> asleep[SLEEPERS - 1] = 0
  fi
#else
  asleep[0] = 0;
  asleep[SLEEPERS - 1] = 0
#endif
}

inline WakeWaiters() {
#ifdef COARSE
  d_step { AddToBell(); FutexWake() }
#else
  d_step { AddToBell() };
  d_step { FutexWake() }
#endif
}

inline SetBits() {
#ifdef BUG_SUMMARY_BEFORE_READY
  summary_bit = 1;
  ready_bit = 1
#elif defined(COARSE)
  d_step { ready_bit = 1; summary_bit = 1 }
#else
  ready_bit = 1;
  summary_bit = 1
#endif
}

// ---- A producer -----------------------------------------------------------------------------------

inline ClaimLane() {
#ifdef ATTACHED
# ifdef HANDOVER
  d_step { lane = 1 - id; attached[id] = 1 }  // it is looked at first whether the heir holds it
# else
  d_step { lane = id; attached[id] = 1 }
# endif
#else
  lane = 0;
  do
  :: d_step { lane < LANES && lane_owner[lane] == 0 -> lane_owner[lane] = id + 1 }; break
  :: lane < LANES && lane_owner[lane] != 0 -> lane++
  :: lane == LANES -> goto no_lane  // they are enough, unless dead ones were not freed yet
  od;
  new_lane = 1;
  Ring();
  attached[id] = 1
#endif
}

inline Hold(g) {
#ifdef BUG_HOLD_BEFORE_LOOK
  hold[lane] = g;
#endif
  if
  :: word_gen == g ->
#ifndef BUG_HOLD_BEFORE_LOOK
    hold[lane] = g;
#endif
#ifdef BUG_HELD_GOES_BACK
    held = g;
#else
    // A compare-and-swap that only goes forward: a late one does not undo a later one.
    held = (held < g -> g : held);
#endif
#ifdef HANDOVER
    handed_over = (handed_over == g -> 0 : handed_over);
#endif
    d_step {
      was_held[g] = 1;
      heir_of[id] = g;
      if
      :: in_flight && id == 1 -> in_flight = 0  // the token's part becomes ours
      :: else -> heirs[g]++
      fi
    }
  :: else
  fi
}

#define IS_PENDING(g) (word_state == PENDING && word_gen == g)

#ifdef BUG_HANDOVER_IF_PENDING
# define CAN_HAND_OVER(g) IS_PENDING(g)
#else
# define CAN_HAND_OVER(g) (word_gen == g && word_state != FREE)
#endif

inline HandOver(g) {
  if
  :: CAN_HAND_OVER(g) ->
#ifdef BUG_HANDOVER_COUNTED_FIRST
    handovers_as_seen = 0;
#endif
    d_step {
      handed_over = g;
      if
      :: dead[1] -> token_lost = 1
      :: else -> in_flight = 1; heirs[g]++
      fi
    };
#ifndef BUG_HANDOVER_COUNTED_FIRST
    handovers_as_seen = 0
#endif
  :: else
  fi
}

inline Drop(g) {
#if !defined(BUG_DROP_UNRECORDED) && !defined(COARSE)
  dropping[lane] = 1;
#endif
  if
  :: d_step {
       hold[lane] == g ->
#if !defined(BUG_DROP_UNRECORDED) && defined(COARSE)
       dropping[lane] = 1;
#endif
       hold[lane] = 0;
       if
       :: heir_of[id] == g -> LoseHeir(id)
       :: else -> skip
       fi
     };
#ifndef BUG_DROP_SILENT
    if
    :: IS_PENDING(g) -> SetBits(); Ring()  // Attend
    :: else
    fi
#endif
  :: d_step {
       hold[lane] != g ->
       if
       :: heir_of[id] == g -> LoseHeir(id)
       :: else -> skip
       fi
     }
  fi;
  dropping[lane] = 0
}

#ifdef BUG_CLAIM_ANY_GENERATION
# define CAN_CLAIM(g) (word_state == PENDING)
#else
# define CAN_CLAIM(g) IS_PENDING(g)
#endif

inline SetReady(g) {
  d_step {  // a plain store: sound only because nobody else may move a claimed slot of the living
    assert(word_state == CLAIMED && word_lane == lane && word_gen == g);
    word_state = READY;
    published[g] = id + 1
  }
}

inline Publish(g) {
#if defined(BUG_RING_BEFORE_WORD)
  SetBits();
  Ring();
  SetReady(g)
#elif defined(BUG_WAITERS_BEFORE_WORD)
  if
  :: waiters != 0 -> SetReady(g); SetBits(); WakeWaiters()
  :: else -> SetReady(g); SetBits(); Ring()
  fi
#else
  SetReady(g);
  SetBits();
  if
  :: waiters != 0 -> WakeWaiters()
  :: else -> Ring()
  fi
#endif
}

// Claims and publishes, gives the claim back in the middle, or does neither; then drops its hold.
inline SetOrDrop(g) {
  if
  :: true ->
    if
    :: d_step { CAN_CLAIM(g) -> word_state = CLAIMED; word_lane = lane };
#ifdef COARSE
      d_step { half_a = id + 1; half_b = id + 1 };
#else
      half_a = id + 1;
#endif
      if
      :: true ->
#if defined(COARSE)
        Publish(g)
#elif defined(BUG_PUBLISH_BEFORE_VALUE)
        Publish(g);
        half_b = id + 1
#else
        half_b = id + 1;
        Publish(g)
#endif
#ifdef CAN_ABANDON
      :: true ->  // Abandon: writing the value has failed
        d_step {
          assert(word_state == CLAIMED && word_lane == lane && word_gen == g);
          word_state = PENDING; word_lane = 0
        }
#endif
      fi
    :: else  // PromiseAlreadySatisfiedError
    fi
#ifndef ONLY_PUBLISH
  :: true -> skip
#endif
  fi;
#ifndef ONLY_PUBLISH
  Drop(g)
#endif
}

#ifdef RESERVED
bit books_lock;  // Attachment::mutex_
bit hold_begun;

// The thread that has reserved the promise: Claim at the beginning, while it is held.
proctype Reservation() {
  byte id, lane;
end_reserve:
  (hold_begun);
  {
    if
    :: d_step { CAN_CLAIM(1) && hold[0] == 1 -> word_state = CLAIMED; word_lane = 0 };
      d_step { half_a = 1; half_b = 1 };
      if
      :: Publish(1)
      :: // Abandon
        atomic { !books_lock -> books_lock = 1 };
#ifndef BUG_ABANDON_UNRECORDED
        dropping[0] = 1;
#endif
        d_step {
          assert(word_state == CLAIMED && word_lane == 0);
          word_state = PENDING; word_lane = 0
        };
#ifndef BUG_ABANDON_SILENT
        if  // whoever dropped it meanwhile saw it claimed
        :: hold[0] != 1 -> SetBits(); Ring()
        :: else
        fi;
#endif
        d_step { dropping[0] = 0; books_lock = 0 }
      fi
    :: !(CAN_CLAIM(1) && hold[0] == 1)
    fi
  } unless { dead[0] }
}
#endif

proctype Producer(byte id) {
  byte lane;
  {
    lane = 0;
#if defined(HANDOVER)
    if
    :: id == 0 ->
end_token_a:
      (allocated >= 1);
      ClaimLane();
      Hold(1);
      HandOver(1);
      token_sent = 1;
      SetOrDrop(1)
    :: else ->
end_token_b:
      (token_sent);
      ClaimLane();
      Hold(1);
      SetOrDrop(1)
    fi
#elif defined(STALE)
    if
    :: id == 0 ->  // gets the token of the first generation in time, or late
end_token_a:
      (allocated >= 1);
      ClaimLane();
      Hold(1);
      Drop(1)
    :: else ->  // gets that of the second first
end_token_b:
      (allocated >= 2);
      ClaimLane();
      Hold(2);
      Hold(1);
      if
      :: true -> assert(!CAN_CLAIM(1)); Drop(1)
      :: true -> skip
      fi;
      Drop(2)
    fi
#elif defined(RESERVED)
end_token:
    (allocated >= 1);
    ClaimLane();
    Hold(1);
    hold_begun = 1;
    atomic { !books_lock -> books_lock = 1 };
    Drop(1);
    books_lock = 0
#elif GENERATIONS == 2
end_token:
    (allocated > id);
    ClaimLane();
    Hold(id + 1);
    SetOrDrop(id + 1)
#else
end_token:
    (allocated >= 1);
    ClaimLane();
    Hold(1);
    SetOrDrop(1)
#endif
  } unless { dead[id] };
  goto done;
no_lane:
  skip;
done:
  skip;
  d_step {
    lane = 0;
    armed_as_seen = armed_as_seen & (255 - (1 << _pid))
  }
}

// ---- The consumer ---------------------------------------------------------------------------------

// Nothing can be seen of the instant behind Lock() or before Unlock(), so they are taken together
// with what is beside them.
#define LOCK !mailbox_lock -> mailbox_lock = 1
#define UNLOCK mailbox_lock = 0

#define ARM armed = 1; armed_as_seen = 0

inline Watch(l) {
  if
  :: atomic {
       watched[l] == 0 && lane_owner[l] != 0 ->
       watched[l] = lane_owner[l];
       fired[l] = 0;
       if
       :: registered[l] = 1
       :: pidfd[watched[l] - 1] -> registered[l] = 0; ended[l] = 1  // it has ended already
       fi
     }
  :: else
  fi
}

// The future, by whomever.
inline Complete(g, how) {
#ifdef COARSE
  d_step {
    assert(outcome[g] == NOTHING);
    outcome[g] = how;
    if
    :: linked[g] != 0 -> AddToBell(); FutexWake()
    :: else -> skip
    fi
  }
#else
  d_step { assert(outcome[g] == NOTHING); outcome[g] = how };
# ifndef BUG_COMPLETE_SILENT
  if
  :: linked[g] != 0 -> WakeWaiters()
  :: else
  fi
# endif
#endif
}

// Locked; the word was seen ready, in this generation.
inline Take() {
#ifdef COARSE
  atomic {
    copy = half_a;
#else
  copy = half_a;
  d_step {
#endif
    assert(copy == half_b && copy == published[generation]);
    copy = 0; half_a = 0; half_b = 0;
    l = word_lane;
    word_state = FREE; word_lane = 0; outstanding = 0; event = VALUE
  };
  Watch(l);
  l = 0
}

#define HELD_BY(l) (lane_owner[l] != 0 && hold[l] == generation)

#define CLAIMED_BY(d) (word_state == CLAIMED && word_lane == d && word_gen == generation)

inline GiveBack(d) {  // the claim of a dead lane
  d_step {
    if
    :: CLAIMED_BY(d) -> word_state = PENDING; word_lane = 0
    :: else -> skip
    fi
  }
}

inline BreakUnlessHeld(claimant) {  // locked
  d_step { orphaned[generation] = (heirs[generation] == 0); handovers_as_seen = 1 };
#ifdef HANDOVER
# ifdef BUG_HANDED_OVER_LAST
  keep = HELD_BY(0);
# else
  keep = (handed_over == generation);
  keep = keep || HELD_BY(0);
# endif
#else
  keep = HELD_BY(0);
#endif
#if LANES > 1
  keep = keep || HELD_BY(1);
#endif
#ifdef HANDOVER
# if defined(BUG_HANDED_OVER_LAST)
  keep = keep || (handed_over == generation);
# elif !defined(BUG_HANDED_OVER_FIRST)
  // Handed over meanwhile: whom it has come to may lie where we had looked already.
  keep = keep || !handovers_as_seen;
# endif
#endif
#if defined(BUG_GIVE_BACK_LAST) && !defined(BUG_DEATH_KEEPS_CLAIM)
  if
  :: keep -> GiveBack(claimant)
  :: else
  fi;
#endif
  d_step {
    if
#ifdef BUG_GIVE_BACK_LAST
    :: !keep && (word_state == PENDING || CLAIMED_BY(claimant)) ->
#else
    :: !keep && word_state == PENDING ->
#endif
      assert(orphaned[generation]);  // nobody lives who could have fulfilled it
      assert(!published[generation]);
      word_state = FREE; word_lane = 0; outstanding = 0;
      event = BROKEN
    :: else -> skip  // or claimed in this moment, by one who is not dead
    fi;
    keep = 0; orphaned[generation] = 0; handovers_as_seen = 0
  }
}

// That `held` is read with the word makes no difference: what is not pending is not broken.
inline Look() {
  if
  :: outstanding && word_gen == generation && word_state == READY -> Take()
  :: outstanding && IS_PENDING(generation) && held == generation -> BreakUnlessHeld(LANES)
  :: else
  fi
}

// What the dead has written changes no more, by its own hand; hence it is read at once.
inline OnDeath(d) {
  d_step {
#ifdef BUG_DROP_UNRECORDED
    ok = (hold[d] == generation);
#else
    ok = (hold[d] == generation || dropping[d]);
#endif
    hold[d] = 0;
    ok = outstanding && word_gen == generation && (ok || CLAIMED_BY(d));
    // Given back before the holds are read: whoever drops its hold later sees it pending.
#if !defined(BUG_GIVE_BACK_LAST) && !defined(BUG_DEATH_KEEPS_CLAIM)
    if
    :: ok && CLAIMED_BY(d) -> word_state = PENDING; word_lane = 0
    :: else -> skip
    fi
#endif
  };
  if
#ifndef BUG_DEATH_IGNORES_READY
  :: outstanding && word_gen == generation && word_state == READY && word_lane == d -> Take()
#endif
  :: ok && (word_state == PENDING || CLAIMED_BY(d)) -> BreakUnlessHeld(d)
  :: else
  fi;
  d_step {  // Retire
    ok = 0;
    watched[d] = 0; registered[d] = 0; fired[d] = 0;
    hold[d] = 0; dropping[d] = 0; lane_owner[d] = 0
  }
}

inline HandleEnded(d) {
  if
  :: ended[d] && watched[d] != 0 && (!registered[d] || pidfd[watched[d] - 1]) ->
    d_step {
      ended[d] = 0;
      event_generation = (event == NOTHING -> generation : event_generation)
    };
    OnDeath(d)
  :: else -> ended[d] = 0
  fi
}

proctype Service() {
  byte l, copy, event_generation;
  bit ok, keep;
  mtype event = NOTHING;
  goto sleep;  // it is idle, and armed, when it begins
collect:
  atomic {
    LOCK;
#ifndef ATTACHED
    if
    :: new_lane -> new_lane = 0; goto watch
    :: else
    fi
  };
  goto bits;
watch:
  Watch(0);
# if LANES > 1
  Watch(1);
# endif
bits:
  atomic {
#endif
    if
    :: summary_bit -> summary_bit = 0
    :: else -> goto looked
    fi
#ifdef COARSE
    ;
#else
  };
  atomic {
#endif
    if
    :: ready_bit -> ready_bit = 0; event_generation = generation
    :: else -> goto looked
    fi
  };
  Look();
looked:
#ifdef KILLS
  HandleEnded(0);
# if LANES > 1
  HandleEnded(1);
# endif
#endif
#ifndef BUG_ARM_AFTER_LOOK
  atomic { ARM; UNLOCK };
#else
  UNLOCK;
#endif
  if
  :: event != NOTHING ->
    Complete(event_generation, event);  // Service::Deliver; another thread listens meanwhile
    d_step { event = NOTHING; event_generation = 0 };
    goto collect
  :: else -> event_generation = 0
  fi;
  // Mailbox::Sleep
#if !defined(BUG_ARM_AFTER_LOOK) && !defined(COARSE)
  d_step { ARM };
#endif
  if
  :: summary_bit -> goto collect
  :: else
  fi;
#ifndef ATTACHED
  if
  :: new_lane -> goto collect
  :: else
  fi;
#endif
#ifdef BUG_ARM_AFTER_LOOK
  d_step { ARM };
#endif
sleep:
end_sleep:
  if
#if defined(COARSE) && !defined(FINE_RING)
  :: d_step { pipe_edge -> pipe_edge = 0; pipe_full = 0 }
#else
  :: atomic { pipe_edge -> pipe_edge = 0 };
    pipe_full = 0
#endif
#ifdef KILLS
  :: atomic { registered[0] && !fired[0] && pidfd[watched[0] - 1] -> fired[0] = 1 };
    atomic { !mailbox_lock -> ended[0] = 1 }
# if LANES > 1
  :: atomic { registered[1] && !fired[1] && pidfd[watched[1] - 1] -> fired[1] = 1 };
    atomic { !mailbox_lock -> ended[1] = 1 }
# endif
#endif
  fi;
  goto collect
}

inline Leave() {
#ifdef BUG_LEAVE_LOOKS_FIRST
  if
  :: ready_bit -> d_step { assert(waiters > 0); waiters-- }; Ring()
  :: else -> d_step { assert(waiters > 0); waiters-- }
  fi
#else
  d_step { assert(waiters > 0); waiters-- };
# ifndef BUG_LEAVE_SILENT
  if
  :: ready_bit -> Ring()
  :: else
  fi
# endif
#endif
}

proctype Waiter(byte id; byte g; bit has_limit) {
  byte l, copy;
  bit late;
  mtype event = NOTHING;
end_idle:
  (allocated >= g);
  d_step { in_futex[id] = 1; linked[g]++ };
  waiters++;
  do
  :: true ->
#ifndef BUG_BELL_READ_LATE
    bell_is_as_seen[id] = 1;
#endif
    if
    :: outcome[g] != NOTHING -> break
    :: else
    fi;
    if
    :: word_state == READY && word_gen == g ->
      atomic {
        LOCK;
        if
#ifdef BUG_TAKE_UNCHECKED
        :: true ->
#else
        :: outstanding && generation == g && word_state == READY && word_gen == g ->
#endif
#ifndef BUG_BIT_CLEARED_LATE
          ready_bit = 0;  // it is looked at here and now: leaving need not ring for it
#endif
          goto take
        :: else -> UNLOCK
        fi
      }
    :: else
    fi;
    if
    :: has_limit -> break  // its time may be over at any moment
    :: !late ->
#ifdef BUG_BELL_READ_LATE
      bell_is_as_seen[id] = 1;
#endif
      d_step { asleep[id] = bell_is_as_seen[id] };
end_futex:
      if
      :: !asleep[id]
      :: has_limit -> d_step { asleep[id] = 0; late = 1 }  // looks once more, and leaves
      fi
    fi
  od;
  goto leave;
take:
  Take();
  UNLOCK;
#ifdef BUG_BIT_CLEARED_LATE
  ready_bit = 0;
#endif
leave:
  bell_is_as_seen[id] = 0;
#ifdef BUG_COMPLETE_BEFORE_LEAVE
  if
  :: event == VALUE ->
    Complete(g, VALUE);
# ifdef CALLBACK
end_callback:
    (outcome[2] != NOTHING);
# endif
  :: else
  fi;
  Leave();
#else
  Leave();
  if
  :: event == VALUE ->
    Complete(g, VALUE);
# ifdef CALLBACK
end_callback:
    (outcome[2] != NOTHING);
# endif
  :: else -> skip
  fi;
#endif
  d_step { event = NOTHING; linked[g]--; in_futex[id] = 0; late = 0 }
}

inline Allocate(g) {
  atomic {
    !mailbox_lock && !outstanding ->
#ifndef COARSE
    mailbox_lock = 1
  };
  d_step {
#endif
    generation = g; outstanding = 1; handed_over = 0;
#ifdef BUG_ALLOCATE_RESETS_WAITERS
    waiters = 0;
#endif
#ifdef BUG_HELD_GOES_BACK
    held = 0;
#endif
#ifndef COARSE
  };
  d_step {
    UNLOCK;
#endif
    word_state = PENDING; word_gen = g; word_lane = 0; allocated = g
  }
}

inline Retract(g) {
  if
  :: d_step {
       !mailbox_lock && outstanding && generation == g && IS_PENDING(g) ->
       word_state = FREE; outstanding = 0
     };
     Complete(g, OWN)
  :: !mailbox_lock && !(outstanding && generation == g && IS_PENDING(g))
  fi
}

#define AT_HOME 255  // kAtHome: no lane's

inline ClaimAtHome(g) {
  if
  :: d_step {
       !mailbox_lock && outstanding && generation == g && IS_PENDING(g) ->
       word_state = CLAIMED; word_lane = AT_HOME
     };
     if
     :: true ->  // FulfilAtHome
       d_step {
         !mailbox_lock ->
         assert(outstanding && word_state == CLAIMED && word_lane == AT_HOME && word_gen == g);
         word_state = FREE; word_lane = 0; outstanding = 0
       };
       Complete(g, OWN)
     :: true ->  // AbandonAtHome
       d_step {
         !mailbox_lock -> mailbox_lock = 1;
         assert(outstanding && word_state == CLAIMED && word_lane == AT_HOME && word_gen == g);
         word_state = PENDING; word_lane = 0
       };
#ifndef BUG_HOME_ABANDON_SILENT
       SetBits(); Ring();  // whoever dropped it meanwhile saw it claimed
#endif
       UNLOCK
     fi
  :: !mailbox_lock && !(outstanding && generation == g && IS_PENDING(g))
  fi
}

proctype Owner() {
  Allocate(1);
#if defined(HOME) || defined(HANDOVER)
  ClaimAtHome(1);
#endif
#if defined(MUST_RETRACT)
  Retract(1);
#elif defined(CAN_RETRACT)
  if
  :: true -> Retract(1)
  :: true -> skip
  fi;
#endif
#if GENERATIONS == 2
end_full:
  Allocate(2);
# if defined(CAN_RETRACT)
  if
  :: true -> Retract(2)
  :: true -> skip
  fi
# endif
#endif
}

proctype Kernel() {
end:
  do
  :: doomed[0] && !dead[0] ->
    d_step {
      dead[0] = 1;
#ifdef COARSE
      pidfd[0] = 1;
#endif
      if
      :: in_flight && !token_sent -> heirs[1]--; in_flight = 0; token_lost = 1
      :: else -> skip
      fi;
      LoseHeir(0)
    }
  :: dead[0] && !pidfd[0] -> pidfd[0] = 1
#if PRODUCERS > 1
  :: doomed[1] && !dead[1] ->
    d_step {
      dead[1] = 1;
#ifdef COARSE
      pidfd[1] = 1;
#endif
      if
      :: in_flight -> heir_of[1] = 1; in_flight = 0; token_lost = 1
      :: else -> skip
      fi;
      LoseHeir(1)
    }
  :: dead[1] && !pidfd[1] -> pidfd[1] = 1
#endif
  od
}

inline CheckFuture(g) {
  if
  :: allocated >= g ->
    if
    :: published[g] -> assert(outcome[g] == VALUE)
    :: !published[g] && was_held[g] && !token_lost ->
#ifdef ONLY_PUBLISH
      assert(heirs[g] != 0 || outcome[g] != NOTHING)  // who could not claim it keeps its hold
#else
      assert(heirs[g] == 0);
      assert(outcome[g] == BROKEN || outcome[g] == OWN)
#endif
    :: else -> skip
    fi
  :: else -> skip
  fi
}

inline CheckLane(p) {  // a dead producer's lane is free again
  if
  :: dead[p] && attached[p] ->
    assert(lane_owner[0] != p + 1 && lane_owner[LANES - 1] != p + 1)
  :: else -> skip
  fi
}

proctype Monitor() {
end:
  timeout;
  d_step {
  CheckFuture(1);
  CheckLane(0);
#if GENERATIONS == 2
  CheckFuture(2);
#endif
#if PRODUCERS == 2
  CheckLane(1);
#endif
#if WAITERS > 0
  assert(!in_futex[0] || outcome[1] == NOTHING
# ifdef CALLBACK
         || outcome[2] == NOTHING
# endif
  );
#endif
#if WAITERS == 2
  assert(!in_futex[1] || outcome[GENERATIONS] == NOTHING);
#endif
  assert(!mailbox_lock)
  }
}

init {
  atomic {
    armed = 1;
#ifdef ATTACHED
# ifdef HANDOVER
    lane_owner[0] = 2; watched[0] = 2; registered[0] = 1;
    lane_owner[1] = 1; watched[1] = 1; registered[1] = 1;
    // Another producer has just dropped the promise.
    ready_bit = 1; summary_bit = 1; armed = 0; pipe_full = 1; pipe_edge = 1;
# else
    lane_owner[0] = 1; watched[0] = 1; registered[0] = 1;
#  if LANES > 1
    lane_owner[1] = 2; watched[1] = 2; registered[1] = 1;
#  endif
# endif
#endif
    if  // whom the kernel will kill
    :: true
#ifdef KILL_0
    :: doomed[0] = 1
#endif
#ifdef KILL_1
    :: doomed[1] = 1
#endif
#ifdef KILL_BOTH
    :: doomed[0] = 1; doomed[1] = 1
#endif
    fi;
    run Producer(0);
#if PRODUCERS == 2
    run Producer(1);
#endif
#ifdef RESERVED
    run Reservation();
#endif
    run Service();
    run Owner();
#ifdef KILLS
    run Kernel();
#endif
#if defined(CALLBACK)
    run Waiter(0, 1, 0);
#elif WAITERS == 1
    if
    :: run Waiter(0, 1, 0)
    :: run Waiter(0, 1, 1)
    fi;
#elif WAITERS == 2
    run Waiter(0, 1, 1);
    run Waiter(1, GENERATIONS, 0);
#endif
    run Monitor()
  }
}
