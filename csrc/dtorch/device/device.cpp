#include "dtorch/device/device.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <sstream>

namespace dtorch {
namespace {

std::string KnownDevices() {
  std::ostringstream names;
  names << "cpu, meta";
  if (auto type = at::getAccelerator(/*checked=*/false)) {
    const auto* guard = c10::impl::device_guard_impl_registry[static_cast<size_t>(*type)].load();
    const int count = guard ? guard->deviceCount() : 0;
    for (int i = 0; i < count; ++i) names << ", " << c10::Device(*type, static_cast<int8_t>(i));
  }
  return names.str();
}

bool IsKnown(c10::Device device) {
  return c10::impl::hasDeviceGuardImpl(device.type()) &&
         (!device.has_index() ||
          device.index() < c10::impl::getDeviceGuardImpl(device.type())->deviceCount());
}

}  // namespace

bool HasDevice(c10::Device device) { return at::isAccelerator(device.type()) && IsKnown(device); }

void CheckDevice(c10::Device device, const char* op) {
  if (device.is_cpu() || device.is_meta()) return;
  TORCH_CHECK_VALUE(IsKnown(device), op, ": expected a device that this build of torch knows (",
                    KnownDevices(), "), got ", device);
  CheckHasEvents(device, op);
}

void CheckHasEvents(c10::Device device, const char* op) {
  if (device.is_cpu() || device.is_meta()) return;
  TORCH_CHECK_NOT_IMPLEMENTED(
      at::isAccelerator(device.type()), op,
      ": expected a device whose operators have finished when they return (cpu, meta), or an "
      "accelerator with streams and events, got ",
      device, "; copy the tensor to the CPU first: t.cpu()");
}

std::vector<c10::Device> InitializedDevices() {
  std::vector<c10::Device> devices;
  const auto type = at::getAccelerator(/*checked=*/false);
  if (!type) return devices;
  // Asked first: it knows without the driver, which a fork of a process that has called it breaks.
  // (And a fake tensor mode puts a guard of one device in the place of a missing driver's.)
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(*type));
  if (allocator && !allocator->initialized()) return devices;
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(*type);
  const auto count = c10::impl::getDeviceGuardImpl(*type)->deviceCount();
  for (c10::DeviceIndex i = 0; i < count; ++i) {
    if (hooks.hasPrimaryContext(i)) devices.emplace_back(*type, i);
  }
  return devices;
}

bool IsSameDevice(c10::Device a, c10::Device b) {
  if (a.type() != b.type()) return false;
  if (a.is_cpu() || a == b) return true;
  const auto index = [](c10::Device d) {
    return d.has_index() ? d.index() : c10::impl::getDeviceGuardImpl(d.type())->getDevice().index();
  };
  return index(a) == index(b);
}

}  // namespace dtorch
