#pragma once

#include "dtorch/base/api.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

namespace dtorch {

/// Why a tensor of a Python subclass cannot be fetched; empty if it can. The binding that knows
/// Python types installs the check.
using SubclassCheck = std::string (*)(const at::Tensor& tensor);
DTORCH_API void SetSubclassCheck(SubclassCheck check);

/// Boxed kernel that runs the check on every tensor argument, before the subclass's own
/// `__torch_dispatch__` sees the call. c10::TypeError if it refuses.
void CheckSubclassKernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack);

}  // namespace dtorch
