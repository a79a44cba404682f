// A model of threads that look out (csrc/dtorch/file/service.cpp, LookOut, DeliverNext; Mailbox::
// BeginLookOut, EndLookOut, Arm, HasNews, PutBack), for the checker spin: a thread that is about to wait
// silences the bell, and sees to what comes.
// `make model` runs it; `tests/model.sh lookout [MISTAKE]` shows the steps to an error.
//
// Two futures. Each may be waited for by a thread. The second may have a callback, which may not return
// before the first is complete, because it waits for it, or is blocked by other means.
//
//   Producer()  publishes one of them: Publish, Ring. One of them may be killed between any two steps.
//   Waiter()    looks out, or does not; then waits as in slot.pml.
//   Listener()  Service::Run: collects, delivers, sleeps. Another one takes its place while it is in a
//               callback.
//   Monitor()   runs when nothing can move any more: both futures are complete, with the value if it was
//               published; all threads have returned; the bell is armed, and a listener sleeps that
//               hears it.
//
// How long a thread looks out is left open: it may stop at any time, with or without an event.
// Collect() is taken in four steps under its lock: the bits with the slots that they name, Arm's look at
// who looks out, the arming, what was found.
//
// Left out: what slot.pml and listen.pml show. And a callback that is added in the very moment in which its
// future is completed by a thread that looks out, if it then blocks by other means than a wait.
// (BUG_LATE_BLOCKS is that: nobody arms the bell until it returns.)

mtype = { NONE, RETURNS, WAITS, BLOCKS, LATE_WAITS, LATE_BLOCKS };  // the second future's callback
mtype = { PENDING, READY, TAKEN };

// ---- Shared memory, and the kernel ----------------------------------------------------------------

mtype word_state[2] = PENDING;
bit ready_bit[2], summary_bit;
bit armed;                          // as in slot.pml: 0, or another number each time,
byte armed_as_seen;                 // ... a bit for each producer that has read the present one
byte waiters[2];
bit bell_is_as_seen[2];             // for each thread that waits
bit pipe_full, pipe_edge;
bit dead[2], doomed[2], death_seen[2];

// ---- The consumer ---------------------------------------------------------------------------------

bit mailbox_lock;
byte looking_out;                   // Mailbox::looking_out_
bit found[2];                       // Mailbox::found_
bit events[2];                      // of the Scan() that runs
bit ended[2];                       // Mailbox::ended_
bit outcome[2];
mtype callback = NONE;
byte waits_for[2];                  // the threads' futures; 2 is none
bit returned[2];
bit runs[2];                        // the listeners

#define HAS_MORE (found[0] || found[1])
#define HAS_NEWS (summary_bit || HAS_MORE)
#define ALARM pipe_edge = pipe_edge || !pipe_full; pipe_full = 1  // no new edge if it is not empty
#define RING \
  pipe_edge = pipe_edge || (armed && !pipe_full); pipe_full = pipe_full || armed; armed = 0
#define ARM armed = 1; armed_as_seen = 0

// By whomever. The bells of those who wait for it are rung.
#define COMPLETE(s) \
  outcome[s] = 1; \
  bell_is_as_seen[0] = bell_is_as_seen[0] && waits_for[0] != (s); \
  bell_is_as_seen[1] = bell_is_as_seen[1] && waits_for[1] != (s)

#define RUNS_CALLBACKS(s) ((s) == 1 && (callback == RETURNS || callback == WAITS || callback == BLOCKS))

proctype Producer(byte s) {
  {
    d_step { word_state[s] = READY; ready_bit[s] = 1; summary_bit = 1 };
    if
    :: waiters[s] != 0 ->
      d_step {
        bell_is_as_seen[0] = bell_is_as_seen[0] && waits_for[0] != s;
        bell_is_as_seen[1] = bell_is_as_seen[1] && waits_for[1] != s
      }
    :: else ->
      if
      :: d_step { armed -> armed_as_seen = armed_as_seen | (1 << s) };
        d_step { ALARM };
        d_step { armed = armed && !(armed_as_seen & (1 << s)) }
      :: else
      fi
    fi
  } unless { dead[s] };
end_done:
  false
}

// ---- The consumer's threads -----------------------------------------------------------------------

