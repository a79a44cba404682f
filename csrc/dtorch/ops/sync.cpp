#include "dtorch/ops/sync.h"

#include "dtorch/device/device.h"
#include "dtorch/future/complete.h"
#include "dtorch/ops/promise_argument.h"

#include <ATen/core/jit_type.h>

namespace dtorch {
namespace {

// What passes the check has nothing queued.
void CheckDevices(const DeviceList& devices) {
  for (c10::Device device : devices ? *devices : InitializedDevices()) CheckDevice(device, "sync");
}

}  // namespace

FuturePtr SyncKernel(const DeviceList& devices) {
  CheckDevices(devices);
  return MakeCompletedFuture(c10::NoneType::get(), c10::IValue());
}

void SyncPromiseKernel(const c10::IValue& promise, const DeviceList& devices) {
  const auto state = PromiseArgument<VoidPromiseState>(promise, "sync");
  CheckDevices(devices);
  state->Set();
}

void SyncDevicesPromiseKernel(const DeviceList& devices, const c10::IValue& promise) {
  SyncPromiseKernel(promise, devices);
}

}  // namespace dtorch
