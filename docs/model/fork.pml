// A model of the fork of a producer (csrc/dtorch/shm/attachment.cpp, ForkOfAttachments), for the
// checker spin: how its child comes by what it holds, whoever is killed meanwhile.
// `make model` runs it; `tests/model.sh fork [MISTAKE]` shows the steps to an error.
//
// What stands here for what:
//
//   Parent()    the thread that forks: Prepare, BeforeFork, fork(), InParent, AfterForkInParent; then
//               it drops the promise, or keeps it.
//   Child()     InChild, AfterForkInChild, ClaimLane; then the same.
//   Consumer()  Mailbox::Scan: WatchNewLanes, TryWatchProcess, IsInFork, Look, OnDeath,
//               BreakUnlessHeld.
//   Kernel()    ends either, or both, at any step, by kill or by exec: no more steps, and what it had
//               open is closed.
//   Monitor()   runs when nothing can move any more, and asks whether all has happened that must:
//                 - a promise that nobody can fulfil any more is broken, and no other;
//                 - the fork has returned in a parent that lives, and its lane says so;
//                 - the lanes of the dead are free.
//               That a promise is not broken which somebody living can fulfil is asserted where it
//               is broken, too: the child counts from the instant of the fork.
//
// The child closes its copy of the parent's pipe last: until it has taken over, a consumer that watches
// the pipe takes the parent for alive. Where a pidfd is watched instead (`may_open` is false), and where
// the parent's lane is looked at for the first time after its death, when its pipe cannot be opened any
// more, a killed parent is seen as such at once, and one assumption is made of time: kForkGrace is not
// over before a child that lives has taken over. BUG_GRACE_TOO_SHORT is what comes without it: a child
// that stands still for that long, and whose parent was killed in the middle of the fork, loses the
// promise.
//
// A process that was killed before it announced its lane is found when the next one is announced:
// the monitor announces one, and looks at the lanes then.
//
// A child whose parent had no pipe to wait on (Prepare) takes nothing over. BUG_PARENT_GOES_ON is also what
// would come of it if it did.
//
// Left out: what slot.pml shows, bells and claims above all: the consumer wakes up here if there is
// something to see. Tokens passed on; several slots, generations and mailboxes (each attachment has
// its lane, its lock and its count); a child that forks (it is a parent by then); regions.

mtype = { NOWHERE, PIPE, PIDFD, GONE };  // what the consumer watches of a process
mtype = { LIVES, KILLED, EXECED };       // a process, as a producer

#define PARENT 0
#define CHILD 1
#define NOBODY 2

// ---- Shared memory --------------------------------------------------------------------------------

bit pending = 1;             // Slot::word; what is not pending is broken
bit handovers_as_seen;       // Slot::handovers: has it the value that was read?
bit ready_bit;
bit new_lane;                // Header::new_lane
byte lane_owner[2];          // Lane::owner, 1 more than the process; 0 is kFreeLane
bit hold[2];
bit dropping[2];             // Lane::dropping
bit alive[2];                // Lane::alive, Lane::alive_inode
byte forking[2];             // Lane::forking

// ---- The kernel -----------------------------------------------------------------------------------

bit alive_open[2];           // the process has the writing end of its pipe
bit childs_copy;             // the child has its parent's
bit parent_works, child_works;  // the ends of the pipe that the parent waits on
bit forked, no_pipe;
mtype life[2] = LIVES;

#define DEAD(p) (life[p] != LIVES)     // takes no further step
#define PIDFD_FIRES(p) (life[p] == KILLED)
#define PIPE_ENDED(p) (!alive_open[p] && ((p) == CHILD || !childs_copy))

// ---- The consumer's own memory --------------------------------------------------------------------

byte watched[2];             // Mailbox::lanes_: the process, counted from 1
mtype watch[2] = NOWHERE;    // ConsumerLane::watch
bit unwatched[2];            // Mailbox::unwatched_
bit grace[2];                // ConsumerLane::grace: it has begun
bit may_open;                // the consumer may look at the producers' descriptors

// ---- Bookkeeping of the proof ---------------------------------------------------------------------

byte parents;                // the parent's lane
bit heir[2];                 // lives, and may fulfil the promise
bit taken_over;              // the child's handler has done its work
bit returned;                // the fork has, in the parent

#define IN_HANDLER (forked && !DEAD(CHILD) && !taken_over)

// ---- Producers ------------------------------------------------------------------------------------

inline Drop(p, lane) {
  d_step { dropping[lane] = 1; ok = hold[lane]; hold[lane] = 0; heir[p] = 0 };
  d_step { ready_bit = ready_bit || (ok && pending); dropping[lane] = 0 }  // Attend
}

