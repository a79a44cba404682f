// A model of who listens in a consumer (csrc/dtorch/file/service.cpp, Run, Deliver, End::Look;
// Mailbox::Collect, CollectOne, Sleep, WakeAnother), for the checker spin: callbacks may block on other
// futures, and then another thread must look for those.
// `make model` runs it; `tests/model.sh listen [MISTAKE]` shows the steps to an error.
//
// Two futures. The first has a callback that does not return before the second is complete: it waits
// for it, or is blocked by other means (an event that another callback sets, say). The second may have
// a callback as well, and may be waited for by a thread.
//
//   Producer()  publishes one of them.
//   Listener()  Service::Run: collects, delivers, sleeps; starts another if none would listen.
//   Waiter()    a thread that waits for the second.
//   Monitor()   runs when nothing can move any more: both futures are complete, the waiter has
//               returned, and one thread sleeps that the next producer will wake.
//
// What slot.pml shows in small steps (bits, arming, the bell's pipe, bells of slots) is taken together
// here. A listener that is one too many may leave at any time. That it would look before it does, when
// its time is over, is no excuse for a lost wake-up, and is left out.
//
// Left out: crashes and broken promises (slot.pml: they are found as values are); a thread that
// cannot be started; and a callback that is added in the very moment in which its future is
// completed, if it then blocks by other means than a wait. (BUG_LATE_BLOCKS is that; it is no mistake but
// a limit: what was found together with that future waits until something else wakes a thread.)

#define LISTENERS 3

mtype = { NONE, WAITS, BLOCKS, LATE_WAITS, LATE_BLOCKS };  // the first future's callback
mtype = { UNPUBLISHED, READY, TAKEN };

// ---- Shared memory, and the kernel ----------------------------------------------------------------

mtype word_state[2] = UNPUBLISHED;
bit ready_bit[2];
bit armed;
byte waiters;                       // of the second
bit bell_is_as_seen;                // Slot::bell of the second; one thread at most waits for it
bit pipe_full, pipe_edge;

// ---- The consumer ---------------------------------------------------------------------------------

bit found[2];                       // Mailbox::found_
byte listening = 1;                 // Service::listening_
bit runs[LISTENERS] = 0;            // the threads
bit outcome[2];
mtype callback = NONE;
bit second_has_callback;

bit sleeps_on;                      // the second thread sleeps from the beginning
bit waiter_is_back;                 // bookkeeping

#define HAS_MORE (found[0] || found[1])

#define ALARM pipe_edge = pipe_edge || !pipe_full; pipe_full = 1  // no new edge if it is not empty
#define RING \
  pipe_edge = pipe_edge || (armed && !pipe_full); pipe_full = pipe_full || armed; armed = 0
#if defined(BUG_WAKE_IF_ARMED)
# define WAKE_ANOTHER RING
#else
# define WAKE_ANOTHER ALARM
#endif

proctype Producer(byte slot) {
  d_step { word_state[slot] = READY; ready_bit[slot] = 1 };
  if
  :: slot == 1 && waiters != 0 -> bell_is_as_seen = 0
  :: else -> d_step { RING }
  fi
}

// A thread waits for the second future.
inline Wait() {
  waiters++;
  do
  :: bell_is_as_seen = 1;
    // End::Look
#if !defined(BUG_LOOK_IGNORES_FOUND)
    if
    :: d_step { HAS_MORE -> WAKE_ANOTHER }
    :: else
    fi;
#endif
    if
    :: d_step {
         word_state[1] == READY && second_has_callback ->
#if !defined(BUG_LOOK_WAKES_NOBODY)
         WAKE_ANOTHER
#endif
       }
    :: atomic {
         word_state[1] == READY && !second_has_callback ->  // CollectOne
         ready_bit[1] = 0; word_state[1] = TAKEN; waiters--;
         goto took
       }
    :: word_state[1] != READY
    fi;
    if
    :: outcome[1] -> break
    :: else
    fi;
end_futex:
    !bell_is_as_seen
  od;
  waiters--;
  if
  :: d_step { ready_bit[1] -> RING }
  :: else
  fi;
  goto back;
took:
  if
  :: d_step { ready_bit[1] -> RING }
  :: else
  fi;
  outcome[1] = 1;
back:
  bell_is_as_seen = 0
}

