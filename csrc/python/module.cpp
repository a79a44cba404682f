// The Python face of libdtorch_ops.so: what must touch a PyObject, and nothing else. Everything
// here may use the layers under csrc/dtorch; none of them knows this.

#include "dtorch/base/fork.h"
#include "dtorch/base/host.h"
#include "dtorch/future/outcome.h"
#include "dtorch/promise/value_check.h"

#include "python/awaiting.h"
#include "python/errors.h"
#include "python/future.h"
#include "python/gil.h"
#include "python/groups.h"
#include "python/logging.h"
#include "python/network.h"
#include "python/operators.h"
#include "python/promise.h"
#include "python/shared_memory.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>

namespace dtorch::python {
namespace {

namespace py = pybind11;

void CheckInterrupt() {
  GilAcquire gil;
  if (gil && PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::exception_ptr ErrorInValue(const c10::IValue& value) {
  return ErrorInObject(value.toPyObject());
}

// Subclasses whose value is not one tensor.
std::string CheckSubclass(const at::Tensor& tensor) {
  GilAcquire gil;
  if (!gil) return "";
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  for (py::handle type : py::type::of(object).attr("__mro__")) {
    const auto name = type.attr("__name__").cast<std::string>();
    const auto module = type.attr("__module__").cast<std::string>();
    if (name == "NestedTensor" && module.rfind("torch.nested", 0) == 0) {
      return "expected a plain tensor, got a jagged nested one: pass t.values() and t.offsets(), "
             "or "
             "torch.nested.to_padded_tensor(t, 0)";
    }
    if ((name == "UninitializedParameter" || name == "UninitializedBuffer") &&
        module.rfind("torch.nn", 0) == 0) {
      return "expected a tensor with a shape, got an uninitialized one of torch.nn, " + name +
             ": call its materialize(shape), or the module that has it, first";
    }
    if (name != "DTensor" || module.rfind("torch.distributed", 0) != 0) continue;
    return "expected a plain tensor, got a torch.distributed.tensor.DTensor, whose value is spread "
           "over processes: pass t.to_local() for this process's part, or t.full_tensor() for all "
           "of it";
  }
  return "";
}

}  // namespace
}  // namespace dtorch::python

PYBIND11_MODULE(_C, m) {
  using namespace dtorch::python;
  dtorch::SetHost({CheckInterrupt, DropGil, RetakeGil});
  dtorch::SetErrorInValueCheck(ErrorInValue);
  dtorch::SetSubclassCheck(CheckSubclass);
  dtorch::OnFork({.child = MayDrop::Forget});
  pybind11::module_::import("atexit").attr("register")(pybind11::cpp_function(MayDrop::NoMore));
  BindErrors(m);
  BindFuture(m);
  BindGroups(m);
  BindLogging(m);
  BindNetwork(m);
  BindOperators(m);
  BindPromise(m);
  BindSharedMemory(m);
  BindAwaiting(m);
}