proctype Parent() {
  bit ok;
  {
    // Prepare
#if !defined(BUG_FORKING_LATE)
    forking[parents]++;
#endif
    if
    :: d_step {  // fork()
         forked = 1; parent_works = 1; child_works = 1; childs_copy = 1; heir[CHILD] = heir[PARENT]
       }
    :: d_step {  // ... for which no pipe was to be had: the child takes nothing over
         forked = 1; no_pipe = 1; childs_copy = 1
       }
    :: true  // it fails
    fi;
    // InParent
#if defined(BUG_FORKING_LATE)
    forking[parents]++;
#elif defined(BUG_FORKING_CLEARED_FIRST)
    forking[parents]--;
#endif
#if !defined(BUG_PARENT_KEEPS_END)
    parent_works = 0;
#endif
#if !defined(BUG_PARENT_GOES_ON)
end_read:
    (!child_works && !parent_works);
#endif
#if !defined(BUG_FORKING_STAYS) && !defined(BUG_FORKING_CLEARED_FIRST)
    forking[parents]--;
#endif
    returned = 1;
    if
    :: Drop(PARENT, parents)
    :: true  // it lives on, with its hold
    fi
  } unless { DEAD(PARENT) };
  ok = 0;
end_done:
  false
}

inline Copy() {
  if
  :: hold[parents] ->
#if defined(BUG_COUNTED_FIRST)
    handovers_as_seen = 0;
#endif
    hold[lane] = 1;
#if !defined(BUG_UNCOUNTED) && !defined(BUG_COUNTED_FIRST)
    handovers_as_seen = 0
#endif
  :: else
  fi
}

inline TakeOver() {
  // ClaimLane
  if
  :: no_pipe -> goto inert
  :: !no_pipe -> goto inert  // it has no descriptors
  :: d_step { !no_pipe -> alive_open[CHILD] = 1; lane = 1 - parents; lane_owner[lane] = CHILD + 1 }
  fi;
#if defined(BUG_ANNOUNCED_LAST)
  Copy();
#endif
  alive[lane] = 1;
  new_lane = 1;
  if
  :: alive_open[CHILD] = 0; goto inert  // no memory can be mapped
#if !defined(BUG_ANNOUNCED_LAST)
  :: Copy()
#else
  :: true
#endif
  fi;
#if !defined(BUG_CHILD_KEEPS_PIPE)
  childs_copy = 0;  // until now the parent has counted as alive
#endif
  d_step { taken_over = 1; child_works = 0 }
}

proctype Child() {
  byte lane;
  bit ok;
end_forked:
  (forked);
  {
#if defined(BUG_CLAIM_AFTER_FORK)
    child_works = 0;
#endif
    TakeOver();
    if
    :: Drop(CHILD, lane)
    :: true  // it lives on, with its hold
    fi;
    goto done;
inert:
    if
    :: d_step { taken_over = 1; child_works = 0; childs_copy = 0; heir[CHILD] = 0 }
    fi;
done:
    skip
  } unless { DEAD(CHILD) };
  d_step { ok = 0; lane = 0 };
end_done:
  false
}

// ---- The consumer ---------------------------------------------------------------------------------

inline TryWatchProcess(l) {  // inside of a d_step
  unwatched[l] = 0;
  if
  :: alive[l] && may_open -> watch[l] = (alive_open[watched[l] - 1] -> PIPE : GONE)
  :: else -> watch[l] = (PIDFD_FIRES(watched[l] - 1) -> GONE : PIDFD)
  fi
}

inline Watch(l) {  // inside of a d_step
  if
  :: !watched[l] && lane_owner[l] -> watched[l] = lane_owner[l]; TryWatchProcess(l)
#if !defined(BUG_WATCHED_ONCE)
  :: watched[l] && watch[l] == PIDFD && alive[l] -> TryWatchProcess(l)
#endif
  :: else -> skip
  fi
}

#define HAS_ENDED(l) \
  (watch[l] == GONE || (watch[l] == PIPE && PIPE_ENDED(watched[l] - 1)) || \
   (watch[l] == PIDFD && PIDFD_FIRES(watched[l] - 1)))

// It has ended: OnDeath up to BreakUnlessHeld, if it is not in a fork. Inside of a d_step.
inline HandleEnded(l) {
  if  // IsInFork: the first look begins the grace
#if defined(BUG_DEATH_IGNORES_FORKING)
#elif defined(BUG_GRACE_FOR_EVER)
  :: forking[l] -> unwatched[l] = 1; watch[l] = NOWHERE
#elif defined(BUG_GRACE_TOO_SHORT)
  :: forking[l] && !grace[l] -> unwatched[l] = 1; watch[l] = NOWHERE; grace[l] = 1
#else
  :: forking[l] && (!grace[l] || IN_HANDLER) -> unwatched[l] = 1; watch[l] = NOWHERE; grace[l] = 1
#endif
  :: else ->  // what the dead wrote no longer changes
    dying = l;
    look = dropping[l] || hold[l];
    hold[l] = 0
  fi
}

