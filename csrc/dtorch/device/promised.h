#pragma once

#include "dtorch/base/api.h"
#include "dtorch/base/deadline.h"

namespace dtorch {

/// Before a process ends: waits until the tensors of accelerators that it has set in promises of
/// other processes have got there. False if the time is over: those promises break. To be called
/// with the host's lock dropped.
DTORCH_API bool FlushPromises(Deadline deadline);

}  // namespace dtorch
