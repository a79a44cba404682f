#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>

// Copies. Each is queued; one to or from the host that is not non_blocking, or not of pinned
// memory, then blocks the caller until it is done.
namespace fake {

/// aten::_copy_from: one of the two is a fake tensor. On the current stream of the source's device
/// if that is one, else of the destination's. Strides, dtype and layout may differ.
at::Tensor CopyFrom(const at::Tensor& source, const at::Tensor& destination, bool non_blocking);

/// Keeps what fits, in the order of the current stream.
void ResizeStorage(c10::StorageImpl& storage, size_t size);

/// While it lives the blocking copies of this thread count as those of an operator that runs on
/// the CPU.
class CpuFallback {
 public:
  CpuFallback();
  ~CpuFallback();
  CpuFallback(const CpuFallback&) = delete;
  CpuFallback& operator=(const CpuFallback&) = delete;
};

}  // namespace fake
