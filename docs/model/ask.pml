// A model of a claimant that asks for memory of the consumer's device (csrc/dtorch/shm/attachment.cpp,
// Ask, WaitForAnswer, Abandon; mailbox.cpp, HearQuestion, Answer), for the checker spin: claimed ->
// asking -> answering -> claimed, or forsaken.
// `make model` runs it; `tests/model.sh ask [MISTAKE]` shows the steps to an error.
//
// One slot, and two questions: of two producers, or of one that claims the promise again after it has
// abandoned it, or claims the slot's second generation.
//
//   Producer()  Claim, Ask, WaitForAnswer, Prepare, Publish, Abandon, Drop. One of them may be killed
//               between any two steps. It has a time limit, or none; with one it takes its question
//               back at any time, and goes on through the host.
//   Listener()  the consumer's listening thread: Mailbox::Look, HearQuestion, Take, OnDeath,
//               BreakUnlessHeld.
//   Worker()    a thread of the consumer that gets the memory (Service::Answer; a driver takes its
//               time) and answers: Mailbox::Answer. It takes the
//               questions in any order.
//   Owner()     gives the promise up at any time (Mailbox::GiveUp), and allocates the slot anew.
//   Monitor()   runs when nothing can move any more: nobody waits for an answer; no claim is a dead
//               one's; memory has gone, but what a value lies in that was received, and what the slot
//               may still hand on; what was published has arrived.
//
// Asserted where it happens: an answer is that to the claimant's own question; a value that was taken
// is whole, and the memory that came with it is its claimant's; no memory goes that a living claimant
// was given, before its claim has ended; none goes twice.
//
// The claimant looks after the consumer every 50 ms. That it would find its answer then is no excuse for
// a lost wake-up, and is left out.
//
// A question has a number, by which it differs from an earlier one of the same lane in the same
// generation. In the code that is Description::block, counted by the lane's process, and beside it an id
// that the consumer gives each question it hears: only equality matters.
//
// Left out: what slot.pml shows, bits and bells and the order of holds: the listener wakes up here if
// there is something to see. Descriptions that say what is not so. The death of the consumer.
//
// Mistakes that were made once in the code:
//   BUG_ANSWERS_UNMARKED   the claimant takes its question back, and writes its value, while the answer
//                          is being written to the same place
//   BUG_ASKED_BY_LANE      who asks again, after it has abandoned its claim, is not heard; or is given
//                          what it had asked for before

mtype = { FREE, PENDING, CLAIMED, ASKING, ANSWERING, FORSAKEN, READY };
mtype = { NOTHING, VALUE, BROKEN, OWN };

#define NUMBERS 3                   // 0 is none

// Description, as one: whose it is, and what
#define QUESTION(n) (n)
#define GRANTED(n) (8 + (n))
#define REFUSED(n) (16 + (n))
#define IN_HOST(n) (24 + (n))
#define ON_DEVICE(n) (32 + (n))

// ---- Shared memory --------------------------------------------------------------------------------

mtype word_state = PENDING;         // Slot::word
byte word_lane, word_gen = 1;
byte description;
byte number;                        // Description::block, as counted by Ask
bit answers_as_seen[2];             // ... and as the futex: has it the value that the claimant read?
bit ready_bit;
byte hold[2] = 1;                   // the generation
byte held = 1;                      // Slot::held

// ---- The kernel -----------------------------------------------------------------------------------

bit dead[2], doomed[2];
bit asleep[2];                      // in futex_wait on `answers`

// ---- The consumer's own memory --------------------------------------------------------------------

bit mailbox_lock;
bit outstanding = 1;                // Local
byte generation = 1;
bit unwanted;
byte asked;                         // the question that was told last
byte memory;                        // the number of the question that it was given for
bit handled[2];                     // the lane is retired
bit told[NUMBERS];                  // questions: the workers may answer them in any order
byte told_lane[NUMBERS], told_generation[NUMBERS], told_question[NUMBERS];
mtype outcome[3] = NOTHING;

// ---- Bookkeeping of the proof ---------------------------------------------------------------------

bit used_twice, two;                // the slot; or there are two producers, and the promise is not given up

bit exists[NUMBERS];                // memory: it was made, and has not gone
byte uses[2];                       // the number of the memory that the claimant was told of
byte last_number[2];                // of the claimant's question
byte written;                       // what was published and not taken: the number of its question
bit granted;                        // ... and whether it lies in memory that was given for that

