#pragma once

#include "dtorch/base/api.h"
#include "dtorch/shm/address.h"
#include "dtorch/shm/keepsake.h"
#include "dtorch/shm/layout.h"
#include "dtorch/sys/fd.h"
#include "dtorch/sys/mapping.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dtorch::shm {

class ConsumerLane;

/// What a producer has published, checked and out of its reach: a copy of the description, and the
/// bytes, which stay until this object goes. Move-only.
struct Received {
  Payload payload = Payload::kNothing;
  uint8_t dtype = 0;
  uint8_t device_type = 0;
  int8_t device_index = 0;
  std::vector<int64_t> sizes;
  uint64_t bytes = 0;
  std::byte* block = nullptr;                   // of a lane, where the bytes are; or null
  std::shared_ptr<void> keep;                   // the block
  std::shared_ptr<void> memory;                 // of a device, where the bytes are; or null
  std::array<std::byte, kInlineBytes> in_slot;  // where they are if there is no block
  std::string defect;                           // what is wrong with it; empty if nothing

  const std::byte* data() const { return block ? block : in_slot.data(); }
};

/// What a producer has asked for: memory of a device.
struct Question {
  uint64_t id = 0;
  uint32_t lane = 0;
  uint8_t device_type = 0;
  int8_t device_index = 0;
  uint64_t bytes = 0;
  std::shared_ptr<Keepsake> keepsake;  // of the producer
};

/// The consumer's end of the shared memory: slots for its outstanding promises, and word of what
/// becomes of them. See layout.h for the states.
///
/// One for each process that has pickled a promise. The memory is this process's: a value that was
/// published survives its producer. Nobody but processes of the same user can open it, and nobody
/// can shrink it (sealed). Thread-safe.
class DTORCH_API Mailbox {
 public:
  /// std::system_error if the kernel refuses the memory.
  Mailbox();
  ~Mailbox();

  const Address& address() const { return address_; }

  struct Place {
    uint32_t slot;
    uint32_t generation;
  };
  /// free -> pending. std::runtime_error if all slots are taken.
  Place Allocate();

  /// pending -> free, for the owner: it fulfils or cancels the promise itself, or gives it up.
  /// False if a producer has claimed it before.
  bool Retract(Place place, bool cancelled = false);

  /// Nobody waits for the promise any more.
  void GiveUp(Place place);

  /// The token has been made. Until then a promise is here only because of a fork, and the owner's
  /// own object keeps it alive; from then on only its producers do.
  void HandOut(Place place);
  /// The owner's own object has gone.
  void OwnerDropped(Place place);
  /// This process is a producer of its own promise, having unpickled its token. Counted.
  void HoldAtHome(Place place);
  void DropAtHome(Place place);
  /// What it holds is passed on: not broken before whoever gets it has dropped it.
  void HandOverAtHome(Place place);
  /// pending -> claimed, for a value that is still to come. False if another one has claimed it
  /// before. Followed by one of the next two.
  bool ClaimAtHome(Place place);
  /// claimed -> free: the value is there.
  void FulfilAtHome(Place place);
  /// claimed -> pending: it is not to come. Breaks the promise if nobody holds it.
  void AbandonAtHome(Place place);

  /// Between these a thread waits for this very promise: the bell, a counter, is increased, and
  /// woken as a shared futex, when the promise is fulfilled. Before the thread sleeps, and behind
  /// every change of the bell, it looks with IsReady(). What it collects it completes behind
  /// EndWait().
  void BeginWait(Place place);
  void EndWait(Place place);
  std::atomic<uint32_t>& bell(Place place) const { return meta_.slot(place.slot).bell; }
  bool IsReady(Place place) const;
  bool IsPending(Place place) const;

  struct Event {
    Place place;
    bool broken;                       // nobody is left who could fulfil it
    Received received;                 // otherwise
    std::optional<Question> question;  // in place of either: the promise is still outstanding
  };
  /// The next thing that has happened; each event is told once, to whichever thread asks. nullopt
  /// if there is none. Never blocks.
  std::optional<Event> Collect();
  /// Whether events have been found that nobody has been told yet. A thread that may not come back
  /// for them soon calls WakeAnother().
  bool HasMore() const { return found_count_.load() > 0; }
  /// Whether what was published takes a device to deliver. Of a promise that is ready.
  bool NeedsDevice(Place place) const;
  /// The same for one promise, by a thread that waits for it; nullopt if it is not ready.
  std::optional<Event> CollectOne(Place place);
  /// Answers the question of the producer that has claimed the promise, in at most kInlineBytes.
  /// `memory` comes back with what it publishes, or goes when the claim does. An empty text: there
  /// is no such memory.
  void Answer(Place place, const Question& question, std::string_view text,
              std::shared_ptr<void> memory);

  /// Takes back what Collect() has told, for another thread: WakeAnother().
  void PutBack(Event event);

  /// Between these the thread looks out for events itself, without sleeping: nobody rings. What it
  /// leaves is passed on to the thread that sleeps in Sleep(). To be kept short.
  void BeginLookOut();
  void EndLookOut();
  /// Whether there may be something to collect.
  bool HasNews() const;

