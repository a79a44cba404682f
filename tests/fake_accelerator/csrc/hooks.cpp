// What torch asks an accelerator outside of any operator.

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "allocators.h"
#include "copy.h"
#include "current.h"
#include "memory.h"

namespace fake {

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !InBadFork(); }

  // torch calls it when it first hears of the device. That is no use of it yet.
  void init() const override {
    if (InBadFork()) Use(0);  // throws
  }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return device >= 0 && device < kDevices && HasContext(device);
  }

  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { SetCurrentDevice(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(CurrentDevice());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(SetCurrentDevice(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }

  c10::Allocator* getPinnedMemoryAllocator() const override { return PinnedAllocator(); }
  bool isPinnedPtr(const void* data) const override { return pinned_memory().IsPinned(data); }
  c10::Device getDeviceFromPtr(void* data) const override {
    const int device = device_memory().DeviceOf(data);
    TORCH_CHECK(device >= 0, "fake accelerator: the pointer is not of its memory");
    return c10::Device(kType, static_cast<c10::DeviceIndex>(device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    ResizeStorage(*storage.unsafeGetStorageImpl(), size);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "the fake accelerator has no random number generator");
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "the fake accelerator has no random number generator");
  }
};

[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);  // torch keeps the pointer for ever
  return true;
}();

}  // namespace

}  // namespace fake
