// A model of the memory of large values (csrc/dtorch/shm/lane_memory.cpp; ConsumerLane and
// Mailbox::GiveBack in mailbox.cpp), for the checker spin: blocks that are lent, sent and given back,
// and regions that outlive their producer.
// `make model` runs it; `tests/model.sh blocks [MISTAKE]` shows the steps to an error.
//
// Three values. Either one producer sends them all, or a second one, in the same lane but with a region
// of its own, sends the last: the first is killed then. A region has two blocks.
//
//   Producer()  LaneMemory: TakeBackReturned, Allocate, Share, Free; promise.empty, which lends a block
//               before the value is there; a value that could not be written. It may be killed.
//   Consumer()  Mailbox::Take, OnDeath (ConsumerLane::Retire), OnChildrenEnded.
//   Dropper()   a thread of the consumer that drops one tensor: Mailbox::GiveBack.
//   Child()     a process that the consumer forks, which looks at what was received until then.
//   Monitor()   runs when nothing can move any more: blocks that nobody uses are free, regions of
//               dead producers of which nothing is used are punched out.
//
// Whoever has a tensor, the lender too, finds in it what was written, as long as he has it: asserted
// where he drops it, since nothing brings back what was overwritten.
//
// All that the consumer does with lanes is done under its lock, but for the stack of returned blocks,
// which the producer empties at any time. What a producer has taken off that is its own.
//
// Left out: sizes and offsets, pages that are given back (cold blocks); descriptors that say what is
// not so; regions whose number comes round; memory that was lent when the producer forked, which is
// not used again (KeepLoans) and whose region a child's lane keeps (Lane::forked_from).

#define FIRST(r) (2 * (r))          // a region's blocks
#define REGION(b) ((b) / 2)
#define OFFSET(b) ((b) % 2)         // the same in every region: by it a lane names them
#define NO_BLOCK 4

// Block::users
#define CONSUMER 1
#define LENDER 2

// ---- Shared memory --------------------------------------------------------------------------------

byte lane_owner = 1;                // Lane::owner, 1 more than the producer
byte returned = NO_BLOCK;           // Lane::returned, an offset
byte next[4] = NO_BLOCK;            // BlockHeader::next, an offset
byte content[4];                    // the value that was written last, counted from 1
bit punched[2];
byte sent[3] = NO_BLOCK;            // in a slot, published

// ---- The producers' memory ------------------------------------------------------------------------

byte users[4];                      // LaneMemory::live_
bit dead;                           // the first producer
bit lives;                          // ... never is

// ---- The consumer's memory ------------------------------------------------------------------------

bit mailbox_lock;
byte watched = 1;                   // Mailbox::lanes_, 1 more than the producer
bit retired[2];                     // ConsumerLane::retired_
byte tensor[3] = NO_BLOCK;          // what was received
bit before_fork[3];                 // ... in an earlier epoch than the child's
byte deferred[3] = NO_BLOCK;        // Mailbox::deferred_
bit has_child;                      // Mailbox::children_

bit forked, child_ended;
byte childs_block[3] = NO_BLOCK;    // what the child looks at

#define IS_THERE(b, v) (content[b] == (v) + 1 && !punched[REGION(b)])

// ---- Producers ------------------------------------------------------------------------------------

inline Free(b, user) {  // inside of a d_step
  if
  :: users[b] & user ->
#if defined(BUG_FREE_FOR_ALL)
    users[b] = 0
#else
    users[b] = users[b] - user
#endif
  :: else -> skip
  fi
}

inline TakeBackReturned() {
  d_step {
    block = returned; returned = NO_BLOCK;
    do
    :: block != NO_BLOCK && (users[FIRST(id) + block] & CONSUMER) ->
      Free(FIRST(id) + block, CONSUMER);
      block = next[FIRST(id) + block]
    :: else -> break
    od;
    block = NO_BLOCK
  }
}

inline Send(v) {
  TakeBackReturned();
  d_step {  // Allocate
    lent = NO_BLOCK;
    block = (users[FIRST(id)] == 0 -> FIRST(id) :
             (users[FIRST(id) + 1] == 0 -> FIRST(id) + 1 : NO_BLOCK))
  };
  if
  :: block == NO_BLOCK
  :: block != NO_BLOCK ->
    if
    :: users[block] = CONSUMER
    :: d_step { users[block] = LENDER; lent = block }
    fi;
    content[block] = v + 1;
    if
    :: d_step {
         users[block] = users[block] | CONSUMER;  // Share
         sent[v] = block; block = NO_BLOCK
       }
    :: d_step { Free(block, CONSUMER); block = NO_BLOCK }  // it could not be written
    fi;
    if
    :: d_step { lent != NO_BLOCK -> assert(IS_THERE(lent, v)); Free(lent, LENDER); lent = NO_BLOCK }
    :: else
    fi
  fi
}

proctype Producer(byte id) {
  byte block = NO_BLOCK, lent = NO_BLOCK;
end_no_lane:
  if
  :: id == 0  // it has its lane
  :: d_step { id == 1 && lane_owner == 0 -> lane_owner = 2 }
  fi;
  {
    if
    :: id == 0 ->
      Send(0);
      Send(1);
      if
      :: lives -> Send(2); TakeBackReturned()
      :: else
      fi
    :: else -> Send(2)
    fi
  } unless { id == 0 && dead };
  d_step { block = NO_BLOCK; lent = NO_BLOCK };
end_done:
  false
}

// ---- The consumer ---------------------------------------------------------------------------------

