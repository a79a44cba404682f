#pragma once

#include "dtorch/base/api.h"
#include "dtorch/shm/address.h"
#include "dtorch/shm/layout.h"
#include "dtorch/sys/fd.h"
#include "dtorch/sys/mapping.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace dtorch::shm {

class ConsumerLane;

/// What a producer has published, checked and out of its reach: a copy of the description, and the
/// bytes, which stay until this object goes. Move-only.
struct Received {
  Payload payload = Payload::kNothing;
  uint8_t dtype = 0;
  std::vector<int64_t> sizes;
  uint64_t bytes = 0;
  std::byte* data = nullptr;
  std::shared_ptr<void> keep;  // a block of a lane, or memory of our own
  std::string defect;          // what is wrong with it; empty if nothing
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

  /// pending -> free, for the owner: it fulfils the promise itself, or gives it up. False if a
  /// producer has claimed it before.
  bool Retract(Place place);

  struct Event {
    Place place;
    bool broken;        // nobody is left who could fulfil it
    Received received;  // otherwise
  };
  /// What has happened since the last call, of any thread; each event is told once. Never blocks.
  std::vector<Event> Collect();

  /// Sleeps until there may be something to collect, Stop(), or the time is over (false; -1 is no
  /// limit). Several threads may: one is woken.
  bool Sleep(int timeout_ms);
  /// Ends the Sleep() of all threads, now and for ever.
  void Stop();
  /// In a forked child, which has none of its parent's duties: lets go of the descriptors. What the
  /// child has inherited of received tensors stays mapped.
  void CloseInChild();

  struct Stats {
    uint64_t outstanding;  // slots that are not free
    uint64_t producers;    // lanes that are claimed
    uint64_t unclaimed;    // outstanding promises whose token nobody has unpickled
  };
  Stats GetStats();

 private:
  struct Local {
    uint32_t generation = 0;
    bool outstanding = false;
  };

  void Free(Place place);      // the slot has left its last state
  uint32_t LanesUsed() const;  // what the header says, made safe
  bool IsHeld(Place place) const;
  bool Watch(uint32_t lane);  // false if nobody has claimed it
  void WatchNewLanes();
  void OnDeath(uint32_t lane, std::vector<Event>& events);
  void Look(uint32_t slot, std::vector<Event>& events);  // at one slot that wants attention
  void Take(Place place, uint32_t lane, std::vector<Event>& events);
  void BreakUnlessHeld(Place place, SlotWord from, std::vector<Event>& events);

  Fd memory_;
  Mapping mapping_;
  Meta meta_;
  Fd bell_read_, bell_write_, stop_, epoll_;
  Address address_;

  std::mutex mutex_;  // guards what follows, and the consumer's moves of slots
  std::vector<Local> locals_;
  std::vector<uint32_t> free_;
  std::vector<std::shared_ptr<ConsumerLane>> lanes_;  // by index; null if not watched
  std::vector<uint32_t> ended_;                       // lanes whose process seems to have ended
};

}  // namespace dtorch::shm
