#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>

#include <optional>

// Kernels of the pair that fetches a tensor's value without a future in its schema, for graphs that
// can hold tensors only. Callers go through the dispatcher.
//
//      handle = get_start(self, device)               queues, and returns at once
//      value  = get_wait(handle, self, device)        blocks until the value is there
//
// The handle is a tensor of one constant byte, so that a graph may keep it, and its equals compare
// equal. What counts is its storage: that owns the future of the value. The value has a storage of
// its own, since an operator that returns what aliases its argument is refused in a graph.
namespace dtorch {

/// Begins to take a snapshot of `self`, on `device`. The handle is on the CPU. `frozen`: the caller
/// does not write to `self` before the wait, so that no clone of it need be made.
at::Tensor GetStartKernel(const at::Tensor& self, std::optional<c10::Device> device, bool frozen);

/// The snapshot: the very memory that the start has filled. The arguments behind the handle are
/// those of the start: they tell a graph the value's shape, keep its source's memory, and take the
/// gradient.
///
/// FutureAlreadyRetrievedError for a handle that has been waited for. A copy of a handle, made by a
/// checker or a debugger of graphs, owns nothing: then `source` is fetched as it is now.
at::Tensor GetWaitKernel(const at::Tensor& handle, const at::Tensor& source,
                         std::optional<c10::Device> device);

/// The same where autograd records: the gradient is that of a copy.
at::Tensor GetWaitAutogradKernel(c10::DispatchKeySet keys, const at::Tensor& handle,
                                 const at::Tensor& source, std::optional<c10::Device> device);

}  // namespace dtorch