  /// Has a thread that sleeps in Sleep() look, whether or not the bell is armed: it is not if a
  /// ring has woken another thread, which may be in a callback for long.
  void WakeAnother();

  /// Sleeps until there may be something to collect, Stop(), or the time is over (false; -1 is no
  /// limit). Several threads may: one is woken.
  bool Sleep(int timeout_ms);
  /// Ends the Sleep() of all threads, now and for ever.
  void Stop();

  /// Around a fork, in the forking thread. A child may fulfil what is outstanding, and looks at the
  /// tensors that were received: both for as long as a pipe that it inherits is open. The child has
  /// none of its parent's duties and lets go of all descriptors but that one; what it has inherited
  /// of received tensors stays mapped.
  void BeforeFork();
  void AfterForkInParent();
  void AfterForkInChild();

  struct Stats {
    uint64_t outstanding;     // promises in slots
    uint64_t unclaimed;       // of these, those whose token nobody has unpickled
    uint64_t producers;       // processes that have attached themselves and live
    uint64_t received_bytes;  // of tensors that lie in producers' lanes, and live
    uint64_t memory_bytes;    // of the mailbox, caches included, that the kernel has given pages
  };
  Stats GetStats();

 private:
  struct Local {
    uint32_t generation = 0;
    uint32_t waiters = 0;  // threads, some of which may wait for an earlier generation
    uint32_t holds_at_home = 0;
    uint32_t allocated_at = 0;  // the epoch
    bool outstanding = false;
    bool handed_out = false;
    bool owner_dropped = false;
    bool held_at_home = false;     // ever
    bool unwanted = false;         // the future was dropped while a producer had claimed it
    uint64_t question = 0;         // its id, once it was told; 0 is none
    uint64_t question_number = 0;  // the claimant's
    std::shared_ptr<void> memory;  // which the claimant was given
  };
  // Epochs are counted by forks: a child has inherited what was made before its own.
  struct Child {
    uint32_t epoch;
    Fd alive;  // readable when the child, and those that it has forked, have ended or called exec
  };
  struct DeferredBlock {
    uint32_t epoch;
    std::shared_ptr<ConsumerLane> lane;
    uint64_t offset;
  };

  void Arm();  // whoever publishes from now on rings, unless somebody looks out
  void OnEvent(uint64_t event);
  void TryWatchProcess(uint32_t lane);
  void Ring();  // as a producer does: if the bell is armed
  void Attend(uint32_t slot);
  Local* Find(Place place);  // nullptr if it is not outstanding
  bool ChildHasSeen(uint32_t epoch) const;
  void OnChildrenEnded(std::vector<Event>& events);
  void GiveBack(const std::shared_ptr<ConsumerLane>& lane, uint64_t offset, uint64_t bytes,
                uint32_t epoch);
  void Free(Place place);      // the slot has left its last state
  uint32_t LanesUsed() const;  // what the header says, made safe
  bool IsHeld(Place place) const;
  bool Watch(uint32_t lane);  // false if nobody has claimed it
  void WatchNewLanes();
  bool IsInFork(uint32_t lane);  // ended in the middle of it, a moment ago
  void OnDeath(uint32_t lane, std::vector<Event>& events);
  void Scan();
  void Look(uint32_t slot, std::vector<Event>& events);  // at one slot that wants attention
  void Take(Place place, uint32_t lane, std::vector<Event>& events);
  void HearQuestion(Place place, uint32_t lane, std::vector<Event>& events);
  void BreakUnlessHeld(Place place, std::vector<Event>& events);  // a pending one

  Fd memory_;
  Mapping mapping_;
  Meta meta_;
  Fd bell_read_, bell_write_, stop_, epoll_;
  Address address_;
  std::atomic<uint32_t> armed_count_{0};
  std::atomic<uint32_t> summary_used_{0};  // words of it; what the header says is not to be trusted
  std::atomic<uint32_t> looking_out_{0};   // threads between BeginLookOut() and EndLookOut()

  std::mutex mutex_;  // guards what follows, and the consumer's moves of slots
  std::deque<Local> locals_;
  std::vector<uint32_t> free_;
  std::vector<std::shared_ptr<ConsumerLane>> lanes_;  // by index; null if not watched
  std::deque<Event> found_;
  std::atomic<size_t> found_count_{0};      // its size
  std::vector<uint32_t> unwatched_;         // lanes whose process cannot be watched now
  std::atomic<size_t> unwatched_count_{0};  // its size
  std::vector<uint32_t> ended_;             // lanes whose process seems to have ended
  uint32_t epoch_ = 0;
  std::vector<Child> children_;
  std::vector<uint32_t> ended_children_;  // their epochs
  std::vector<DeferredBlock> deferred_;   // which a child may still look at
  std::atomic<uint64_t> received_bytes_{0};
  uint64_t received_blocks_ = 0;
  uint64_t questions_ = 0;
};

}  // namespace dtorch::shm