#define IS(state, l, g) (word_state == state && word_lane == (l) && word_gen == (g))
#define MOVE(state) word_state = state
#define TO_PENDING word_state = PENDING; word_lane = 0

inline Release(n) {  // inside of a d_step
  if
  :: (n) != 0 ->
    assert(exists[n]);
    assert((uses[0] != (n) || dead[0]) && (uses[1] != (n) || dead[1]));
    exists[n] = 0
  :: else -> skip
  fi
}

// ---- Producers ------------------------------------------------------------------------------------

// In one step: what others may do in between, slot.pml shows.
inline Drop() {
  d_step {
    ready_bit = ready_bit || (hold[id] != 0 && word_state == PENDING && word_gen == hold[id]);
    hold[id] = 0
  }
}

#if defined(BUG_TAKEN_BACK_UNCHECKED)
# define STILL_ASKS true
#else
# define STILL_ASKS IS(ASKING, id, g)
#endif

// `next` is the generation that it claims afterwards.
proctype Producer(byte id; bit limited; byte g; byte next) {
again:
  {
    if
    :: hold[id] == g
    :: hold[id] != g ->
      Drop();
end_token:
      d_step { generation == g -> hold[id] = g; held = g }  // Hold
    fi;
    if
    :: d_step { word_state == PENDING && word_gen == g -> MOVE(CLAIMED); word_lane = id }
    :: !(word_state == PENDING && word_gen == g) -> goto over
    fi;
    // Ask
#if !defined(BUG_NUMBERED_LAST)
    d_step { number++; last_number[id] = number };
#else
    last_number[id] = number + 1;
#endif
    description = QUESTION(last_number[id]);
    d_step {
      assert(IS(CLAIMED, id, g));
      MOVE(ASKING);
#if !defined(BUG_ASK_SILENT)
      ready_bit = 1
#endif
    };
#if defined(BUG_NUMBERED_LAST)
    number++;
#endif
    if
    :: true
    :: goto abandon  // while it asks
    fi;
    do  // WaitForAnswer
    :: true ->
#if !defined(BUG_ANSWERS_READ_LATE)
      answers_as_seen[id] = 1;
#endif
      if
      :: IS(CLAIMED, id, g) -> goto answered
      :: limited && IS(ASKING, id, g) ->  // its time is over
        if
        :: d_step { STILL_ASKS -> MOVE(CLAIMED); word_lane = id; answers_as_seen[id] = 0 }; goto publish
        :: !STILL_ASKS
        fi
      :: else ->
#if defined(BUG_ANSWERS_READ_LATE)
        answers_as_seen[id] = 1;
#endif
        d_step { asleep[id] = answers_as_seen[id] };
end_futex:
        if
        :: !asleep[id]
        :: limited && IS(ASKING, id, g) -> asleep[id] = 0
        fi
      fi
    od;
answered:
    atomic {
      assert(description == GRANTED(last_number[id]) || description == REFUSED(last_number[id]));
      answers_as_seen[id] = 0;
      uses[id] = (description == GRANTED(last_number[id]) -> last_number[id] : 0)
    };
    if
    :: true
    :: goto abandon
    fi;
publish:
    description = (uses[id] -> ON_DEVICE(last_number[id]) : IN_HOST(last_number[id]));  // Prepare
    d_step {
      uses[id] = 0;
      assert(IS(CLAIMED, id, g));
      MOVE(READY); written = last_number[id]; granted = (description == ON_DEVICE(written));
      ready_bit = 1
    };
    goto over;
abandon:
    uses[id] = 0;
    do
    :: true ->
#if !defined(BUG_ABANDON_CLAIMED_FIRST)
      if
      :: d_step { IS(ASKING, id, g) -> TO_PENDING }; break
      :: else
      fi;
      if  // it was answered in between
      :: d_step { IS(CLAIMED, id, g) -> TO_PENDING }; break
      :: else
      fi;
#if defined(BUG_ABANDON_ANSWERED)
      if
      :: d_step { IS(ANSWERING, id, g) -> TO_PENDING }; break
      :: else
      fi
#else
      if  // the description is being written to
      :: d_step { IS(ANSWERING, id, g) -> MOVE(FORSAKEN) };
# if !defined(BUG_FORSAKE_SILENT)
        ready_bit = 1;
# endif
        break
      :: else
      fi
#endif
#else
      if
      :: d_step { IS(CLAIMED, id, g) -> TO_PENDING }; break
      :: else
      fi;
      if
      :: d_step { IS(ASKING, id, g) -> TO_PENDING }; break
      :: else -> break
      fi
#endif
    od;
over:
    atomic { answers_as_seen[id] = 0; last_number[id] = 0; g = next; next = 0 };
    if
    :: g != 0 -> goto again
    :: g == 0
    fi;
    Drop()
  } unless { dead[id] };
  d_step { answers_as_seen[id] = 0; last_number[id] = 0; g = 0; next = 0 };
end_done:
  false
}

