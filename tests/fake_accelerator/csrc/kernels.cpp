// The operators. Those that tests time or hold back are queued; the rest runs on the CPU, which
// blocks the caller.

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/add.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/fill.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zero.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "allocators.h"
#include "copy.h"
#include "counters.h"
#include "current.h"
#include "memory.h"
#include "operand.h"

namespace fake {

namespace {

using at::IntArrayRef;
using at::Tensor;

// ---- Factories ----------------------------------------------------------------------------------

void CheckOptions(std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided,
              "fake accelerator: expected the strided layout, got ", *layout);
  TORCH_CHECK(!pin_memory.value_or(false), "only dense CPU tensors can be pinned");
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor Empty(IntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout> layout, std::optional<at::Device> device,
             std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  CheckOptions(layout, pin_memory);
  const c10::DeviceGuard guard(device.value_or(kType));
  return at::detail::empty_generic(size, TensorAllocator(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

Tensor EmptyStrided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                    std::optional<at::Layout> layout, std::optional<at::Device> device,
                    std::optional<bool> pin_memory) {
  CheckOptions(layout, pin_memory);
  const c10::DeviceGuard guard(device.value_or(kType));
  return at::detail::empty_strided_generic(size, stride, TensorAllocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

// ---- Views --------------------------------------------------------------------------------------

Tensor AsStrided(const Tensor& self, IntArrayRef size, IntArrayRef stride,
                 std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

const Tensor& Resize(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* const impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t needed = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.itemsize(), static_cast<size_t>(self.storage_offset()));
  auto* const storage = self.storage().unsafeGetStorageImpl();
  if (self.numel() != 0 && needed > storage->nbytes()) ResizeStorage(*storage, needed);
  return self;
}

Tensor& SetStorage(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size,
                   IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

Tensor& SetWholeStorage(Tensor& self, at::Storage source) {
  const int64_t count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return SetStorage(self, std::move(source), 0, {count}, {});
}

Tensor& SetTensor(Tensor& self, const Tensor& source) {
  return SetStorage(self, source.storage(), source.storage_offset(), source.sizes(),
                    source.strides());
}

void RecordStream(Tensor& self, c10::Stream stream) {
  device_memory().RecordUse(self.storage().data(), FromC10(stream));
}

// ---- Copies and reads ---------------------------------------------------------------------------

Tensor CopyFromAndResize(const Tensor& self, const Tensor& destination) {
  destination.resize_(self.sizes());
  return CopyFrom(self, destination, /*non_blocking=*/false);
}

at::Scalar LocalScalarDense(const Tensor& self) {
  CountSync(Sync::kItem);
  Stream& stream = CurrentStream(self.device().index());
  at::Scalar result;
  Await(Submit(stream, Kind::kCopy, [operand = Operand(self), &result] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    result = at::_local_scalar_dense(operand.OnCpu());
  }));
  return result;
}

// ---- Arithmetic ---------------------------------------------------------------------------------

template <typename Function>
void Launch(const Tensor& on, Function function) {
  Submit(CurrentStream(on.device().index()), Kind::kKernel, [function = std::move(function)] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    function();
  });
}

Tensor& Fill(Tensor& self, const at::Scalar& value) {
  Launch(self, [out = Operand(self), value] {
    Tensor on_cpu = out.OnCpu();
    at::fill_(on_cpu, value);
  });
  return self;
}

Tensor& Zero(Tensor& self) { return Fill(self, 0); }

// A number on the CPU is an argument of the kernel: its value is that of the call.
Operand Argument(const Tensor& tensor, c10::Device device) {
  if (!tensor.is_cpu()) {
    TORCH_CHECK(tensor.device() == device, "Expected all tensors to be on the same device, but ",
                "found at least two devices, ", device, " and ", tensor.device(), "!");
    return Operand(tensor);
  }
  TORCH_CHECK(tensor.dim() == 0, "Expected all tensors to be on the same device, but found at ",
              "least two devices, ", device, " and cpu!");
  const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  Tensor copy = at::clone(tensor);
  copy.unsafeGetTensorImpl()->set_wrapped_number(is_number);
  return Operand::Keep(std::move(copy));
}

// What `function` computes of `a` and `b`, into `out`, which is made if it is undefined.
template <typename Function>
Tensor Binary(const Tensor& a, const Tensor& b, Tensor out, Function function) {
  const c10::Device device = a.is_cpu() ? b.device() : a.device();
  const c10::DeviceGuard guard(device);
  const Operand left = Argument(a, device);
  const Operand right = Argument(b, device);
  const auto size = at::infer_size_dimvector(a.sizes(), b.sizes());
  if (!out.defined()) {
    const auto dtype = at::result_type(a, b);
    const Tensor& like = a.sizes() == IntArrayRef(size) && !a.is_cpu() ? a : b;
    out = like.sizes() == IntArrayRef(size) && !like.is_cpu()
              ? at::empty_like(like, like.options().dtype(dtype))
              : at::empty(size, at::TensorOptions(device).dtype(dtype));
  } else if (out.sizes() != IntArrayRef(size)) {
    out.resize_(size);
  }
  Launch(out, [left, right, result = Operand(out), function] {
    Tensor on_cpu = result.OnCpu();
    function(on_cpu, left.OnCpu(), right.OnCpu());
  });
  return out;
}

Tensor& AddOut(const Tensor& a, const Tensor& b, const at::Scalar& alpha, Tensor& out) {
  Binary(a, b, out, [alpha](Tensor& result, const Tensor& left, const Tensor& right) {
    at::add_out(result, left, right, alpha);
  });
  return out;
}

Tensor Add(const Tensor& a, const Tensor& b, const at::Scalar& alpha) {
  return Binary(a, b, {}, [alpha](Tensor& result, const Tensor& left, const Tensor& right) {
    at::add_out(result, left, right, alpha);
  });
}

Tensor& AddInPlace(Tensor& self, const Tensor& other, const at::Scalar& alpha) {
  return AddOut(self, other, alpha, self);
}

void MulOnCpu(Tensor& result, const Tensor& left, const Tensor& right) {
  at::mul_out(result, left, right);
}

Tensor& MulOut(const Tensor& a, const Tensor& b, Tensor& out) {
  Binary(a, b, out, &MulOnCpu);
  return out;
}

Tensor Mul(const Tensor& a, const Tensor& b) { return Binary(a, b, {}, &MulOnCpu); }

Tensor& MulInPlace(Tensor& self, const Tensor& other) { return MulOut(self, other, self); }

// ---- Everything else ----------------------------------------------------------------------------

void OnCpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const CpuFallback fallback;
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&OnCpu>());
}

// The copy itself conjugates and negates. torch would do it first, by a copy, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &Empty);
  m.impl("empty_strided", &EmptyStrided);

  m.impl("as_strided", &AsStrided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("resize_", &Resize);
  m.impl("set_.source_Storage_storage_offset", &SetStorage);
  m.impl("set_.source_Storage", &SetWholeStorage);
  m.impl("set_.source_Tensor", &SetTensor);
  m.impl("record_stream", &RecordStream);

  m.impl("_copy_from", &CopyFrom);
  m.impl("_copy_from_and_resize", &CopyFromAndResize);
  m.impl("_local_scalar_dense", &LocalScalarDense);

  m.impl("fill_.Scalar", &Fill);
  m.impl("zero_", &Zero);
  m.impl("add.Tensor", &Add);
  m.impl("add.out", &AddOut);
  m.impl("add_.Tensor", &AddInPlace);
  m.impl("mul.Tensor", &Mul);
  m.impl("mul.out", &MulOut);
  m.impl("mul_.Tensor", &MulInPlace);
}

}  // namespace fake
