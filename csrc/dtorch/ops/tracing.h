#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/waiter_list.h"

#include <ATen/core/ivalue.h>

#include <vector>

namespace dtorch {

/// While torch.jit.trace runs in this thread, records that `future`, which has `value`, was waited
/// for. Does nothing otherwise, or if the trace does not know the future: then its value becomes a
/// constant of the trace, as everything does that was made outside.
DTORCH_API void TraceWait(const FuturePtr& future, const c10::IValue& value);

/// The same for a group: records the operator `op` that made `result` of `members`.
DTORCH_API void TraceCollect(const char* op, const std::vector<FuturePtr>& members,
                             const FuturePtr& result);

}  // namespace dtorch
