#include "operand.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <utility>

namespace fake {

Operand::Operand(const at::Tensor& tensor)
    : sizes_(tensor.sizes()),
      strides_(tensor.strides()),
      dtype_(tensor.scalar_type()),
      conj_(tensor.is_conj()),
      neg_(tensor.is_neg()) {
  // Not data_ptr(), which asks copy-on-write storage for a copy of its own: there is none here.
  if (tensor.numel() != 0) {
    data_ = static_cast<char*>(const_cast<void*>(tensor.storage().data())) +
            tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
  }
}

Operand Operand::Keep(at::Tensor tensor) {
  Operand operand;
  operand.kept_ = std::move(tensor);
  return operand;
}

at::Tensor Operand::OnCpu() const {
  if (kept_.defined()) return kept_;
  const auto options = at::TensorOptions(dtype_);
  if (data_ == nullptr) return at::empty(sizes_, options);
  at::Tensor tensor = at::from_blob(data_, sizes_, strides_, options);
  tensor.unsafeGetTensorImpl()->_set_conj(conj_);
  tensor.unsafeGetTensorImpl()->_set_neg(neg_);
  return tensor;
}

}  // namespace fake
