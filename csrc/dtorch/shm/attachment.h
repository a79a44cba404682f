#pragma once

#include "dtorch/base/api.h"
#include "dtorch/base/deadline.h"
#include "dtorch/shm/address.h"
#include "dtorch/shm/keepsake.h"
#include "dtorch/shm/lane_memory.h"
#include "dtorch/shm/layout.h"
#include "dtorch/sys/fd.h"
#include "dtorch/sys/mapping.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace dtorch::shm {

/// A producer process's end of another process's mailbox: one for each pair of processes, which
/// AttachTo() finds. Claims a lane, holds promises, fulfils them. Thread-safe.
///
/// In a forked child it is the child's, with a lane of its own that holds what the parent's did at
/// the fork: the fork returns, in the parent, when it does. Where that could not be had it is
/// inert: it holds nothing, and throws where it would have to.
class DTORCH_API Attachment {
 public:
  /// std::runtime_error, which says why, if the memory cannot be reached: another PID namespace, a
  /// process that has gone, no permission.
  explicit Attachment(const Address& address);
  ~Attachment();

  const Address& address() const { return address_; }

  /// Whether the process that waits still runs; what becomes readable when it has ended.
  bool OwnerLives() const;
  int owner_watch() const { return owner_watch_.get(); }

  /// This process may fulfil the promise from now on; its death without having done so is a broken
  /// promise, if it was the last that held it. Holds are counted: one for each Hold().
  /// std::runtime_error if it is inert.
  void Hold(uint32_t slot, uint32_t generation);
  void Drop(uint32_t slot, uint32_t generation);

  /// The token was passed on: until somebody unpickles it, the promise is not broken.
  void HandOver(uint32_t slot, uint32_t generation);

  bool IsPending(uint32_t slot, uint32_t generation) const;
  /// Whether the owner has cancelled the promise, rather than fulfilled it.
  bool IsCancelled(uint32_t slot, uint32_t generation) const;

  /// pending -> claimed, by this process. False if the promise was fulfilled, cancelled or claimed
  /// before. What was claimed must be published or abandoned. std::runtime_error if it is inert.
  bool Claim(uint32_t slot, uint32_t generation);

  /// Asks the consumer for `bytes` of its memory on a device, for the value of what was claimed.
  /// Once for each claim. Does not block.
  void Ask(uint32_t slot, uint32_t generation, uint8_t device_type, int8_t device_index,
           uint64_t bytes);
  /// The answer; nullopt if there is none by then: it is not waited for any more. Empty if there is
  /// no such memory. std::runtime_error if the consumer stops in the middle of its answer, for
  /// seconds: the claim is abandoned.
  std::optional<std::string> WaitForAnswer(uint32_t slot, uint32_t generation, Deadline deadline);

  Keepsake& keepsake() { return *keepsake_; }

  struct Value {
    Payload payload = Payload::kNothing;
    uint8_t dtype = 0;
    uint8_t device_type = 0;  // where the consumer is to put it; 0 is the CPU
    int8_t device_index = 0;
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
  /// Gives back what Prepare() gave, if nothing was published: the claim stays. 0 is none.
  void FreeBlock(uint64_t block);
  /// claimed, or asking -> pending; answering -> forsaken. If this process has dropped the promise
  /// meanwhile the consumer is told. Does not block.
  void Abandon(uint32_t slot, uint32_t generation);

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
  friend struct ForkOfAttachments;

  void BeforeFork();
  void AfterForkInParent();
  void AfterForkInChild(bool may_take_over);
  bool IsInert() const;
  void ClaimLane(uint32_t forked_from = 0);
  void SetReadyBit(uint32_t slot);
  void Attend(uint32_t slot);  // asks the consumer to look at the slot
  void Ring();

  const Address address_;
  ProcessId self_;
  Fd memory_, bell_, owner_watch_;
  Fd alive_;  // of a pipe whose other end is the consumer's
  Mapping meta_mapping_, lane_mapping_;
  std::vector<Mapping> inherited_;  // of the lanes of parents
  bool inherits_loans_ = false;     // memory that lies there
  Meta meta_;
  uint32_t lane_ = 0, region_ = 0;

  uint32_t fork_generation_;
  std::shared_ptr<Keepsake> keepsake_ = std::make_shared<Keepsake>();
  std::atomic<uint64_t> questions_{0};

  std::mutex mutex_;  // guards what follows
  LaneMemory lane_memory_;
  uint64_t held_ = 0;                                  // holds of this lane
  std::unordered_map<uint64_t, uint32_t> more_holds_;  // slot and generation -> beyond the first
};

}  // namespace dtorch::shm
