#include "dtorch/ops/api.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

namespace dtorch {
namespace {

template <typename... Args>
FuturePtr CallOperator(const c10::OperatorHandle& op, Args&&... args) {
  torch::jit::Stack stack;
  torch::jit::push(stack, std::forward<Args>(args)...);
  op.callBoxed(&stack);
  return stack.back().toFuture();
}

}  // namespace

TensorFuture GetTensorAsync(const at::Tensor& tensor, std::optional<c10::Device> device,
                            bool copy) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("dtorch::get_tensor_async", "");
  return TensorFuture(CallOperator(op, tensor, device, copy));
}

TensorListFuture GetTensorsAsync(const std::vector<at::Tensor>& tensors,
                                 std::optional<c10::Device> device, bool copy) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("dtorch::get_tensors_async", "");
  return TensorListFuture(CallOperator(op, tensors, device, copy));
}

at::Tensor GetTensor(const at::Tensor& tensor, std::optional<c10::Device> device) {
  return GetTensorAsync(tensor, device).Get();
}

VoidFuture SyncFuture(const std::optional<std::vector<c10::Device>>& devices) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("dtorch::sync", "");
  return VoidFuture(CallOperator(op, devices));
}

void Sync(const std::optional<std::vector<c10::Device>>& devices) { SyncFuture(devices).Get(); }

}  // namespace dtorch
