#pragma once

#include "dtorch/base/api.h"
#include "dtorch/shm/address.h"
#include "dtorch/shm/layout.h"
#include "dtorch/sys/fd.h"
#include "dtorch/sys/mapping.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace dtorch::shm {

/// The memory of one lane, handed out by the one process that has claimed it. Its books are kept
/// in that process alone; only blocks that the consumer has given back are read from the lane, and
/// checked. Not thread-safe.
///
/// A block is in use for as long as somebody has it: the consumer, to whom it was sent, the
/// lender's tensor (promise.empty), or both.
class LaneMemory {
 public:
  enum class User : uint8_t { kConsumer = 1, kLender = 2 };

  LaneMemory() = default;
  LaneMemory(std::byte* base, Lane* lane, int memory_fd, uint64_t file_offset)
      : base_(base), lane_(lane), memory_fd_(memory_fd), file_offset_(file_offset) {}

  /// A block of at least `bytes`, which `user` has. `cold`: its pages have never been touched, or
  /// were given back.
  struct Allocation {
    uint64_t offset;  // 0 if the lane is full
    bool cold;
  };
  Allocation Allocate(uint64_t bytes, User user);
  /// Another one has it as well. False if that one has it already, or nobody has.
  bool Share(uint64_t offset, User user);
  void Free(uint64_t offset, User user);
  std::byte* At(uint64_t offset) const { return base_ + offset; }
  /// The block that starts at `data` and is lent; 0 if there is none of at least `bytes`.
  uint64_t FindLent(const void* data, uint64_t bytes) const;
  /// Blocks that the consumer has given back are free again.
  void TakeBackReturned();
  /// Gives the pages of free blocks back to the system, until at most `limit` bytes are kept.
  void Trim(uint64_t limit);

  uint64_t cached_bytes() const { return cached_; }
  uint64_t live_bytes() const { return live_bytes_; }

 private:
  struct Block {
    uint64_t size;
    uint8_t users;
  };

  void Punch(uint64_t offset, uint64_t size);

  std::byte* base_ = nullptr;
  Lane* lane_ = nullptr;
  int memory_fd_ = -1;
  uint64_t file_offset_ = 0;
  uint64_t top_ = sizeof(BlockHeader);  // nothing was ever handed out from here on
  uint64_t cached_ = 0;                 // bytes of free blocks that still have their pages
  uint64_t live_bytes_ = 0;
  std::unordered_map<uint64_t, Block> live_;  // by offset
  struct FreeList {
    std::vector<uint64_t> warm, cold;  // offsets; the last of the warm ones was used last
  };
  std::map<uint64_t, FreeList> free_;  // by size
};

/// A producer process's end of another process's mailbox: one for each pair of processes. Claims a
/// lane, holds promises, fulfils them. Thread-safe.
class DTORCH_API Attachment {
 public:
  /// The attachment to `address`, made if there is none. std::runtime_error, which says why, if the
  /// memory cannot be reached: another PID namespace, a process that has gone, no permission.
  static std::shared_ptr<Attachment> To(const Address& address);

  /// All of this process.
  static std::vector<std::shared_ptr<Attachment>> All();

  explicit Attachment(const Address& address);
  ~Attachment();

  const Address& address() const { return address_; }

  /// Whether the process that waits still runs.
  bool OwnerLives() const;

  /// This process may fulfil the promise from now on; its death without having done so is a broken
  /// promise, if it was the last that held it. Holds are counted: one for each Hold().
  void Hold(uint32_t slot, uint32_t generation);
  void Drop(uint32_t slot, uint32_t generation);

  /// The token was passed on: until somebody unpickles it, the promise is not broken.
  void HandOver(uint32_t slot, uint32_t generation);

  bool IsPending(uint32_t slot, uint32_t generation) const;
  /// Whether the owner has cancelled the promise, rather than fulfilled it.
  bool IsCancelled(uint32_t slot, uint32_t generation) const;

  /// pending -> claimed, by this process. False if the promise was fulfilled, cancelled or claimed
  /// before. What was claimed must be published or abandoned.
  bool Claim(uint32_t slot, uint32_t generation);

  struct Value {
    Payload payload = Payload::kNothing;
    uint8_t dtype = 0;
    const int64_t* sizes = nullptr;
    size_t dims = 0;
    uint64_t bytes = 0;
    const void* data = nullptr;  // where the bytes are, if they are contiguous
  };
  /// Where the bytes of `value` go. std::runtime_error if the lane is full.
  struct Place {
    std::byte* to = nullptr;  // null if they are there, in memory that was lent
    uint64_t block = 0;       // 0 is none
    bool cold = false;        // never touched: FillCold() is faster than writing to it
  };
  Place Prepare(uint32_t slot, const Value& value);
  /// Writes `bytes` of `data` to a cold place without touching its pages through the mapping, which
  /// costs twice as much. std::runtime_error if the system has no memory left.
  void FillCold(const Place& place, const void* data, uint64_t bytes);
  /// Maps the pages of a place that FillCold() has filled, for the next value that goes there.
  void WarmUp(const Place& place, uint64_t bytes);
  /// claimed -> ready; tells the consumer. The bytes must have been written. False if the consumer
  /// has given the claim up, taking this process for dead.
  bool Publish(uint32_t slot, uint32_t generation);
  /// claimed -> pending. `block` is what Prepare() gave, if it did.
  void Abandon(uint32_t slot, uint32_t generation, uint64_t block);

  /// Memory for a value of `bytes` that is computed in place; Prepare() finds it again. It is the
  /// lender's until `keep` goes, and the consumer's once it was published. std::runtime_error if
  /// the lane is full.
  struct Loan {
    std::byte* data;
    std::shared_ptr<void> keep;
  };
  static Loan Lend(const std::shared_ptr<Attachment>& self, uint64_t bytes);

  struct Stats {
    uint64_t held = 0;          // promises that this process may fulfil
    uint64_t live_bytes = 0;    // of blocks that are lent, or that the consumer has
    uint64_t cached_bytes = 0;  // of free blocks that still have their pages
  };
  Stats GetStats();
  /// Gives the memory of free blocks back to the system, but for `limit` bytes.
  void Trim(uint64_t limit);

 private:
  void ClaimLane();
  void Forget();  // the table does; whoever still uses it may
  void SetReadyBit(uint32_t slot);
  void Attend(uint32_t slot);  // asks the consumer to look at the slot
  void Ring();

  const Address address_;
  ProcessId self_;
  Fd memory_, bell_, owner_watch_;
  Mapping meta_mapping_, lane_mapping_;
  Meta meta_;
  uint32_t lane_ = 0, region_ = 0;

  std::mutex mutex_;  // guards what follows
  LaneMemory lane_memory_;
  uint64_t held_ = 0;                                  // holds of this lane
  std::unordered_map<uint64_t, uint32_t> more_holds_;  // slot and generation -> beyond the first
};

/// How many bytes of free blocks may keep their pages, in each lane: touching fresh ones costs over
/// twenty times the copy. 1 GiB unless set.
DTORCH_API void SetCacheLimit(uint64_t bytes);
DTORCH_API uint64_t CacheLimit();

}  // namespace dtorch::shm
