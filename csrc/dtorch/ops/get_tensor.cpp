#include "dtorch/ops/get_tensor.h"

#include "dtorch/device/device.h"
#include "dtorch/future/complete.h"

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

namespace dtorch {
namespace {

void CheckSource(const at::Tensor& self, const char* op) {
  TORCH_CHECK_VALUE(self.defined(), op, ": self: expected a tensor, got an undefined one (None)");
  CheckDevice(self.device(), op);
}

}  // namespace

FuturePtr GetTensorAsyncKernel(const at::Tensor& self, std::optional<c10::Device> device,
                               bool copy) {
  constexpr char kOp[] = "get_tensor_async";
  CheckSource(self, kOp);
  at::Tensor value = self;
  if (device && !IsSameDevice(*device, self.device())) {
    CheckDevice(*device, kOp);
    value = self.to(*device);
  } else if (copy) {
    value = self.clone();
  }
  return MakeCompletedFuture(c10::TensorType::get(), std::move(value));
}

void GetTensorKernel(const at::Tensor& self,
                     const c10::intrusive_ptr<TensorPromiseState>& promise) {
  CheckSource(self, "get_tensor");
  promise->Set(self);
}

FuturePtr GetFutureKernel(const c10::intrusive_ptr<TensorPromiseState>& promise) {
  return promise->future();
}

FuturePtr GetFutureVoidKernel(const c10::intrusive_ptr<VoidPromiseState>& promise) {
  return promise->future();
}

}  // namespace dtorch
