#include "dtorch/shm/lane_memory.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <fcntl.h>

namespace dtorch::shm {
namespace {

std::atomic<uint64_t> cache_limit{uint64_t{1} << 30};

// Four sizes for each doubling: little is wasted, and blocks of about one size are used again.
uint64_t SizeClass(uint64_t bytes) {
  if (bytes <= 256) return 256;
  const int shift = std::bit_width(bytes - 1) - 3;
  const uint64_t step = std::max<uint64_t>(uint64_t{1} << shift, alignof(BlockHeader));
  return (bytes + step - 1) / step * step;
}

}  // namespace

LaneMemory::Allocation LaneMemory::Allocate(uint64_t bytes, User user) {
  const uint64_t size = SizeClass(bytes);
  TakeBackReturned();
  FreeList& free = free_[size];
  uint64_t offset = 0;
  const bool cold = free.warm.empty();
  if (!cold) {
    offset = free.warm.back();
    free.warm.pop_back();
    cached_ -= size;
  } else if (!free.cold.empty()) {
    offset = free.cold.back();
    free.cold.pop_back();
  } else if (size <= kLaneBytes - sizeof(BlockHeader) - top_) {
    offset = top_ + sizeof(BlockHeader);
    top_ = offset + size;
  } else {
    return {0, false};
  }
  live_.emplace(offset, Block{size, static_cast<uint8_t>(user)});
  live_bytes_ += size;
  auto* header = reinterpret_cast<BlockHeader*>(base_ + offset) - 1;
  header->bytes = size;
  return {offset, cold};
}

bool LaneMemory::Share(uint64_t offset, User user) {
  const auto it = live_.find(offset);
  if (it == live_.end() || it->second.users & static_cast<uint8_t>(user)) return false;
  it->second.users |= static_cast<uint8_t>(user);
  return true;
}

uint64_t LaneMemory::FindLent(const void* data, uint64_t bytes) const {
  const auto* at = static_cast<const std::byte*>(data);
  if (!base_ || at < base_ || at >= base_ + kLaneBytes) return 0;
  const auto offset = static_cast<uint64_t>(at - base_);
  const auto it = live_.find(offset);
  const bool lent = it != live_.end() && it->second.size >= bytes &&
                    (it->second.users & ~static_cast<uint8_t>(User::kChild)) ==
                        static_cast<uint8_t>(User::kLender);
  return lent ? offset : 0;
}

void LaneMemory::KeepLoans() {
  for (auto& [offset, block] : live_) {
    if (block.users & static_cast<uint8_t>(User::kLender)) {
      block.users |= static_cast<uint8_t>(User::kChild);
    }
  }
}

bool LaneMemory::IsLending() const {
  return std::any_of(live_.begin(), live_.end(), [](const auto& each) {
    return each.second.users & static_cast<uint8_t>(User::kLender);
  });
}

void LaneMemory::Free(uint64_t offset, User user) {
  const auto it = live_.find(offset);
  // Nothing that was handed out: the consumer's word is not trusted.
  if (it == live_.end() || !(it->second.users & static_cast<uint8_t>(user))) return;
  it->second.users &= static_cast<uint8_t>(~static_cast<uint8_t>(user));
  if (it->second.users) return;
  const uint64_t size = it->second.size;
  live_.erase(it);
  live_bytes_ -= size;
  FreeList& free = free_[size];
  if (cached_ + size > cache_limit.load(std::memory_order_relaxed)) {
    Punch(offset, size);
    free.cold.push_back(offset);
    return;
  }
  cached_ += size;
  free.warm.push_back(offset);
}

void LaneMemory::Punch(uint64_t offset, uint64_t size) {
  const uint64_t from = (offset + kPage - 1) / kPage * kPage;
  const uint64_t to = (offset + size) / kPage * kPage;
  if (from >= to) return;
  fallocate(memory_fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            static_cast<off_t>(file_offset_ + from), static_cast<off_t>(to - from));
}

void LaneMemory::Trim(uint64_t limit) {
  // Large blocks first: they are fewest.
  for (auto it = free_.rbegin(); it != free_.rend() && cached_ > limit; ++it) {
    auto& [size, free] = *it;
    while (!free.warm.empty() && cached_ > limit) {
      Punch(free.warm.front(), size);
      free.cold.push_back(free.warm.front());
      free.warm.erase(free.warm.begin());
      cached_ -= size;
    }
  }
}

void LaneMemory::TakeBackReturned() {
  if (lane_->returned.load(std::memory_order_relaxed) == 0) return;
  uint64_t offset = lane_->returned.exchange(0);
  while (offset != 0) {
    // A link that leads nowhere, or in a circle, names a block that the consumer does not have.
    const auto it = live_.find(offset);
    if (it == live_.end() || !(it->second.users & static_cast<uint8_t>(User::kConsumer))) return;
    const uint64_t next = (reinterpret_cast<BlockHeader*>(base_ + offset) - 1)->next;
    Free(offset, User::kConsumer);
    offset = next;
  }
}

void SetCacheLimit(uint64_t bytes) { cache_limit.store(bytes); }
uint64_t CacheLimit() { return cache_limit.load(); }

}  // namespace dtorch::shm
