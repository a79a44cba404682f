#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace dtorch {

/// Boxed kernel that runs SubclassReason() on every tensor argument, before the subclass's own
/// `__torch_dispatch__` sees the call. c10::TypeError if it refuses.
void CheckSubclassKernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack);

}  // namespace dtorch