// ---- The consumer ---------------------------------------------------------------------------------

#define LOCK !mailbox_lock -> mailbox_lock = 1
#define UNLOCK mailbox_lock = 0
#define FIND(g) (outstanding && generation == (g))

inline Free(how) {  // inside of a d_step
  word_state = FREE; word_lane = 0; outstanding = 0; unwanted = 0;
  Release(memory); memory = 0;
  assert(outcome[generation] == NOTHING);
  outcome[generation] = how
}

inline Take() {  // inside of a d_step. What was received is dropped at once
  assert(description == (granted -> ON_DEVICE(written) : IN_HOST(written)));
  assert(!granted || memory == written);
  Free(VALUE);
  written = 0; granted = 0; description = 0
}

inline BreakUnlessHeld() {  // inside of a d_step
  if
  :: IS(PENDING, 0, generation) && outstanding &&
     (unwanted || (held == generation && hold[0] != generation && hold[1] != generation)) ->
    Free(BROKEN)
  :: else -> skip
  fi
}

#if defined(BUG_DEATH_IGNORES_ASKING)
# define CLAIMED_BY(d) (IS(CLAIMED, d, generation) || IS(FORSAKEN, d, generation))
#elif defined(BUG_DEATH_IGNORES_FORSAKEN)
# define CLAIMED_BY(d) (IS(CLAIMED, d, generation) || IS(ASKING, d, generation))
#else
# define CLAIMED_BY(d) (IS(CLAIMED, d, generation) || IS(ASKING, d, generation) || \
                        IS(FORSAKEN, d, generation))
#endif

inline OnDeath(d) {
  atomic { dead[d] && !handled[d] && !mailbox_lock ->
    d_step {
      handled[d] = 1; hold[d] = 0;
      if
      :: outstanding && IS(READY, d, generation) -> Take()
      :: outstanding && CLAIMED_BY(d) ->
        Release(memory); memory = 0;
#if defined(BUG_ASKED_BY_LANE)
        asked = 0;
#endif
        TO_PENDING
      :: else -> skip
      fi;
      BreakUnlessHeld()
    }
  }
}

proctype Listener() {
  byte n, lane;
end_sleep:
  do
  :: OnDeath(0)
  :: OnDeath(1)
  :: atomic { ready_bit && !mailbox_lock -> mailbox_lock = 1; ready_bit = 0 };
    // Look
#if !defined(BUG_NUMBER_READ_LATE)
    n = number;
#endif
    if
    :: d_step { outstanding && word_gen == generation && word_state == READY -> Take() }
    :: d_step { outstanding && IS(PENDING, 0, generation) -> BreakUnlessHeld() }
    :: d_step {
        outstanding && word_gen == generation && word_state == FORSAKEN ->
        TO_PENDING;
        BreakUnlessHeld()
      }
    :: atomic {
        outstanding && word_gen == generation && word_state == ASKING ->  // HearQuestion
        lane = word_lane
      };
#if defined(BUG_NUMBER_READ_LATE)
      n = number;
#endif
      d_step {
        if
#if defined(BUG_ASKED_BY_LANE)
        :: asked != lane + 1 -> asked = lane + 1;
#else
        :: asked != n -> asked = n;
#endif
          told[n] = 1; told_lane[n] = lane; told_generation[n] = generation;
          told_question[n] = description
        :: else -> skip
        fi
      }
    :: else
    fi;
    d_step { n = 0; lane = 0; UNLOCK }
  od
}

#if defined(BUG_ANSWER_TO_ANY_LANE)
# define IS_ASKED (word_state == ASKING && word_gen == g)
#elif defined(BUG_ANSWER_UNCHECKED)
# define IS_ASKED true
#else
# define IS_ASKED IS(ASKING, lane, g)
#endif

