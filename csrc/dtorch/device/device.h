#pragma once

#include "dtorch/base/api.h"

#include <c10/core/Device.h>

#include <optional>
#include <vector>

// When is a value on a device really there? This is the one place that knows.
namespace dtorch {

/// c10::ValueError if this build of torch does not know `device`; c10::NotImplementedError for an
/// accelerator, whose work is queued: waiting for it is not supported yet. `op` is for the message.
///
/// What passes is a device on which an operator has done its work when it returns.
DTORCH_API void CheckDevice(c10::Device device, const char* op);

/// The accelerator devices on which something may be queued. Never initialises one.
DTORCH_API std::vector<c10::Device> InitializedDevices();

/// Whether `a` and `b` name the same device; one without an index is the current one of its type.
DTORCH_API bool IsSameDevice(c10::Device a, c10::Device b);

}  // namespace dtorch