#if defined(BUG_GRACE_FOR_EVER)
# define GRACE_IS_OVER(l) (unwatched[l] && !forking[l])
#elif defined(BUG_GRACE_TOO_SHORT)
# define GRACE_IS_OVER(l) unwatched[l]
#else
# define GRACE_IS_OVER(l) (unwatched[l] && !IN_HANDLER)
#endif

// The parts of a Scan() are taken in any order here: nothing depends on it.
proctype Consumer() {
  byte dying = NOBODY;
  bit keep, look;
end_sleep:
  do
  :: d_step { new_lane -> new_lane = 0; Watch(0); Watch(1) }
  :: d_step { GRACE_IS_OVER(0) -> TryWatchProcess(0) }
  :: d_step { GRACE_IS_OVER(1) -> TryWatchProcess(1) }
  :: atomic {
       if
       :: d_step { ready_bit -> ready_bit = 0; look = 1 }  // Look
       :: d_step { HAS_ENDED(0) -> HandleEnded(0) }
       :: d_step { HAS_ENDED(1) -> HandleEnded(1) }
       fi;
       if
       :: look && pending ->  // BreakUnlessHeld
         d_step { look = 0; handovers_as_seen = 1 }
       :: else -> look = 0; goto done
       fi
     };
     keep = (lane_owner[0] && hold[0]);
     keep = keep || (lane_owner[1] && hold[1]);
     keep = keep || !handovers_as_seen;
     d_step {
       if
       :: !keep && pending ->
         assert(!heir[PARENT] && !heir[CHILD]);
         pending = 0
       :: else -> skip
       fi;
       keep = 0; handovers_as_seen = 0
     };
done:
     if
     :: dying == NOBODY
     :: d_step {
          dying != NOBODY ->  // Retire
          watched[dying] = 0; watch[dying] = NOWHERE; grace[dying] = 0; unwatched[dying] = 0;
          hold[dying] = 0; dropping[dying] = 0; alive[dying] = 0; forking[dying] = 0;
          lane_owner[dying] = 0; dying = NOBODY
        }
     fi
  od
}

// ---- The end of processes, and of everything ------------------------------------------------------

// A process that has ended takes no further step. That those who see it may do so late is enough:
// what it had open is closed, and its pidfd tells, in the same instant.
inline End(p, how) {
  life[p] = how; heir[p] = 0;
  alive_open[p] = 0;
  if
  :: p == CHILD -> childs_copy = 0; child_works = 0
  :: else -> parent_works = 0
  fi
}

// A pidfd does not tell of an exec. (The parent is never watched by one if its pipe can be: to the
// consumer its exec is as its end. A child has no thread but the one in the handler, which calls
// none.)
proctype Kernel() {
  do
  :: d_step { !DEAD(PARENT) -> End(PARENT, KILLED) }
  :: d_step { !DEAD(CHILD) && forked -> End(CHILD, KILLED) }
  :: d_step { !DEAD(CHILD) && taken_over && may_open -> End(CHILD, EXECED) }
  :: break  // no more of that
  od;
end_done:
  false
}

proctype Monitor() {
end:
  timeout;
  d_step {
    assert(DEAD(PARENT) || returned);
    assert(DEAD(PARENT) || forking[parents] == 0);
    assert(DEAD(CHILD) || !forked || taken_over);
    assert(pending == (heir[PARENT] || heir[CHILD]));
    new_lane = 1
  };
end_too:
  timeout;
  d_step {
    assert(!DEAD(PARENT) || lane_owner[parents] != PARENT + 1);
    assert(!DEAD(CHILD) || lane_owner[1 - parents] != CHILD + 1)
  }
}

init {
  atomic {
    if  // which of the lanes is looked at first
    :: parents = 0
    :: parents = 1
    fi;
    if
    :: may_open = 1
    :: true
    fi;
    alive_open[PARENT] = 1; heir[PARENT] = 1;
    lane_owner[parents] = PARENT + 1; alive[parents] = 1; hold[parents] = 1;
    // The parent's lane was just announced, and another producer has just dropped the promise: the
    // consumer may look at both at once, or at any time later.
    new_lane = 1; ready_bit = 1;
    run Parent(); run Child(); run Consumer();
    run Kernel(); run Monitor()
  }
}