inline GetTold() {  // inside of a d_step
  lane = told_lane[n]; g = told_generation[n]; question = told_question[n];
  told[n] = 0; told_lane[n] = 0; told_generation[n] = 0; told_question[n] = 0
}

proctype Worker() {
  byte lane, g, n, question, made;
end_idle:
  do
  :: d_step { told[1] -> n = 1; GetTold() };
    goto answer
  :: d_step { told[2] -> n = 2; GetTold() };
answer:
    if  // the device refuses, or it does not
    :: d_step { true -> exists[n] = 1; made = n }
    :: true
    fi;
    atomic { LOCK };
    if
    :: FIND(g)
    :: !FIND(g) -> goto out
    fi;
#if defined(BUG_ANSWERS_UNMARKED)
    if
    :: IS_ASKED
    :: else -> goto out
    fi;
#else
    if
    :: d_step { IS_ASKED -> MOVE(ANSWERING); word_lane = lane }
    :: else -> goto out
    fi;
# if !defined(BUG_ASKED_BY_LANE) && !defined(BUG_ANSWER_TO_ANY_QUESTION)
    if
    :: number == n
    :: number != n ->  // another one
      if
      :: d_step { IS(ANSWERING, lane, g) -> MOVE(ASKING) }
      :: else
      fi;
      goto out
    fi;
# endif
#endif
    description = (made -> GRANTED(question) : REFUSED(question));
#if defined(BUG_ANSWERS_UNMARKED)
    if
    :: d_step { IS_ASKED -> MOVE(CLAIMED) }
    :: else -> goto out
    fi;
#elif defined(BUG_ANSWERED_UNCHECKED)
    MOVE(CLAIMED);
#else
    if
    :: d_step { IS(ANSWERING, lane, g) -> MOVE(CLAIMED) }
    :: else -> goto out
    fi;
#endif
#if defined(BUG_MEMORY_UNLOCKED)
    UNLOCK;
#endif
    if
    :: d_step { made -> Release(memory); memory = made; made = 0 }
    :: !made
    fi;
#if !defined(BUG_ANSWER_SILENT)
    d_step { answers_as_seen[0] = 0; answers_as_seen[1] = 0 };
    d_step { asleep[0] = 0; asleep[1] = 0 };
#endif
out:
    UNLOCK;
    d_step { Release(made); made = 0; lane = 0; g = 0; n = 0; question = 0 }
  od
}

proctype Owner() {
  if
  :: !two ->  // GiveUp
    if
    :: d_step { !mailbox_lock && FIND(1) && IS(PENDING, 0, 1) -> Free(OWN) }
    :: d_step { !mailbox_lock && FIND(1) && !IS(PENDING, 0, 1) -> unwanted = 1 }
    :: !mailbox_lock && !FIND(1)
    fi
  :: true
  fi;
end_full:
  d_step {  // Allocate
    !mailbox_lock && !outstanding && used_twice ->
    generation = 2; outstanding = 1; word_state = PENDING; word_gen = 2
#if defined(BUG_ASKED_BY_LANE)
    ; asked = 0
#endif
  };
end_done:
  false
}

proctype Kernel() {
end:
  do
  :: d_step { doomed[0] && !dead[0] -> dead[0] = 1; asleep[0] = 0 }
  od
}

proctype Monitor() {
end:
  timeout;
  d_step {
    assert(!mailbox_lock);
    assert(!asleep[0] && !asleep[1]);
    assert(hold[0] == 0 || hold[0] == 2 || dead[0]);
    // Nobody is left who could do anything.
    assert(word_state == FREE || (word_state == PENDING && held != generation));
    assert(outcome[1] != NOTHING);
    assert(!exists[0] && !exists[1] && !exists[2])
  }
}

init {
  bit limited;
  atomic {
    if  // whom the kernel kills
    :: true
    :: doomed[0] = 1
    fi;
    if
    :: limited = 1
    :: true
    fi;
    if
    :: run Producer(0, limited, 1, 1); hold[1] = 0
    :: run Producer(0, limited, 1, 2); hold[1] = 0; used_twice = 1
    :: two = 1; run Producer(0, limited, 1, 0); run Producer(1, 0, 1, 0)
    fi;
    limited = 0;
    run Listener(); run Worker();
    run Owner(); run Kernel(); run Monitor()
  }
}