#define USES(r, v) ((tensor[v] != NO_BLOCK && REGION(tensor[v]) == (r)) || \
                    (deferred[v] != NO_BLOCK && REGION(deferred[v]) == (r)))
#define IN_USE(r) (watched == (r) + 1 || USES(r, 0) || USES(r, 1) || USES(r, 2))

// Its ConsumerLane goes with whatever kept it last.
inline Release(r) {  // inside of a d_step
  if
  :: retired[r] && !IN_USE(r) -> punched[r] = 1
  :: else -> skip
  fi
}

#if defined(BUG_RETURNED_TO_THE_NEXT)
# define TAKES_BACK(b) true
#else
# define TAKES_BACK(b) (!retired[REGION(b)])
#endif

// ConsumerLane::GiveBack. Locked; the producer may empty the stack in between.
inline Push(b) {
  if
  :: TAKES_BACK(b) ->
    do
    :: d_step { top = returned; next[b] = top };  // which nobody sees yet
      if
#if defined(BUG_PUSHED_UNCHECKED)
      :: returned = OFFSET(b); break
#else
      :: d_step { returned == top -> returned = OFFSET(b) }; break
      :: returned != top
#endif
      fi
    od;
    top = NO_BLOCK
  :: !TAKES_BACK(b)
  fi
}

inline Take(v) {
  d_step {
    !mailbox_lock && sent[v] != NO_BLOCK ->
    tensor[v] = sent[v]; sent[v] = NO_BLOCK;
    before_fork[v] = !forked
  }
}

inline HandBack(v) {  // of those that were deferred; its child has ended
  if
  :: deferred[v] != NO_BLOCK ->
    Push(deferred[v]);
    d_step { r = REGION(deferred[v]); deferred[v] = NO_BLOCK; Release(r); r = 0 }
  :: else
  fi
}

proctype Consumer() {
  byte top = NO_BLOCK, r;
end:
  do
  :: d_step { watched == 0 && lane_owner != 0 && !mailbox_lock -> watched = lane_owner }
  :: Take(0)
  :: Take(1)
  :: Take(2)
  :: d_step {  // what the dead has published is taken first
       dead && watched == 1 && !mailbox_lock && sent[0] == NO_BLOCK && sent[1] == NO_BLOCK ->
       watched = 0; retired[0] = 1; lane_owner = 0; returned = NO_BLOCK;
#if defined(BUG_PUNCHED_AT_DEATH)
       punched[0] = 1
#else
       Release(0)
#endif
     }
  :: atomic { child_ended && has_child && !mailbox_lock -> has_child = 0; mailbox_lock = 1 };
     HandBack(0); HandBack(1); HandBack(2);
     mailbox_lock = 0
  od
}

proctype Dropper(byte v) {
  byte top = NO_BLOCK, r;
end_never:
  tensor[v] != NO_BLOCK;
  if
  :: true ->
    atomic {
      !mailbox_lock -> mailbox_lock = 1;
      assert(IS_THERE(tensor[v], v));
      if
#if !defined(BUG_GIVES_BACK_A_CHILDS)
      :: has_child && before_fork[v] ->
# if defined(BUG_DEFERRED_WITHOUT_LANE)
        deferred[v] = (retired[REGION(tensor[v])] -> NO_BLOCK : tensor[v]);
# else
        deferred[v] = tensor[v];
# endif
        goto gone
#endif
      :: else
      fi
    };
    Push(tensor[v]);
gone:
    atomic { r = REGION(tensor[v]); tensor[v] = NO_BLOCK; Release(r); r = 0; mailbox_lock = 0 }
  :: true  // it is kept
  fi;
end_done:
  false
}

inline See(v) { childs_block[v] = tensor[v] }
inline Unsee(v) {
  assert(childs_block[v] == NO_BLOCK || IS_THERE(childs_block[v], v));
  childs_block[v] = NO_BLOCK
}

proctype Child() {
end_no_fork:
  if
  :: d_step { !mailbox_lock -> forked = 1; has_child = 1; See(0); See(1); See(2) }
  :: goto end_done
  fi;
  if
  :: d_step { Unsee(0); Unsee(1); Unsee(2); child_ended = 1 }
  :: true  // it does not end
  fi;
end_done:
  false
}

proctype Kernel() {
  if
  :: d_step { !lives -> dead = 1 }
  :: true
  fi;
end_done:
  false
}

#define ON_STACK(b) \
  (lane_owner == REGION(b) + 1 && (returned == OFFSET(b) || \
   (returned != NO_BLOCK && next[FIRST(REGION(b)) + returned] == OFFSET(b))))
#define CONSUMER_HAS(b) \
  (tensor[0] == (b) || tensor[1] == (b) || tensor[2] == (b) || \
   deferred[0] == (b) || deferred[1] == (b) || deferred[2] == (b))

inline CheckBlock(b) {
  assert(retired[REGION(b)] || (users[b] == 0) == (!CONSUMER_HAS(b) && !ON_STACK(b)))
}

proctype Monitor() {
end:
  timeout;
  d_step {
    assert(!mailbox_lock);
    assert(sent[0] == NO_BLOCK && sent[1] == NO_BLOCK && sent[2] == NO_BLOCK);
    assert(!dead || (retired[0] && punched[0] == !IN_USE(0)));
    assert(!punched[1]);
    CheckBlock(0); CheckBlock(1); CheckBlock(2); CheckBlock(3)
  }
}

init {
  atomic {
    if
    :: lives = 1
    :: true
    fi;
    run Producer(0); run Producer(1);
    run Consumer();
    run Dropper(0); run Dropper(1); run Dropper(2);
    run Child(); run Kernel(); run Monitor()
  }
}
