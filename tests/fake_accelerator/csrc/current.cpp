#include "current.h"

#include <array>

namespace fake {

namespace {

thread_local int current_device = 0;
thread_local std::array<int64_t, kDevices> current_stream_ids{};  // 0: the default stream

int Checked(int device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "fake accelerator: expected a device index below ",
              kDevices, ", got ", device);
  return device;
}

}  // namespace

int CurrentDevice() { return current_device; }

int SetCurrentDevice(int device) {
  const int before = current_device;
  current_device = Checked(device);
  return before;
}

Stream& CurrentStream(int device) {
  return FindStream(device, current_stream_ids[Checked(device)]);
}

Stream& SetCurrentStream(Stream& stream) {
  Stream& before = CurrentStream(stream.device);
  current_stream_ids[stream.device] = stream.id;
  return before;
}

c10::Stream ToC10(const Stream& stream) {
  const c10::Device device(kType, static_cast<c10::DeviceIndex>(stream.device));
  return c10::Stream(c10::Stream::UNSAFE, device, stream.id);
}

Stream& FromC10(const c10::Stream& stream) {
  TORCH_CHECK(stream.device_type() == kType, "fake accelerator: expected a stream of its own, got ",
              stream);
  return FindStream(stream.device_index(), stream.id());
}

int IndexOf(c10::Device device) {
  return device.index() < 0 ? CurrentDevice() : Checked(device.index());
}

}  // namespace fake
