#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "stream.h"

// The two caching allocators. "Device" memory is host memory that only tasks of streams touch.
//
// Memory is never given back to the system while something queued may refer to it, so that a use
// after free is a wrong value and no crash: fresh and freed memory is filled with kPoison.
// Thread-safe.
namespace fake {

constexpr unsigned char kPoison = 0xCD;

struct MemoryStats {
  int64_t live_bytes = 0;  // of the blocks handed out, as rounded
  int64_t live_blocks = 0;
  int64_t cached_blocks = 0;    // free, ready to be used again
  int64_t deferred_blocks = 0;  // freed, but a stream may still use them
  int64_t allocations = 0;
  int64_t reuses = 0;  // allocations served from the cache
};

struct Block {
  char* data = nullptr;
  size_t size = 0;
  Stream* stream = nullptr;  // where it was allocated; nullptr of pinned memory
  bool live = false;
  std::vector<Stream*> users;   // other streams that use it
  std::vector<Position> until;  // once freed: reused when these are done
};

/// Rules shared by the two. A block's users at the time it is freed defer its reuse until all that
/// they have queued by then is done.
class BlockCache {
 public:
  BlockCache() = default;
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  /// The block that `pointer` points into, live or not; nullptr if there is none.
  Block* FindLocked(const void* pointer);
  MemoryStats StatsLocked(int device) const;  // negative: of all

 protected:
  // From the cache, or fresh.
  Block& TakeLocked(Stream* stream, size_t size);
  void GiveLocked(Block& block);
  // Gives cached memory back to the system, unless something is queued anywhere.
  void EmptyLocked();

  virtual ~BlockCache() = default;
  // The block is free for the next one: it is to be poisoned, at once or when its stream gets
  // there.
  virtual void OnFreeLocked(Block& block) = 0;

 private:
  void ReviewDeferredLocked();

  std::map<const char*, std::unique_ptr<Block>> blocks_;
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> cached_;
  std::vector<Block*> deferred_;
  std::map<int, std::pair<int64_t, int64_t>> totals_;  // by device: allocations, reuses
};

/// As CUDA's: a freed block is free at once for its own stream, where what uses it was queued
/// before; other streams must have been recorded.
class DeviceMemory final : public BlockCache {
 public:
  void* Allocate(Stream& stream, size_t size);
  void Free(void* pointer) noexcept;
  /// False if it is not ours.
  bool RecordUse(const void* pointer, Stream& stream);
  /// -1 if it is not ours.
  int DeviceOf(const void* pointer);
  void Empty();

 private:
  void OnFreeLocked(Block& block) override;
};

class PinnedMemory final : public BlockCache {
 public:
  /// Initialises `device` if none is: as with CUDA, any will do.
  void* Allocate(int device, size_t size);
  void Free(void* pointer) noexcept;
  bool RecordUse(const void* pointer, Stream& stream);
  /// Whether it points into memory that is handed out. Initialises nothing.
  bool IsPinned(const void* pointer);
  void Empty();

 private:
  void OnFreeLocked(Block& block) override;
};

DeviceMemory& device_memory();
PinnedMemory& pinned_memory();

}  // namespace fake
