#include "dtorch/ops/functional.h"

#include "dtorch/base/error.h"
#include "dtorch/device/device.h"
#include "dtorch/future/wait.h"
#include "dtorch/ops/get_tensor.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <atomic>
#include <memory>
#include <type_traits>
#include <utility>

namespace dtorch {
namespace {

// What the storage of a handle owns, and holds: its byte.
struct Started {
  explicit Started(FuturePtr future) : future(std::move(future)) {}
  static void Delete(void* context) { delete static_cast<Started*>(context); }

  // nullptr if `handle` is a tensor that somebody else has made: a copy of one.
  static Started* Of(const at::Tensor& handle) {
    if (!handle.has_storage()) return nullptr;
    return handle.storage().data_ptr().cast_context<Started>(&Delete);
  }

  FuturePtr future;
  std::atomic<bool> taken{false};
  uint8_t byte = 0;
};

FuturePtr Start(const at::Tensor& self, std::optional<c10::Device> device, bool frozen,
                const char* op) {
  // The graph gets the gradient from get_wait.
  const at::AutoDispatchBelowADInplaceOrView below;
  const Snapshot snapshot = frozen ? Snapshot::kCaller : Snapshot::kClone;
  // The value has neither bit. Resolving is a copy: the snapshot.
  if ((self.is_conj() || self.is_neg()) && (!device || IsSameDevice(*device, self.device()))) {
    return Fetch(self.resolve_conj().resolve_neg(), std::nullopt, /*copy=*/false, snapshot, op);
  }
  return Fetch(self, device, /*copy=*/true, snapshot, op);
}

// Torch 2.13 has put the count of its owners into a node.
template <typename Node>
auto MakeNode() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<Node>();
  } else {
    return std::make_shared<Node>();
  }
}

at::Tensor ValueOf(const FuturePtr& future) {
  return WaitForValue(future, Deadline::Never()).toTensor();
}

at::Tensor Take(Started& started) {
  if (started.taken.exchange(true)) {
    throw FutureAlreadyRetrievedError(
        "get_wait: handle: expected one whose value has not been taken, got one that has been "
        "waited for: keep the value, or start another fetch");
  }
  try {
    at::Tensor value = ValueOf(started.future);
    started.future.reset();
    return value;
  } catch (...) {
    started.taken = false;  // it was interrupted, or failed: the next wait tells the same
    throw;
  }
}

}  // namespace

at::Tensor GetStartKernel(const at::Tensor& self, std::optional<c10::Device> device, bool frozen) {
  TORCH_CHECK_VALUE(self.defined(),
                    "get_start: self: expected a tensor, got an undefined one (None)");
  auto started = std::make_unique<Started>(Start(self, device, frozen, "get_start"));
  uint8_t* const byte = &started->byte;
  return at::for_blob(byte, {1})
      .context(started.release(), &Started::Delete)
      .options(at::TensorOptions(at::kByte))
      .make_tensor();
}

at::Tensor GetWaitKernel(const at::Tensor& handle, const at::Tensor& source,
                         std::optional<c10::Device> device) {
  TORCH_CHECK_VALUE(handle.defined() && source.defined(),
                    "get_wait: expected the handle and the tensor of a get_start, got an undefined "
                    "tensor (None)");
  Started* const started = Started::Of(handle);
  at::Tensor value =
      started ? Take(*started) : ValueOf(Start(source, device, /*frozen=*/true, "get_wait"));
  TORCH_CHECK_VALUE(value.dtype() == source.dtype() && value.dim() == source.dim() &&
                        value.device().type() == device.value_or(source.device()).type(),
                    "get_wait: expected the tensor and the device that get_start was given");
  return value;
}

at::Tensor GetWaitAutogradKernel(c10::DispatchKeySet keys, const at::Tensor& handle,
                                 const at::Tensor& source, std::optional<c10::Device> device) {
  namespace autograd = torch::autograd;
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, std::optional<c10::Device>);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("dtorch::get_wait", "").typed<Signature>();
  at::Tensor value = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return op.redispatch(keys & c10::after_autograd_keyset, handle, source, device);
  }();
  // An inference tensor, of a start in inference mode, records nothing.
  if (value.is_inference() || !autograd::isDifferentiableType(value.scalar_type())) return value;
  if (autograd::compute_requires_grad(source)) {
    auto node = MakeNode<autograd::generated::ToCopyBackward0>();
    node->set_next_edges(autograd::collect_next_edges(source));
    node->self_options = source.options();
    autograd::set_history(value, node);
  }
  if (autograd::isFwGradDefined(source)) {
    value._set_fw_grad(source._fw_grad(/*level=*/0).to(value.device()), /*level=*/0,
                       /*is_inplace_op=*/false);
  }
  return value;
}

}  // namespace dtorch
