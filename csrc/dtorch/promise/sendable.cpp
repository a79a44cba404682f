#include "dtorch/promise/sendable.h"

#include "dtorch/promise/unseen.h"
#include "dtorch/promise/value_check.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <limits>
#include <stdexcept>
#include <string>

namespace dtorch {
namespace {

[[noreturn]] void Refuse(const char* kind, const char* instead) {
  TORCH_CHECK_TYPE(false, "promise: expected a dense tensor to send to another process, got a ",
                   kind, " one: ", instead);
}

// Whether the elements that the shape names are all in memory: what shards a model frees storages,
// and leaves the tensors.
bool HasItsElements(const at::Tensor& value) {
  const size_t needed =
      at::detail::computeStorageNbytes(value.sizes(), value.strides(), value.element_size(),
                                       static_cast<size_t>(value.storage_offset()));
  return needed <= value.storage().nbytes();
}

}  // namespace

void CheckSendable(const at::Tensor& value) {
  const std::string reason =
      value.defined() && value.numel() == 0 ? AnySubclassReason(value) : SubclassReason(value);
  TORCH_CHECK_TYPE(reason.empty(), "promise: ", reason);
  if (value.is_nested() || value.layout() == c10::kJagged) {
    Refuse("nested", "send t.values() and t.offsets(), or t.to_padded_tensor()");
  }
  if (value.key_set().has(c10::DispatchKey::Python)) {
    Refuse("subclass", "pass its plain tensor, t.as_subclass(torch.Tensor)");
  }
  if (value.key_set().has(c10::DispatchKey::Functionalize)) {
    Refuse("functional", "it is a stand-in inside of a transformation: send what that returns");
  }
  if (value.layout() == c10::kMkldnn) Refuse("mkldnn", "send t.to_dense()");
  if (value.layout() != c10::kStrided) Refuse("sparse", "send t.to_dense(), or its parts");
  if (value.is_quantized()) Refuse("quantised", "send t.int_repr(), or t.dequantize()");
  if (value.is_meta()) Refuse("meta", "it has no data");
  if (value._is_zerotensor()) return;
  if (!value.has_storage()) Refuse("wrapped", "send what the transform of torch.func returns");
  if (!HasItsElements(value)) {
    Refuse("freed",
           "its storage is smaller than its shape (it was resized, by what shards a model, "
           "say): send it while it is whole");
  }
}

at::Tensor Sendable(const at::Tensor& value, c10::Device device) {
  constexpr c10::DispatchKeySet kLazy{c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                      c10::DispatchKey::ZeroTensor};
  const bool is_there = value.device() == device;
  if (is_there && !value.key_set().has_any(kLazy)) return value;  // as nearly always
  const Unseen unseen;
  if (value._is_zerotensor()) {
    return at::zeros(value.sizes(), at::TensorOptions().dtype(value.scalar_type()).device(device));
  }
  const at::Tensor there = is_there ? value.detach() : value.detach().to(device);
  return there.resolve_conj().resolve_neg();
}

c10::ScalarType CheckReceived(uint64_t code, at::IntArrayRef sizes, uint64_t bytes) {
  if (code >= static_cast<uint64_t>(c10::ScalarType::NumOptions)) {
    throw std::runtime_error("what the producer published has no dtype of this torch: code " +
                             std::to_string(code));
  }
  const auto dtype = static_cast<c10::ScalarType>(code);
  if (c10::isQIntType(dtype) || dtype == c10::ScalarType::Undefined) {
    throw std::runtime_error("what the producer published has no plain dtype");
  }
  uint64_t needed = c10::elementSize(dtype);
  for (const int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(needed, static_cast<uint64_t>(size), &needed)) {
      throw std::runtime_error("what the producer published has an impossible shape");
    }
  }
  if (needed != bytes) {
    throw std::runtime_error("what the producer published has a shape of " +
                             std::to_string(needed) + " bytes, but " + std::to_string(bytes) +
                             " bytes");
  }
  return dtype;
}

c10::Device DeviceNamed(uint64_t type, int64_t index) {
  if (type == 0 || type >= c10::COMPILE_TIME_MAX_DEVICE_TYPES || index < 0 ||
      index > std::numeric_limits<c10::DeviceIndex>::max()) {
    return c10::kCPU;
  }
  return {static_cast<c10::DeviceType>(type), static_cast<c10::DeviceIndex>(index)};
}

}  // namespace dtorch
