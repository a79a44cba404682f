#include "dtorch/ops/subclass.h"

#include "dtorch/device/places.h"
#include "dtorch/promise/value_check.h"

#include <ATen/core/PythonFallbackKernel.h>
#include <c10/util/Exception.h>

namespace dtorch {
namespace {

void Check(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  const std::string reason = SubclassReason(tensor);
  TORCH_CHECK_TYPE(reason.empty(), op.schema().name(), ": ", reason);
}

}  // namespace

void CheckSubclassKernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack) {
  for (const c10::IValue& arg : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (arg.isTensor()) Check(op, arg.toTensor());
    if (!arg.isTensorList()) continue;
    const std::vector<at::Tensor> tensors = arg.toTensorVector();
    for (size_t i = 0; i < tensors.size(); ++i) AtPlace(i, [&] { Check(op, tensors[i]); });
  }
  // The rest is what PyTorch's own kernel for this key does.
  at::impl::MaybeSetTLSOnEntryGuard guard;
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER,
                                                c10::DispatchKey::PythonTLSSnapshot),
                     stack);
}

}  // namespace dtorch
