#pragma once

#include "dtorch/base/api.h"
#include "dtorch/shm/layout.h"

#include <cstddef>
#include <cstdint>
#include <map>
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
  enum class User : uint8_t { kConsumer = 1, kLender = 2, kChild = 4 };

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
  bool IsLending() const;
  /// What is lent now is not used again: a child that is forked now may look at it for ever.
  void KeepLoans();
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

/// How many bytes of free blocks may keep their pages, in each lane: touching fresh ones costs over
/// twenty times the copy. 1 GiB unless set.
DTORCH_API void SetCacheLimit(uint64_t bytes);
DTORCH_API uint64_t CacheLimit();

}  // namespace dtorch::shm
