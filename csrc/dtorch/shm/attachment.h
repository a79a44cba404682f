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
#include <string>
#include <unordered_map>
#include <vector>

namespace dtorch::shm {

/// The memory of one lane, handed out by the one process that has claimed it. Its books are kept
/// in that process alone; only blocks that the consumer has given back are read from the lane, and
/// checked. Not thread-safe.
class LaneMemory {
 public:
  LaneMemory() = default;
  LaneMemory(std::byte* base, Lane* lane, int memory_fd, uint64_t file_offset)
      : base_(base), lane_(lane), memory_fd_(memory_fd), file_offset_(file_offset) {}

  /// The offset of a block of at least `bytes`; 0 if the lane is full.
  uint64_t Allocate(uint64_t bytes);
  void Free(uint64_t offset);
  std::byte* At(uint64_t offset) const { return base_ + offset; }

 private:
  void TakeBackReturned();

  std::byte* base_ = nullptr;
  Lane* lane_ = nullptr;
  int memory_fd_ = -1;
  uint64_t file_offset_ = 0;
  uint64_t top_ = sizeof(BlockHeader);           // nothing was ever handed out from here on
  uint64_t cached_ = 0;                          // bytes of free blocks that still have their pages
  std::unordered_map<uint64_t, uint64_t> live_;  // offset -> size
  std::unordered_map<uint64_t, std::vector<uint64_t>> free_;  // size -> offsets, last is warmest
};

/// A producer process's end of another process's mailbox: one for each pair of processes. Claims a
/// lane, holds promises, fulfils them. Thread-safe.
class DTORCH_API Attachment {
 public:
  /// The attachment to `address`, made if there is none. std::runtime_error, which says why, if the
  /// memory cannot be reached: another PID namespace, a process that has gone, no permission.
  static std::shared_ptr<Attachment> To(const Address& address);

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

  /// pending -> claimed, by this process. False if the promise was fulfilled, cancelled or claimed
  /// before. What was claimed must be published or abandoned.
  bool Claim(uint32_t slot, uint32_t generation);

  struct Value {
    Payload payload = Payload::kNothing;
    uint8_t dtype = 0;
    const int64_t* sizes = nullptr;
    size_t dims = 0;
    uint64_t bytes = 0;
  };
  /// Where the bytes of `value` go. std::runtime_error if the lane is full.
  std::byte* Prepare(uint32_t slot, const Value& value);
  /// claimed -> ready; tells the consumer. The bytes must have been written.
  void Publish(uint32_t slot, uint32_t generation);
  /// claimed -> pending.
  void Abandon(uint32_t slot, uint32_t generation);

 private:
  void ClaimLane();
  void Attend(uint32_t slot);  // asks the consumer to look at the slot
  void Ring();

  const Address address_;
  Fd memory_, bell_, owner_watch_;
  Mapping meta_mapping_, lane_mapping_;
  Meta meta_;
  uint32_t lane_ = 0;

  std::mutex mutex_;  // guards what follows
  LaneMemory lane_memory_;
  std::unordered_map<uint64_t, uint32_t> holds_;  // slot and generation -> how often
};

}  // namespace dtorch::shm
