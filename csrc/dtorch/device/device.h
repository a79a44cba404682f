#pragma once

#include "dtorch/base/api.h"

#include <c10/core/Device.h>

#include <optional>
#include <vector>

namespace dtorch {

/// c10::ValueError if this build of torch does not know `device`; c10::NotImplementedError for one
/// whose work is queued and that has no events to wait for. `op` is for the message.
DTORCH_API void CheckDevice(c10::Device device, const char* op);

/// The second of these, for a tensor's device, which is known: without a question to the driver.
DTORCH_API void CheckHasEvents(c10::Device device, const char* op);

/// Whether this process has such a device, with its index, and may wait for its work.
bool HasDevice(c10::Device device);

/// Whether an operator has only queued its work when it returns. Of a device that has passed.
inline bool IsAccelerator(c10::Device device) { return !device.is_cpu() && !device.is_meta(); }

/// The accelerator devices on which something may be queued. Never initialises one.
DTORCH_API std::vector<c10::Device> InitializedDevices();

/// Whether `a` and `b` name the same device; one without an index is the current one of its type.
DTORCH_API bool IsSameDevice(c10::Device a, c10::Device b);

}  // namespace dtorch
