// What c10::Stream, c10::Event and the device guards call.

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "counters.h"
#include "current.h"
#include "event.h"
#include "memory.h"

namespace fake {

namespace {

using c10::Device;
using c10::DeviceIndex;

Device ToDevice(int index) { return Device(kType, static_cast<DeviceIndex>(index)); }

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  // ---- Devices ----

  Device exchangeDevice(Device device) const override {
    return ToDevice(SetCurrentDevice(IndexOf(device)));
  }
  Device getDevice() const override { return ToDevice(CurrentDevice()); }
  void setDevice(Device device) const override { SetCurrentDevice(IndexOf(device)); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) SetCurrentDevice(device.index());
  }
  DeviceIndex deviceCount() const noexcept override {
    Count(Call::kDeviceCounts);
    return kDevices;
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    SynchronizeDevice(IndexOf(ToDevice(index)));
  }

  // ---- Streams ----

  c10::Stream getStream(Device device) const override {
    return ToC10(CurrentStream(IndexOf(device)));
  }
  c10::Stream getDefaultStream(Device device) const override {
    return ToC10(FindStream(IndexOf(device), 0));
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool high_priority) const override {
    return ToC10(PoolStream(IndexOf(device), high_priority));
  }
  c10::Stream getNewStream(Device device, int) const override {
    return ToC10(NewStream(IndexOf(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return ToC10(SetCurrentStream(FromC10(stream)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return QueryStream(FromC10(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    SynchronizeStream(FromC10(stream));
  }
  // Not marked override: the older of the torch versions have it not.
  bool isStreamCapturing(const c10::Stream& stream) const {
    const Stream& own = FromC10(stream);
    const Locked lock(MachineLock());
    return own.capture.active;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory().RecordUse(data.get(), FromC10(stream));
  }

  // ---- Events ----

  void record(void** event, const c10::Stream& stream, const DeviceIndex device,
              const c10::EventFlag) const override {
    TORCH_CHECK(device < 0 || device == stream.device_index(),
                "fake accelerator: the event is of device ", int{device}, ", the stream of device ",
                int{stream.device_index()});
    Event* own = static_cast<Event*>(*event);
    try {
      RecordEvent(own, FromC10(stream));
    } catch (...) {
      *event = own;  // made, though not recorded
      throw;
    }
    *event = own;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) WaitEvent(FromC10(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || QueryEvent(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) SynchronizeEvent(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (event != nullptr) DestroyEvent(static_cast<Event*>(event));
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return ElapsedTime(*static_cast<Event*>(from), *static_cast<Event*>(to));
  }
};

// The registry keeps a pointer for ever.
const c10::impl::DeviceGuardImplRegistrar registrar(kType, new GuardImpl);

}  // namespace

}  // namespace fake