inline Find(s) {  // inside of a d_step
  if
  :: word_state[s] == READY -> word_state[s] = TAKEN; events[s] = 1
  :: else -> skip
  fi
}

inline OnDeath(s) {  // inside of a d_step; nobody else holds the promise
  if
  :: ended[s] && word_state[s] != TAKEN -> word_state[s] = TAKEN; events[s] = 1
  :: else -> skip
  fi;
  ended[s] = 0
}

inline Arm() {
#if defined(BUG_LISTENER_DISARMS)
  if
  :: looking_out == 0 -> d_step { ARM }
  :: else -> armed = 0
  fi
#else
  if
  :: looking_out == 0 -> d_step { ARM }
  :: else  // the last of them does it
  fi
#endif
}

// What it has found is `event`; 2 is none.
inline Collect() {
  if
  :: d_step { !mailbox_lock && HAS_MORE -> mailbox_lock = 1 }
  :: d_step {
      !mailbox_lock && !HAS_MORE ->
      mailbox_lock = 1; summary_bit = 0;
      if
      :: ready_bit[0] -> ready_bit[0] = 0; Find(0)
      :: else -> skip
      fi;
      if
      :: ready_bit[1] -> ready_bit[1] = 0; Find(1)
      :: else -> skip
      fi;
      OnDeath(0); OnDeath(1)
    };
    Arm()
  fi;
  d_step {
    found[0] = found[0] || events[0]; found[1] = found[1] || events[1];
    events[0] = 0; events[1] = 0;
    event = (found[0] -> 0 : (found[1] -> 1 : 2));
    found[0] = 0;
    found[1] = found[1] && event != 1;
    mailbox_lock = 0
  }
}

#define NONE_FOUND 2

proctype Waiter(byte id) {
  byte event = NONE_FOUND;
  bit late;
end_idle:
  atomic { waits_for[id] != 2 };
wait:
  if
  :: true -> goto enter
  :: looking_out++
  fi;
  // BeginLookOut
  armed = 0;
look_out:
  do
  :: HAS_NEWS ->
    Collect();  // DeliverNext
    if
    :: event == NONE_FOUND ->
      if
      :: HAS_MORE -> break
      :: else
      fi
    :: event != NONE_FOUND && RUNS_CALLBACKS(event) ->
      d_step { !mailbox_lock -> found[event] = 1; event = NONE_FOUND };  // PutBack
      if
      :: HAS_MORE -> break
      :: else
      fi
    :: event == 0 || (event == 1 && !RUNS_CALLBACKS(1)) ->
      d_step { COMPLETE(event) };
      if
      :: event == 1 && callback == LATE_WAITS ->
        d_step { event = NONE_FOUND; waits_for[id] = 0; late = 1 };
        goto wait
      :: event == 1 && callback == LATE_BLOCKS -> outcome[0]
      :: else
      fi;
      event = NONE_FOUND
    fi
  :: true -> break  // its time is over, or it is complete
  od;
  // EndLookOut
#if defined(BUG_LOOK_BEFORE_ARM)
  if
  :: d_step { HAS_NEWS -> ALARM }
  :: else
  fi;
#endif
#if defined(BUG_COUNTED_LAST)
  Arm();
  looking_out--;
#elif defined(BUG_LEFT_TO_THE_LISTENER)
  looking_out--;
#else
  looking_out--;
  Arm();
#endif
#if defined(BUG_PUT_BACK_SILENT)
  if
  :: d_step { summary_bit -> ALARM }
  :: else
  fi;
#elif !defined(BUG_LOOK_BEFORE_ARM) && !defined(BUG_LOOK_NEVER)
  if
  :: HAS_NEWS -> d_step { ALARM }
  :: else
  fi;
#endif
  if
  :: outcome[waits_for[id]] -> goto complete  // it does not look again
  :: else
  fi;
enter:
  waiters[waits_for[id]]++;
  do
  :: atomic {
      bell_is_as_seen[id] = 1;
      // End::Look, in one step: slot.pml and listen.pml take it apart
      if
      :: HAS_MORE -> d_step { ALARM }
      :: else
      fi;
      if
      :: word_state[waits_for[id]] == READY && RUNS_CALLBACKS(waits_for[id]) -> d_step { ALARM }
      :: word_state[waits_for[id]] == READY && !RUNS_CALLBACKS(waits_for[id]) && !mailbox_lock ->
        ready_bit[waits_for[id]] = 0; word_state[waits_for[id]] = TAKEN; event = waits_for[id];
        break
      :: word_state[waits_for[id]] != READY
      fi;
      if
      :: outcome[waits_for[id]] -> break
      :: else
      fi
    };
end_futex:
    !bell_is_as_seen[id]
  od;
  atomic { waiters[waits_for[id]]--; bell_is_as_seen[id] = 0 };
  if
  :: d_step { ready_bit[waits_for[id]] -> RING }
  :: else
  fi;
  if
  :: event != NONE_FOUND ->
    d_step { COMPLETE(event) };
    if
    :: event == 1 && callback == LATE_WAITS ->
      d_step { event = NONE_FOUND; waits_for[id] = 0 };
      goto wait
    :: event == 1 && callback == LATE_BLOCKS -> outcome[0]
    :: else
    fi;
    event = NONE_FOUND
  :: else
  fi;
complete:  // what it has waited for, too, if it was in a callback
  if
  :: late -> late = 0; goto look_out
  :: else
  fi;
  returned[id] = 1
}

