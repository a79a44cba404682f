#pragma once

#include "dtorch/future/waiter_list.h"
#include "dtorch/promise/promise_state.h"

#include <ATen/core/ivalue.h>

#include <optional>
#include <vector>

// Kernels of the operator that waits for devices. Callers go through the dispatcher.
namespace dtorch {

using DeviceList = std::optional<std::vector<c10::Device>>;

/// A future that completes when everything queued so far on the current stream of each device is
/// done; nullopt: of every initialised device.
FuturePtr SyncKernel(const DeviceList& devices);

/// The same, fulfilling `promise`.
void SyncPromiseKernel(const c10::IValue& promise, const DeviceList& devices);
void SyncDevicesPromiseKernel(const DeviceList& devices, const c10::IValue& promise);

}  // namespace dtorch
