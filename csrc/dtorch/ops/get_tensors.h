#pragma once

#include "dtorch/future/waiter_list.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

// Kernels of the operator that fetches several tensors as one. Callers go through the dispatcher.
namespace dtorch {

/// A future of the list of the values of `self`, in its order: each what get_tensor_async gives,
/// but a tensor that is there several times is fetched once. Never blocks.
///
/// All are looked at before anything is queued. Each stream is told once what to do, by one event,
/// and the future completes once. An error says where in the list it was.
FuturePtr GetTensorsAsyncKernel(const std::vector<at::Tensor>& self,
                                std::optional<c10::Device> device, bool copy);

/// The same where autograd records. Boxed.
void GetTensorsAsyncAutogradKernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                   torch::jit::Stack* stack);

}  // namespace dtorch