proctype Listener(byte id) {
  byte event = NONE_FOUND;
end_not_started:
  runs[id];
  goto end_sleep;
collect:
  Collect();
  if
  :: event != NONE_FOUND ->
    // Another listens meanwhile, which makes no difference if it is but for a moment.
    runs[1 - id] = runs[1 - id] || (event == 1 && (callback == WAITS || callback == BLOCKS));
    if  // Deliver
    :: d_step { RUNS_CALLBACKS(event) -> ALARM }
    :: else
    fi;
    d_step { COMPLETE(event) };
    if
    :: event == 1 && callback == WAITS ->  // it does so in place of the second thread
      d_step { waits_for[1] = 0; returned[1] = 0 };
      returned[1]
    :: event == 1 && callback == BLOCKS -> outcome[0]
    :: else
    fi;
    event = NONE_FOUND;
    goto collect
  :: event == NONE_FOUND
  fi;
  // Sleep
  Arm();
  if
  :: HAS_NEWS -> goto collect
  :: else
  fi;
end_sleep:
  if
  :: d_step { pipe_edge -> pipe_edge = 0; pipe_full = 0 }
  :: d_step { dead[0] && !death_seen[0] -> death_seen[0] = 1; ended[0] = 1 }
  :: d_step { dead[1] && !death_seen[1] -> death_seen[1] = 1; ended[1] = 1 }
  fi;
  goto collect
}

proctype Kernel() {
end_spared:
  if
  :: d_step { doomed[0] -> dead[0] = 1 }
  :: d_step { doomed[1] -> dead[1] = 1 }
  fi;
end_done:
  false
}

proctype Monitor() {
end:
  timeout;
  d_step {
    assert(outcome[0] && outcome[1] && returned[0] && returned[1]);
    assert(looking_out == 0 && waiters[0] == 0 && waiters[1] == 0);
    assert(armed || pipe_edge);
    assert(!mailbox_lock)
  }
}

init {
  atomic {
    waits_for[1] = 2; returned[1] = 1;
    if
    :: doomed[0] = 1
    :: doomed[1] = 1
    :: // Two look out at once. The second future has just been published, and the bell rung.
      waits_for[1] = 1; returned[1] = 0;
      word_state[1] = READY; ready_bit[1] = 1; summary_bit = 1; pipe_edge = 1; pipe_full = 1
    :: callback = RETURNS
    :: waits_for[0] = 2; returned[0] = 1; waits_for[1] = 1; returned[1] = 0; callback = LATE_WAITS
#if defined(BUG_LATE_BLOCKS)
    :: waits_for[0] = 2; returned[0] = 1; waits_for[1] = 1; returned[1] = 0; callback = LATE_BLOCKS
#endif
    :: callback = BLOCKS
    :: callback = WAITS
    fi;
    runs[0] = 1; armed = !pipe_edge;
    run Producer(0);
    if
    :: word_state[1] == PENDING -> run Producer(1)
    :: else
    fi;
    run Waiter(0); run Waiter(1);
    run Listener(0); run Listener(1);
    run Kernel(); run Monitor()
  }
}
