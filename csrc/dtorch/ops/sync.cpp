#include "dtorch/ops/sync.h"

#include "dtorch/device/async.h"
#include "dtorch/device/device.h"
#include "dtorch/future/complete.h"
#include "dtorch/ops/promise_argument.h"

#include <ATen/core/jit_type.h>

namespace dtorch {
namespace {

std::vector<c10::Device> Accelerators(const DeviceList& devices) {
  if (!devices) return InitializedDevices();
  std::vector<c10::Device> found;
  for (const c10::Device device : *devices) {
    CheckDevice(device, "sync");
    if (IsAccelerator(device)) found.push_back(device);
  }
  return found;
}

}  // namespace

FuturePtr SyncKernel(const DeviceList& devices) {
  const auto accelerators = Accelerators(devices);
  if (!accelerators.empty()) return SyncAccelerators(accelerators, "sync");
  return MakeCompletedFuture(c10::NoneType::get(), c10::IValue());
}

void SyncPromiseKernel(const c10::IValue& promise, const DeviceList& devices) {
  const auto state = PromiseArgument<VoidPromiseState>(promise, "sync");
  const auto accelerators = Accelerators(devices);
  if (accelerators.empty()) {
    state->Set();
  } else {
    SyncAccelerators(accelerators, "sync", *state);
  }
}

void SyncDevicesPromiseKernel(const DeviceList& devices, const c10::IValue& promise) {
  SyncPromiseKernel(promise, devices);
}

}  // namespace dtorch
