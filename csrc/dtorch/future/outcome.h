#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/waiter_list.h"

#include <ATen/core/ivalue.h>

#include <exception>

// What a completed future has to tell. Everything of ours that reads a future reads it here, so
// that all ways of reading agree.
namespace dtorch {

/// The error that `value`, found in a future that has no error, really is; nullptr if none.
/// torch.futures.Future.set_exception stores the exception object as the value: the binding that
/// knows Python objects installs the check for that.
using ErrorInValueCheck = std::exception_ptr (*)(const c10::IValue& value);
DTORCH_API void SetErrorInValueCheck(ErrorInValueCheck check);

/// The error of a completed future; nullptr if it has a value.
DTORCH_API std::exception_ptr ErrorOf(const FuturePtr& future);

/// The value of a completed future, ordered behind its device work on the current streams of the
/// calling thread; throws its error. Does not block.
DTORCH_API c10::IValue ValueOf(const FuturePtr& future);

/// Whether the future was made with the device of `value`: then torch sees to the order of streams.
bool KnowsDeviceOf(const c10::ivalue::Future& future, const at::Tensor& value);

}  // namespace dtorch
