#include "dtorch/file/codec.h"

#include "dtorch/base/fork.h"
#include "dtorch/promise/device_memory.h"
#include "dtorch/promise/unseen.h"
#include "dtorch/promise/value_check.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
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

namespace {

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

at::Tensor Sendable(const at::Tensor& value) {
  constexpr c10::DispatchKeySet kLazy{c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                      c10::DispatchKey::ZeroTensor};
  if (value.is_cpu() && !value.key_set().has_any(kLazy)) return value;  // as nearly always
  const Unseen unseen;
  if (value._is_zerotensor()) {
    return at::zeros(value.sizes(), at::TensorOptions().dtype(value.scalar_type()));
  }
  return value.detach().cpu().resolve_conj().resolve_neg();
}

shm::Attachment::Value Describe(const at::Tensor& sendable) {
  shm::Attachment::Value value;
  value.payload = shm::Payload::kTensor;
  value.dtype = static_cast<uint8_t>(sendable.scalar_type());
  value.sizes = sendable.sizes().data();
  value.dims = static_cast<size_t>(sendable.dim());
  value.bytes = static_cast<uint64_t>(sendable.numel()) * sendable.element_size();
  if (sendable.is_contiguous()) value.data = sendable.const_data_ptr();
  return value;
}

at::Tensor Lent(const std::shared_ptr<shm::Attachment>& attachment, at::IntArrayRef size,
                c10::ScalarType dtype) {
  uint64_t bytes = c10::elementSize(dtype);
  for (const int64_t extent : size) {
    TORCH_CHECK_VALUE(
        extent >= 0 && !__builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &bytes),
        "empty: size: expected extents of a tensor that fits into memory, got ", size);
  }
  const auto options = at::TensorOptions().dtype(dtype);
  // What is sent in the slot itself gains nothing.
  if (bytes <= shm::kInlineBytes) return at::empty(size, options);
  auto loan = shm::Attachment::Lend(attachment, bytes);
  return at::from_blob(
      loan.data, size, [keep = std::move(loan.keep)](void*) mutable { keep.reset(); }, options);
}

void Write(const at::Tensor& sendable, std::byte* bytes) {
  if (sendable.numel() == 0) return;
  if (sendable.is_contiguous()) {
    std::memcpy(bytes, sendable.const_data_ptr(),
                static_cast<size_t>(sendable.numel()) * sendable.element_size());
    return;
  }
  // The threads that torch would copy with are not in a forked child: it would wait for them.
  struct OneThread {
    OneThread() {
      if (ForkGeneration() != 0) at::set_num_threads(1);
    }
    ~OneThread() {
      if (ForkGeneration() != 0) at::set_num_threads(threads);
    }
    const int threads = at::get_num_threads();
  } one_thread;
  const Unseen unseen;
  const auto dtype = SameSize(sendable);
  at::from_blob(bytes, sendable.sizes(), at::TensorOptions().dtype(dtype))
      .copy_(sendable.view(dtype));
}

at::Tensor Read(shm::Received received) {
  const Unseen unseen;  // a thread that waits reads it as the listening thread would
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
  if (received.payload == shm::Payload::kDeviceTensor) {
    auto block = std::static_pointer_cast<DeviceBlock>(received.memory);
    if (bytes > block->bytes) {
      throw std::runtime_error("what the producer published does not fit into the memory of " +
                               block->device.str() + " that it was given");
    }
    return at::for_blob(block->data, received.sizes)
        .deleter([block](void*) mutable { block.reset(); })
        .target_device(block->device)
        .options(options.device(block->device))
        .make_tensor();
  }
  if (!received.block) {
    at::Tensor tensor = at::detail::empty_cpu(received.sizes, options);
    if (bytes > 0) std::memcpy(tensor.mutable_data_ptr(), received.data(), bytes);
    return tensor;
  }
  if (bytes == 0) return at::empty(received.sizes, options);
  return at::from_blob(
      received.block, received.sizes,
      [keep = std::move(received.keep)](void*) mutable { keep.reset(); }, options);
}

c10::Device DeviceOf(const shm::Received& received) {
  if (received.payload == shm::Payload::kDeviceTensor && received.memory) {
    return std::static_pointer_cast<DeviceBlock>(received.memory)->device;
  }
  // Whatever the other process has written: an index that is none is none of ours.
  if (received.device_type == 0 || received.device_type >= c10::COMPILE_TIME_MAX_DEVICE_TYPES ||
      received.device_index < 0) {
    return c10::kCPU;
  }
  return {static_cast<c10::DeviceType>(received.device_type), received.device_index};
}

}  // namespace dtorch::file
