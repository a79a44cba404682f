#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/waiter_list.h"

#include <ATen/core/ivalue.h>

#include <exception>

// How everything of ours completes a future. Completing runs the callbacks of the future in this
// thread, so the host's lock is dropped meanwhile, unless there are none but the one that feeds the
// list of waiters: then the lock is kept, since every hand-over of it costs more than the rest. The
// caller holds no lock of ours.
namespace dtorch {

DTORCH_API void CompleteWithValue(const FuturePtr& future, c10::IValue value);
DTORCH_API void CompleteWithError(const FuturePtr& future, std::exception_ptr error);

/// Completions that this thread has put off, since they were nested too deeply. To be called before
/// it blocks. Does nothing elsewhere.
DTORCH_API void RunDeferredCompletions();

/// A future that is complete from the start.
DTORCH_API FuturePtr MakeCompletedFuture(c10::TypePtr type, c10::IValue value);

}  // namespace dtorch
