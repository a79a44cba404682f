#include "dtorch/file/codec.h"

#include "dtorch/base/fork.h"
#include "dtorch/promise/device_memory.h"
#include "dtorch/promise/sendable.h"
#include "dtorch/promise/unseen.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <stdexcept>
#include <utility>

namespace dtorch::file {
namespace {

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
  const auto dtype = CheckReceived(received.dtype, received.sizes, received.bytes);
  const uint64_t bytes = received.bytes;
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
  return DeviceNamed(received.device_type, received.device_index);
}

}  // namespace dtorch::file
