#pragma once

#include "dtorch/future/waiter_list.h"
#include "dtorch/promise/promise_state.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>

// Kernels of the operators that fetch a tensor's value. Callers go through the dispatcher.
namespace dtorch {

/// A future of the value of `self`, computed, on `device`. Without a copy it is `self` itself;
/// `copy` makes it a snapshot, recorded by autograd. Never blocks.
FuturePtr GetTensorAsyncKernel(const at::Tensor& self, std::optional<c10::Device> device,
                               bool copy);

/// Fulfils `promise` with the value of `self`, once computed.
void GetTensorKernel(const at::Tensor& self, const c10::intrusive_ptr<TensorPromiseState>& promise);

FuturePtr GetFutureKernel(const c10::intrusive_ptr<TensorPromiseState>& promise);
FuturePtr GetFutureVoidKernel(const c10::intrusive_ptr<VoidPromiseState>& promise);

}  // namespace dtorch
