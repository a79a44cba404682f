#include "allocators.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>

#include "current.h"
#include "memory.h"

namespace fake {

namespace {

void FreeDevice(void* pointer) { device_memory().Free(pointer); }
void FreePinned(void* pointer) { pinned_memory().Free(pointer); }

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const int index = CurrentDevice();
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(index));
    void* const data = size == 0 ? nullptr : device_memory().Allocate(CurrentStream(index), size);
    return {data, data, &FreeDevice, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &FreeDevice; }

  // In stream order, as every copy.
  void copy_data(void* dest, const void* src, size_t count) const override {
    Submit(CurrentStream(CurrentDevice()), Kind::kCopy, [=] { std::memcpy(dest, src, count); });
  }

  bool initialized() override { return IsInitialized(); }
  void emptyCache(c10::MempoolId_t) override { device_memory().Empty(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    device_memory().RecordUse(data.get(), FromC10(stream));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Locked lock(MachineLock());
    const MemoryStats stats = device_memory().StatsLocked(device);
    c10::CachingDeviceAllocator::DeviceStats result;
    result.allocated_bytes[0].current = stats.live_bytes;
    result.allocation[0].current = stats.live_blocks;
    return result;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

struct HostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* const data = size == 0 ? nullptr : pinned_memory().Allocate(CurrentDevice(), size);
    return {data, data, &FreePinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &FreePinned; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    std::memcpy(dest, src, count);
  }

  bool record_event(void* pointer, void* context, c10::Stream stream) override {
    Stream& own = FromC10(stream);
    return pinned_memory().RecordUse(context, own) || pinned_memory().RecordUse(pointer, own);
  }
  void empty_cache() override { pinned_memory().Empty(); }

  at::HostStats get_stats() override {
    const Locked lock(MachineLock());
    const MemoryStats stats = pinned_memory().StatsLocked(-1);
    at::HostStats result;
    result.active_bytes.current = stats.live_bytes;
    result.active_requests.current = stats.live_blocks;
    return result;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceAllocator* const device_allocator = [] {
  auto* const allocator = new DeviceAllocator;  // torch keeps pointers to both for ever
  c10::SetAllocator(kType, allocator);
  return allocator;
}();

HostAllocator* const host_allocator = [] {
  auto* const allocator = new HostAllocator;
  at::setHostAllocator(kType, allocator);
  return allocator;
}();

}  // namespace

c10::Allocator* TensorAllocator() { return device_allocator; }
c10::Allocator* PinnedAllocator() { return host_allocator; }

}  // namespace fake
