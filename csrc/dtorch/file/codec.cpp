#include "dtorch/file/codec.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <stdexcept>
#include <utility>

namespace dtorch::file {
namespace {

constexpr int kDtypes = static_cast<int>(c10::ScalarType::NumOptions);

[[noreturn]] void Refuse(const char* kind, const char* instead) {
  TORCH_CHECK_TYPE(false, "promise: expected a dense tensor to send to another process, got a ",
                   kind, " one: ", instead);
}

// A dtype whose elements can be copied whatever they mean.
c10::ScalarType SameSize(const at::Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1:
      return c10::kByte;
    case 2:
      return c10::kShort;
    case 4:
      return c10::kInt;
    case 8:
      return c10::kLong;
    default:
      return tensor.scalar_type();
  }
}

}  // namespace

at::Tensor Sendable(const at::Tensor& value) {
  if (value.key_set().has(c10::DispatchKey::Python)) {
    Refuse("subclass", "pass its plain tensor, t.as_subclass(torch.Tensor)");
  }
  if (value.is_nested())
    Refuse("nested", "send t.values() and t.offsets(), or t.to_padded_tensor()");
  if (value.layout() != c10::kStrided) Refuse("sparse", "send t.to_dense(), or its parts");
  if (value.is_quantized()) Refuse("quantised", "send t.int_repr(), or t.dequantize()");
  if (value.is_meta()) Refuse("meta", "it has no data");
  at::NoGradGuard no_grad;
  return value.detach().cpu().resolve_conj().resolve_neg();
}

shm::Attachment::Value Describe(const at::Tensor& sendable) {
  shm::Attachment::Value value;
  value.payload = shm::Payload::kTensor;
  value.dtype = static_cast<uint8_t>(sendable.scalar_type());
  value.sizes = sendable.sizes().data();
  value.dims = static_cast<size_t>(sendable.dim());
  value.bytes = static_cast<uint64_t>(sendable.numel()) * sendable.element_size();
  return value;
}

void Write(const at::Tensor& sendable, std::byte* bytes) {
  if (sendable.numel() == 0) return;
  if (sendable.is_contiguous()) {
    std::memcpy(bytes, sendable.const_data_ptr(),
                static_cast<size_t>(sendable.numel()) * sendable.element_size());
    return;
  }
  at::NoGradGuard no_grad;
  const auto dtype = SameSize(sendable);
  at::from_blob(bytes, sendable.sizes(), at::TensorOptions().dtype(dtype))
      .copy_(sendable.view(dtype));
}

at::Tensor Read(shm::Received received) {
  if (!received.defect.empty()) {
    throw std::runtime_error("what the producer published makes no sense: " + received.defect);
  }
  if (received.dtype >= kDtypes) {
    throw std::runtime_error("what the producer published has no dtype of this torch: code " +
                             std::to_string(received.dtype));
  }
  const auto dtype = static_cast<c10::ScalarType>(received.dtype);
  if (c10::isQIntType(dtype) || dtype == c10::ScalarType::Undefined) {
    throw std::runtime_error("what the producer published has no plain dtype");
  }
  uint64_t bytes = c10::elementSize(dtype);
  for (const int64_t size : received.sizes) {
    if (size < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes)) {
      throw std::runtime_error("what the producer published has an impossible shape");
    }
  }
  if (bytes != received.bytes) {
    throw std::runtime_error("what the producer published has a shape of " + std::to_string(bytes) +
                             " bytes, but " + std::to_string(received.bytes) + " bytes");
  }
  const auto options = at::TensorOptions().dtype(dtype);
  if (bytes == 0) return at::empty(received.sizes, options);
  return at::from_blob(
      received.data, received.sizes,
      [keep = std::move(received.keep)](void*) mutable { keep.reset(); }, options);
}

}  // namespace dtorch::file