// About to deliver: one less listens. Inside of an atomic.
inline LetAnotherListen() {
  listening--;
#if !defined(BUG_NOBODY_LISTENS)
  if
  :: listening == 0 && !runs[0] -> runs[0] = 1; listening++
  :: listening == 0 && runs[0] && !runs[1] -> runs[1] = 1; listening++
  :: listening == 0 && runs[0] && runs[1] -> assert(!runs[2]); runs[2] = 1; listening++
  :: else
  fi
#endif
}

proctype Listener(byte id) {
end_not_started:
  runs[id];
  if
  :: id == 1 && sleeps_on -> sleeps_on = 0; goto end_sleep
  :: else
  fi;
collect:
  atomic {
    if
    :: !HAS_MORE ->  // Scan
      found[0] = (ready_bit[0] && word_state[0] == READY);
      found[1] = (ready_bit[1] && word_state[1] == READY);
      word_state[0] = (found[0] -> TAKEN : word_state[0]);
      word_state[1] = (found[1] -> TAKEN : word_state[1]);
      ready_bit[0] = 0; ready_bit[1] = 0; armed = 1
    :: else
    fi;
    if
    :: found[0] -> found[0] = 0; LetAnotherListen(); goto first
    :: found[1] -> found[1] = 0; LetAnotherListen(); goto second
    :: else
    fi
  };
  // Sleep; that it arms once more makes no difference.
  if
  :: ready_bit[0] || ready_bit[1] -> goto collect
#if !defined(BUG_SLEEP_IGNORES_FOUND)
  :: HAS_MORE -> goto collect
  :: !(ready_bit[0] || ready_bit[1] || HAS_MORE)
#else
  :: !(ready_bit[0] || ready_bit[1])
#endif
  fi;
end_sleep:
  if
  :: d_step { pipe_edge -> pipe_edge = 0; pipe_full = 0 }; goto collect
#if defined(BUG_ALL_LEAVE)
  :: d_step { listening--; runs[id] = 0 }; goto end_not_started
#else
  :: d_step { listening > 1 -> listening--; runs[id] = 0 }; goto end_not_started
#endif
  fi;
first:  // Deliver
  if
#if !defined(BUG_DELIVER_WAKES_NOBODY)
  :: d_step { callback == WAITS || callback == BLOCKS -> WAKE_ANOTHER; outcome[0] = 1 }
#endif
  :: else -> outcome[0] = 1
  fi;
  if
  :: callback == WAITS || callback == LATE_WAITS -> Wait()
  :: callback == BLOCKS || callback == LATE_BLOCKS -> outcome[1]
  :: callback == NONE
  fi;
  goto delivered;
second:
  if
#if !defined(BUG_DELIVER_WAKES_NOBODY)
  :: d_step { second_has_callback -> WAKE_ANOTHER }
#endif
  :: else
  fi;
  d_step { outcome[1] = 1; bell_is_as_seen = 0 };
delivered:
  atomic { listening++; goto collect }
}

proctype Waiter() {
  Wait();
  waiter_is_back = 1
}

proctype Monitor() {
end:
  timeout;
  d_step {
    assert(outcome[0] && outcome[1] && waiter_is_back);
    assert(listening >= 1 && (armed || pipe_edge));
    assert(waiters == 0)
  }
}

init {
  atomic {
    waiter_is_back = 1;
    if
    :: callback = WAITS
    :: callback = LATE_WAITS
#ifdef BUG_LATE_BLOCKS
    :: callback = LATE_BLOCKS
#endif
    :: callback = BLOCKS
    :: callback = BLOCKS; waiter_is_back = 0; run Waiter()
    :: waiter_is_back = 0; run Waiter()
    fi;
    if
    :: true
    :: second_has_callback = 1
    fi;
    // Two listen, of whom one is about to sleep; so it is after a callback that took its time.
    listening = 2; runs[0] = 1; runs[1] = 1;
    if
    :: run Producer(0)
    :: // It was found together with another that was delivered since; a ring that has woken somebody
      // else has disarmed the bell of the one that sleeps.
      word_state[0] = TAKEN; found[0] = 1; sleeps_on = 1
    fi;
    run Producer(1);
    run Listener(0); run Listener(1); run Listener(2);
    run Monitor()
  }
}
