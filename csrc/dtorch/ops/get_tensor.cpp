#include "dtorch/ops/get_tensor.h"

#include "dtorch/device/async.h"
#include "dtorch/future/complete.h"
#include "dtorch/future/span.h"
#include "dtorch/ops/promise_argument.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

namespace dtorch {
namespace {

constexpr char kGetTensorAsync[] = "get_tensor_async";

}  // namespace

Way WayTo(const at::Tensor& self, c10::Device device) {
  if (IsSameDevice(device, self.device())) return WayOf(self, std::nullopt);
  const bool has_data = !self.is_meta() && !device.is_meta();
  return has_data && (IsAccelerator(device) || IsAccelerator(self.device())) ? Way::kMoved
                                                                             : Way::kAtOnce;
}

Transfer Begin(Way way, const Sources& sources, std::optional<c10::Device> device, bool copy,
               Snapshot snapshot, const char* op) {
  if (way == Way::kMoved) return FetchTo(sources, *device, op, snapshot);
  return FetchHere(sources, copy, op);
}

void CheckSource(const at::Tensor& self, const char* op) {
  TORCH_CHECK_VALUE(self.defined(), op, ": self: expected a tensor, got an undefined one (None)");
  CheckHasEvents(self.device(), op);
}

at::Tensor Fetched(const at::Tensor& self, std::optional<c10::Device> device, bool copy) {
  const bool moves = device && !IsSameDevice(*device, self.device());
  if (!moves && !copy) return self;
  const Span span("dtorch::copy");
  return moves ? self.to(*device) : self.clone();
}

FuturePtr Fetch(const at::Tensor& self, std::optional<c10::Device> device, bool copy,
                Snapshot snapshot, const char* op) {
  CheckSource(self, op);
  if (device && !IsSameDevice(*device, self.device())) CheckDevice(*device, op);
  const Way way = WayOf(self, device);
  if (way != Way::kAtOnce) return FutureOf(Begin(way, self, device, copy, snapshot, op));
  return MakeCompletedFuture(c10::TensorType::get(), Fetched(self, device, copy));
}

FuturePtr GetTensorAsyncKernel(const at::Tensor& self, std::optional<c10::Device> device,
                               bool copy) {
  return Fetch(self, device, copy, Snapshot::kCheapest, kGetTensorAsync);
}

void GetTensorAsyncAutogradKernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                  torch::jit::Stack* stack) {
  using torch::jit::peek;
  const auto device = peek(*stack, 1, 3).toOptional<c10::Device>();
  const bool copy = peek(*stack, 2, 3).toBool();
  // Nobody below wants to see the call: the kernel itself, one dispatch less.
  if (!IsSeenBelow(keys)) {
    FuturePtr future = GetTensorAsyncKernel(peek(*stack, 0, 3).toTensor(), device, copy);
    torch::jit::drop(*stack, 3);
    torch::jit::push(*stack, std::move(future));
    return;
  }
  const at::Tensor& self = peek(*stack, 0, 3).toTensor();
  if (self.requires_grad() && at::GradMode::is_enabled()) {
    CheckSource(self, kGetTensorAsync);
    if (device) CheckDevice(*device, kGetTensorAsync);
    // Between devices this blocks: what is below shall see a value that is there.
    at::Tensor value = Fetched(self, device, copy);
    torch::jit::drop(*stack, 3);
    torch::jit::push(*stack, std::move(value), c10::IValue(), false);
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

void RefuseTransformKernel(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(
      false, op.schema().name(),
      ": expected a call outside of torch.func transforms (grad, jvp, vmap), got one inside: "
      "return the tensor from the transformed function, and fetch it then");
}

void GetTensorKernel(const at::Tensor& self, const c10::IValue& promise) {
  CheckSource(self, "get_tensor");
  PromiseArgument<TensorPromiseState>(promise, "get_tensor")->Set(self);
}

namespace {

// Whether torch's allocator has made its memory, which is then of nobody else.
bool IsOfAllocator(const at::Tensor& self) {
  return self.has_storage() &&
         self.storage().data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter();
}

}  // namespace

void GetTensorCopyKernel(const at::Tensor& self, const c10::IValue& promise, bool copy) {
  CheckSource(self, "get_tensor");
  const auto state = PromiseArgument<TensorPromiseState>(promise, "get_tensor");
  // On its way to another process a value on the CPU is copied anyway, before this returns, if it
  // does not lie in memory that was lent for it.
  const bool is_copied = self.is_cpu() && state->LeavesProcess() && IsOfAllocator(self);
  if (!copy || is_copied) return state->Set(self);
  state->Set(self.clone());
}

FuturePtr GetFutureKernel(const c10::IValue& promise) {
  return PromiseArgument<PromiseState>(promise, "get_future")->future();
}

}  // namespace dtorch
