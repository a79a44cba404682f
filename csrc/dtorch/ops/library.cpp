// Registers the operators and the promise classes: schemas.h says which, this says what runs.

#include "dtorch/base/error.h"
#include "dtorch/ops/boxing.h"
#include "dtorch/ops/functional.h"
#include "dtorch/ops/get_tensor.h"
#include "dtorch/ops/get_tensors.h"
#include "dtorch/ops/schemas.h"
#include "dtorch/ops/subclass.h"
#include "dtorch/ops/sync.h"
#include "dtorch/promise/promise_state.h"

#include <torch/custom_class.h>
#include <torch/library.h>

#include <stdexcept>
#include <string>
#include <tuple>

namespace dtorch {
namespace {

c10::FunctionSchema Schema(const char* text) {
  return torch::schema(text, c10::AliasAnalysisKind::CONSERVATIVE);
}

template <auto kFn>
torch::CppFunction Boxed() {
  return torch::CppFunction::makeFromBoxedFunction<&BoxedKernel<kFn>::Call>();
}

template <typename State>
torch::class_<State> DefinePromise(torch::Library& m, const char* name) {
  using Self = c10::intrusive_ptr<State>;
  return m.class_<State>(name)
      .def(torch::init<>())
      .def("set_exception",
           [](const Self& self, const std::string& message) {
             self->SetError(std::make_exception_ptr(std::runtime_error(message)));
           })
      .def("cancel", [](const Self& self) { return self->Cancel(); })
      .def("token", [](const Self& self) { return self->Token(); })
      // torch.compile takes an object that has this as an input of a graph.
      .def("__obj_flatten__",
           [](const Self&) {
             return std::make_tuple(std::make_tuple(std::string("promise"), true));
           })
      .def_pickle([](const Self& self) { return self->Token(); },
                  [](const std::string& token) { return State::FromToken(token); });
}

}  // namespace

TORCH_LIBRARY(dtorch, m) {
  DefinePromise<TensorPromiseState>(m, "TensorPromise")
      .def("set_value", [](const c10::intrusive_ptr<TensorPromiseState>& self,
                           at::Tensor value) { self->Set(std::move(value)); })
      .def("empty",
           [](const c10::intrusive_ptr<TensorPromiseState>& self, std::vector<int64_t> size,
              at::ScalarType dtype) { return self->Empty(size, dtype); });
  DefinePromise<VoidPromiseState>(m, "VoidPromise")
      .def("set_value", [](const c10::intrusive_ptr<VoidPromiseState>& self) { self->Set(); });

  m.def(Schema(schemas::kGetTensorAsync));
  m.def(Schema(schemas::kGetTensorsAsync));
  m.def(Schema(schemas::kGetTensor));
  m.def(Schema(schemas::kGetTensorCopy));
  m.def(Schema(schemas::kGetStart));
  m.def(Schema(schemas::kGetWait));
  m.def(Schema(schemas::kGetFuture));
  m.def(Schema(schemas::kGetFutureVoid));
  m.def(Schema(schemas::kSync));
  m.def(Schema(schemas::kSyncPromise));
  m.def(Schema(schemas::kSyncDevicesPromise));
}

// One kernel for all devices, below autograd: what it does to tensors is recorded.
TORCH_LIBRARY_IMPL(dtorch, CompositeExplicitAutograd, m) {
  m.impl("get_tensor_async", Boxed<&GetTensorAsyncKernel>());
  m.impl("get_tensors_async", Boxed<&GetTensorsAsyncKernel>());
  m.impl("get_tensor", Boxed<&GetTensorKernel>());
  m.impl("get_tensor.copy", Boxed<&GetTensorCopyKernel>());
  m.impl("get_start", &GetStartKernel);
  m.impl("get_wait", &GetWaitKernel);
  m.impl("get_future", Boxed<&GetFutureKernel>());
  m.impl("get_future.void", Boxed<&GetFutureKernel>());
  m.impl("sync", Boxed<&SyncKernel>());
  m.impl("sync.promise", Boxed<&SyncPromiseKernel>());
  m.impl("sync.devices_promise", Boxed<&SyncDevicesPromiseKernel>());
}

// The copy, if one is asked for, is made here, where autograd records it: a dispatch mode or a fake
// tensor sees what is below.
TORCH_LIBRARY_IMPL(dtorch, Autograd, m) {
  m.impl("get_tensor_async",
         torch::CppFunction::makeFromBoxedFunction<&GetTensorAsyncAutogradKernel>());
  m.impl("get_tensors_async",
         torch::CppFunction::makeFromBoxedFunction<&GetTensorsAsyncAutogradKernel>());
  m.impl("get_tensor", torch::CppFunction::makeFallthrough());
  m.impl("get_tensor.copy", torch::CppFunction::makeFallthrough());
  m.impl("get_start", torch::CppFunction::makeFallthrough());
  m.impl("get_wait", &GetWaitAutogradKernel);
}

// A lazily conjugated or negated tensor is handed on as it is, not resolved into a copy.
TORCH_LIBRARY_IMPL(dtorch, Conjugate, m) {
  m.impl("get_tensor_async", torch::CppFunction::makeFallthrough());
  m.impl("get_tensors_async", torch::CppFunction::makeFallthrough());
  m.impl("get_tensor", torch::CppFunction::makeFallthrough());
  m.impl("get_tensor.copy", torch::CppFunction::makeFallthrough());
  m.impl("get_start", torch::CppFunction::makeFallthrough());
  m.impl("get_wait", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(dtorch, Negative, m) {
  m.impl("get_tensor_async", torch::CppFunction::makeFallthrough());
  m.impl("get_tensors_async", torch::CppFunction::makeFallthrough());
  m.impl("get_tensor", torch::CppFunction::makeFallthrough());
  m.impl("get_tensor.copy", torch::CppFunction::makeFallthrough());
  m.impl("get_start", torch::CppFunction::makeFallthrough());
  m.impl("get_wait", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(dtorch, ZeroTensor, m) {
  m.impl("get_tensor_async", torch::CppFunction::makeFallthrough());
  m.impl("get_tensors_async", torch::CppFunction::makeFallthrough());
  m.impl("get_tensor", torch::CppFunction::makeFallthrough());
  m.impl("get_tensor.copy", torch::CppFunction::makeFallthrough());
}

// A transform of torch.func would not see the tensor inside of the future: a wrong gradient.
TORCH_LIBRARY_IMPL(dtorch, FuncTorchDynamicLayerFrontMode, m) {
  m.impl("get_tensor_async", torch::CppFunction::makeFromBoxedFunction<&RefuseTransformKernel>());
  m.impl("get_tensors_async", torch::CppFunction::makeFromBoxedFunction<&RefuseTransformKernel>());
  m.impl("get_tensor", torch::CppFunction::makeFromBoxedFunction<&RefuseTransformKernel>());
  m.impl("get_tensor.copy", torch::CppFunction::makeFromBoxedFunction<&RefuseTransformKernel>());
}

TORCH_LIBRARY_IMPL(dtorch, PythonTLSSnapshot, m) {
  m.impl("get_tensor_async", torch::CppFunction::makeFromBoxedFunction<&CheckSubclassKernel>());
  m.impl("get_tensors_async", torch::CppFunction::makeFromBoxedFunction<&CheckSubclassKernel>());
  m.impl("get_tensor", torch::CppFunction::makeFromBoxedFunction<&CheckSubclassKernel>());
  m.impl("get_tensor.copy", torch::CppFunction::makeFromBoxedFunction<&CheckSubclassKernel>());
  m.impl("get_start", torch::CppFunction::makeFromBoxedFunction<&CheckSubclassKernel>());
  m.impl("get_wait", torch::CppFunction::makeFromBoxedFunction<&CheckSubclassKernel>());
}

}  // namespace dtorch
