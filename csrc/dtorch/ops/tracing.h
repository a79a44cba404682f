#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/waiter_list.h"

#include <ATen/core/ivalue.h>

namespace dtorch {

/// While torch.jit.trace runs in this thread, records that `future`, which has `value`, was waited
/// for. Does nothing otherwise, or if the trace does not know the future: then its value becomes a
/// constant of the trace, as everything does that was made outside.
DTORCH_API void TraceWait(const FuturePtr& future, const c10::IValue& value);

}  // namespace dtorch
