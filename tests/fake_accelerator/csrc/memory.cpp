#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "counters.h"
#include "errors.h"
#include "faults.h"

namespace fake {

namespace {

constexpr size_t kAlignment = 512;

size_t Rounded(size_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

int DeviceOfBlock(const Block& block) {
  return block.stream == nullptr ? -1 : block.stream->device;
}

}  // namespace

// ---- What both do -------------------------------------------------------------------------------

Block* BlockCache::FindLocked(const void* pointer) {
  const char* const data = static_cast<const char*>(pointer);
  auto after = blocks_.upper_bound(data);
  if (after == blocks_.begin()) return nullptr;
  Block& block = *std::prev(after)->second;
  return data < block.data + block.size ? &block : nullptr;
}

MemoryStats BlockCache::StatsLocked(int device) const {
  MemoryStats stats;
  const auto counts = [device](int of) { return device < 0 || of == device; };
  for (const auto& [data, block] : blocks_) {
    if (!block->live || !counts(DeviceOfBlock(*block))) continue;
    ++stats.live_blocks;
    stats.live_bytes += static_cast<int64_t>(block->size);
  }
  for (const auto& [key, blocks] : cached_) {
    if (blocks.empty() || !counts(DeviceOfBlock(*blocks.front()))) continue;
    stats.cached_blocks += static_cast<int64_t>(blocks.size());
  }
  for (const Block* block : deferred_) stats.deferred_blocks += counts(DeviceOfBlock(*block));
  for (const auto& [of, total] : totals_) {
    if (!counts(of)) continue;
    stats.allocations += total.first;
    stats.reuses += total.second;
  }
  return stats;
}

Block& BlockCache::TakeLocked(Stream* stream, size_t size) {
  ReviewDeferredLocked();
  size = Rounded(size);
  std::vector<Block*>& cached = cached_[{stream, size}];
  Block* block = nullptr;
  if (!cached.empty()) {
    block = cached.back();
    cached.pop_back();
    ++totals_[DeviceOfBlock(*block)].second;
  } else {
    auto fresh = std::make_unique<Block>();
    fresh->data = static_cast<char*>(std::aligned_alloc(kAlignment, size));
    if (fresh->data == nullptr) ThrowOutOfMemory(std::to_string(size) + " bytes");
    std::memset(fresh->data, kPoison, size);
    fresh->size = size;
    fresh->stream = stream;
    block = fresh.get();
    blocks_[block->data] = std::move(fresh);
  }
  block->live = true;
  ++totals_[DeviceOfBlock(*block)].first;
  return *block;
}

void BlockCache::GiveLocked(Block& block) {
  block.live = false;
  for (Stream* user : block.users) block.until.push_back(LastLocked(*user));
  block.users.clear();
  deferred_.push_back(&block);
  ReviewDeferredLocked();
}

void BlockCache::ReviewDeferredLocked() {
  const auto still_used = [](const Block* block) {
    return !std::all_of(block->until.begin(), block->until.end(), IsDoneLocked);
  };
  const auto first_free = std::stable_partition(deferred_.begin(), deferred_.end(), still_used);
  const std::vector<Block*> free(first_free, deferred_.end());
  deferred_.erase(first_free, deferred_.end());
  for (Block* block : free) {
    block->until.clear();
    OnFreeLocked(*block);
    cached_[{block->stream, block->size}].push_back(block);
  }
}

void BlockCache::EmptyLocked() {
  ReviewDeferredLocked();
  // What is queued on whatever stream may refer to a block by mistake; the test wants to see that.
  if (!AllIdleLocked()) return;
  for (auto& [key, blocks] : cached_) {
    for (const Block* block : blocks) {
      char* const data = block->data;
      blocks_.erase(data);
      std::free(data);
    }
    blocks.clear();
  }
}

// ---- Device memory ------------------------------------------------------------------------------

void* DeviceMemory::Allocate(Stream& stream, size_t size) {
  Use(stream.device);
  Locked lock(MachineLock());
  ThrowIfFailedLocked(stream.device);
  MayFailCallLocked("alloc");
  return TakeLocked(&stream, size).data;
}

void DeviceMemory::Free(void* pointer) noexcept {
  if (InBadFork()) return;  // nothing here is ours
  Locked lock(MachineLock());
  if (Block* block = FindLocked(pointer)) GiveLocked(*block);
}

bool DeviceMemory::RecordUse(const void* pointer, Stream& stream) {
  Locked lock(MachineLock());
  Block* const block = FindLocked(pointer);
  if (block == nullptr) return false;
  if (block->stream != &stream) block->users.push_back(&stream);
  return true;
}

int DeviceMemory::DeviceOf(const void* pointer) {
  Locked lock(MachineLock());
  const Block* const block = FindLocked(pointer);
  return block == nullptr ? -1 : block->stream->device;
}

void DeviceMemory::Empty() {
  Locked lock(MachineLock());
  EmptyLocked();
}

void DeviceMemory::OnFreeLocked(Block& block) {
  Stream& stream = *block.stream;
  if (HasFailedLocked(stream.device) || stream.capture.active) return;
  // In the stream's order: what is queued there may still use the block.
  Task task;
  task.run = [data = block.data, size = block.size] { std::memset(data, kPoison, size); };
  EnqueueLocked(stream, std::move(task));
}

// ---- Pinned memory ------------------------------------------------------------------------------

void* PinnedMemory::Allocate(int device, size_t size) {
  for (int other = 0; other < kDevices; ++other) {
    if (HasContext(other)) device = other;
  }
  Use(device);
  Locked lock(MachineLock());
  ThrowIfFailedLocked(device);
  MayFailCallLocked("pinned_alloc");
  return TakeLocked(nullptr, size).data;
}

void PinnedMemory::Free(void* pointer) noexcept {
  if (InBadFork()) return;
  Locked lock(MachineLock());
  if (Block* block = FindLocked(pointer)) GiveLocked(*block);
}

bool PinnedMemory::RecordUse(const void* pointer, Stream& stream) {
  Locked lock(MachineLock());
  Block* const block = FindLocked(pointer);
  if (block == nullptr) return false;
  block->users.push_back(&stream);
  return true;
}

bool PinnedMemory::IsPinned(const void* pointer) {
  if (InBadFork()) return false;
  Locked lock(MachineLock());
  const Block* const block = FindLocked(pointer);
  return block != nullptr && block->live;
}

void PinnedMemory::Empty() {
  Locked lock(MachineLock());
  EmptyLocked();
}

void PinnedMemory::OnFreeLocked(Block& block) { std::memset(block.data, kPoison, block.size); }

DeviceMemory& device_memory() {
  static DeviceMemory* const leaked = new DeviceMemory;
  return *leaked;
}

PinnedMemory& pinned_memory() {
  static PinnedMemory* const leaked = new PinnedMemory;
  return *leaked;
}

}  // namespace fake
