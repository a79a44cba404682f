#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace fake {

/// A tensor as a queued task refers to it: by address, as a kernel does. It keeps no storage: who
/// frees or overwrites the memory before the task has run will see that in the result.
class Operand {
 public:
  /// Of a fake tensor, or of a CPU tensor that outlives the task or is pinned.
  explicit Operand(const at::Tensor& tensor);

  /// A CPU tensor that is kept: nobody but the task may have it.
  static Operand Keep(at::Tensor tensor);

  /// What the task works on: a CPU tensor over the memory. On the worker.
  at::Tensor OnCpu() const;

 private:
  Operand() = default;

  void* data_ = nullptr;
  c10::SmallVector<int64_t, 5> sizes_;
  c10::SmallVector<int64_t, 5> strides_;
  at::ScalarType dtype_ = at::kFloat;
  bool conj_ = false;
  bool neg_ = false;
  at::Tensor kept_;
};

}  // namespace fake
