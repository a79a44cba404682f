#include "python/operators.h"

#include "dtorch/base/host.h"
#include "dtorch/future/waiter_list.h"

#include "python/errors.h"
#include "python/future.h"
#include "python/native_type.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/api/object.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace dtorch::python {
namespace {

namespace py = pybind11;

template <typename F>
constexpr PyCFunction AsCFunction(F function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// ---- to_torch_async -----------------------------------------------------------------------------

// What Python registers; leaked on purpose.
PyObject* get_tensor_async = nullptr;   // the OpOverload
PyObject* get_tensors_async = nullptr;  // that of several
PyObject* fetch_tree = nullptr;         // for what is no tensor

// Whether a __torch_function__ of the tensor's class, or of a mode, may want to see the call.
bool IsOverridden(PyObject* input) {
  return !THPVariable_CheckExact(input) || at::impl::torch_function_mode_enabled();
}

// What it makes of the call.
py::object CallOverridden(PyObject* overload, PyObject* input, PyObject* device, PyObject* copy) {
  py::dict kwargs;
  kwargs["device"] = py::handle(device);
  kwargs["copy"] = py::handle(copy);
  auto result = py::reinterpret_steal<py::object>(
      PyObject_Call(overload, py::make_tuple(py::handle(input)).ptr(), kwargs.ptr()));
  if (!result) throw py::error_already_set();
  return result;
}

c10::IValue DeviceArgument(PyObject* device) {
  if (device == Py_None) return {};
  if (THPDevice_Check(device)) return reinterpret_cast<THPDevice*>(device)->device;
  const bool convertible =
      PyUnicode_Check(device) || (PyLong_Check(device) && !PyBool_Check(device));
  TORCH_CHECK_TYPE(convertible, "device: expected a torch.device, a string or an index, got ",
                   Py_TYPE(device)->tp_name);
  static PyObject* make_device =
      py::object(py::module_::import("torch").attr("device")).release().ptr();
  auto made = py::reinterpret_steal<py::object>(PyObject_CallOneArg(make_device, device));
  if (!made) {
    const py::error_already_set error;
    TORCH_CHECK_VALUE(false, "device: expected one that torch knows, got ",
                      py::repr(device).cast<std::string>(), ": ",
                      py::str(error.value()).cast<std::string>());
  }
  return reinterpret_cast<THPDevice*>(made.ptr())->device;
}

template <typename Input>
FuturePtr Dispatch(const c10::OperatorHandle& op, Input&& input, c10::IValue&& device, bool copy) {
  torch::jit::Stack stack;
  stack.reserve(3);
  stack.emplace_back(std::forward<Input>(input));
  stack.push_back(std::move(device));
  stack.emplace_back(copy);
  {
    HostUnlocked unlocked;  // a copy takes time
    op.callBoxed(&stack);
  }
  return std::move(stack.back()).toFuture();
}

FuturePtr Dispatch(PyObject* input, c10::IValue&& device, bool copy) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("dtorch::get_tensor_async", "");
  return Dispatch(op, THPVariable_Unpack(input), std::move(device), copy);
}

PyObject* ToTorchAsync(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  return Guarded([&] {
    TORCH_CHECK_TYPE(nargs == 3, "to_torch_async: expected input, device and copy");
    PyObject *input = args[0], *device = args[1], *copy = args[2];
    TORCH_CHECK_TYPE(PyBool_Check(copy), "copy: expected a bool, got ", Py_TYPE(copy)->tp_name);
    if (!THPVariable_Check(input)) return PyObject_Vectorcall(fetch_tree, args, 3, nullptr);
    if (IsOverridden(input)) {
      py::object result = CallOverridden(get_tensor_async, input, device, copy);
      if (!IsTorchFuture(result.ptr())) return result.release().ptr();
      FuturePtr future = FutureFromObject(result, "get_tensor_async");
      return NewHandle(HandleKind::kTensorFuture, std::move(future)).release().ptr();
    }
    FuturePtr future = Dispatch(input, DeviceArgument(device), copy == Py_True);
    return NewHandle(HandleKind::kTensorFuture, std::move(future)).release().ptr();
  });
}

PyMethodDef to_torch_async_def = {
    "to_torch_async", AsCFunction(ToTorchAsync), METH_FASTCALL,
    "to_torch_async(input, device, copy, /)\n--\n\nCall the operator."};

// ---- to_torch_async of a tree -------------------------------------------------------------------

PyObject* FetchTensors(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  return Guarded([&] {
    TORCH_CHECK_TYPE(nargs == 4 && PyList_Check(args[0]),
                     "fetch_tensors: expected a list, tree, device and copy");
    PyObject *list = args[0], *tree = args[1], *device = args[2], *copy = args[3];
    const Py_ssize_t size = PyList_GET_SIZE(list);
    std::vector<at::Tensor> tensors;
    tensors.reserve(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* item = PyList_GET_ITEM(list, i);
      if (IsOverridden(item)) break;
      tensors.push_back(THPVariable_Unpack(item));
    }
    FuturePtr future;
    if (tensors.size() < static_cast<size_t>(size)) {
      py::object result = CallOverridden(get_tensors_async, list, device, copy);
      if (!IsTorchFuture(result.ptr())) return result.release().ptr();
      future = FutureFromObject(result, "get_tensors_async");
    } else {
      static const auto op =
          c10::Dispatcher::singleton().findSchemaOrThrow("dtorch::get_tensors_async", "");
      future = Dispatch(op, std::move(tensors), DeviceArgument(device), copy == Py_True);
    }
    return NewTreeHandle(std::move(future), tree).release().ptr();
  });
}

PyMethodDef fetch_tensors_def = {
    "fetch_tensors", AsCFunction(FetchTensors), METH_FASTCALL,
    "fetch_tensors(tensors, tree, device, copy, /)\n--\n\nCall the operator for several."};

// ---- get_tensor_async ---------------------------------------------------------------------------

// What its OpOverload calls. torch's own matches arguments against the schema in a general way,
// which costs more than all the rest: one plain tensor goes to the dispatcher at once, all else to
// torch.
PyObject* general_operator = nullptr;

PyObject* CallOperator(PyObject*, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  if (nargs != 1 || names || !THPVariable_CheckExact(args[0]) ||
      at::impl::torch_function_mode_enabled()) {
    return PyObject_Vectorcall(general_operator, args, static_cast<size_t>(nargs), names);
  }
  return Guarded(
      [&] { return NewBareFuture(Dispatch(args[0], c10::IValue(), false)).release().ptr(); });
}

PyMethodDef call_operator_def = {"get_tensor_async", AsCFunction(CallOperator),
                                 METH_FASTCALL | METH_KEYWORDS, "dtorch::get_tensor_async"};

// ---- Checked arguments --------------------------------------------------------------------------

// torch's conversion of arguments follows a null pointer where None is given for a Future, or an
// object whose __init__ has not run for a script object. And in eager mode it takes a script object
// of any class for that of any other.
struct Parameter {
  std::string what;  // "operator: name"
  std::string name;
  std::string type;  // as the schema has it; kAnyPromise where the overloads differ in the class

  static constexpr std::string_view kClasses = "__torch__.torch.classes.dtorch.";
  static constexpr std::string_view kAnyPromise = "promise";

  void Check(PyObject* argument) const {
    if (type == "Future[t]") {
      FutureFromObject(argument, what.c_str());
    } else if (type == "List[Future[t]]") {
      TORCH_CHECK_TYPE(PyList_Check(argument) || PyTuple_Check(argument), what,
                       ": expected a list of torch futures, got ", Py_TYPE(argument)->tp_name);
      FuturesFromSequence(argument, what.c_str());
    } else {
      CheckPromise(argument);
    }
  }

 private:
  void CheckPromise(PyObject* argument) const {
    const bool one_class = type.rfind(kClasses, 0) == 0;
    const std::string expected = one_class             ? type.substr(kClasses.size())
                                 : type == kAnyPromise ? "TensorPromise or VoidPromise"
                                                       : "promise";
    const char* found = Py_TYPE(argument)->tp_name;
    if (PyObject_TypeCheck(argument, ScriptObjectType())) {
      const auto* object = NativeValue<torch::jit::Object>(argument);
      TORCH_CHECK_TYPE(object, what, ": expected a ", expected, ", got a ", found,
                       " whose __init__ has not been called");
      TORCH_CHECK_TYPE(!one_class || object->type()->name()->qualifiedName() == type, what,
                       ": expected a ", expected, ", got a ", found);
    } else if (one_class || type == kAnyPromise) {
      // What stands for a promise while a graph is traced is torch's business.
      const bool plain = argument == Py_None || PyLong_Check(argument) || PyFloat_Check(argument) ||
                         PyUnicode_Check(argument) || PyList_Check(argument) ||
                         PyTuple_Check(argument) || PyDict_Check(argument) ||
                         THPVariable_CheckExact(argument) || IsTorchFuture(argument);
      TORCH_CHECK_TYPE(!plain, what, ": expected a ", expected, ", got ", found);
    }
  }

  static PyTypeObject* ScriptObjectType() {
    static auto* type = reinterpret_cast<PyTypeObject*>(
        py::object(py::module_::import("torch").attr("_C").attr("ScriptObject")).release().ptr());
    return type;
  }
};

struct CheckedOperator {
  PyObject* general;  // torch's
  std::vector<Parameter> parameters;
};

PyObject* CallChecked(PyObject* capsule, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  const auto& op = *static_cast<CheckedOperator*>(PyCapsule_GetPointer(capsule, nullptr));
  try {
    // Too many, or a name that is none: torch says so.
    for (size_t i = 0; i < op.parameters.size() && i < static_cast<size_t>(nargs); ++i) {
      op.parameters[i].Check(args[i]);
    }
    const Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    for (Py_ssize_t i = 0; i < named; ++i) {
      for (const Parameter& parameter : op.parameters) {
        if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, i), parameter.name.c_str()) ==
            0) {
          parameter.Check(args[nargs + i]);
        }
      }
    }
  } catch (...) {
    SetPythonErrorFromCurrent();
    return nullptr;
  }
  return PyObject_Vectorcall(op.general, args, static_cast<size_t>(nargs), names);
}

PyMethodDef call_checked_def = {"operator", AsCFunction(CallChecked), METH_FASTCALL | METH_KEYWORDS,
                                "An operator of dtorch_ops."};

// For as long as the process lives, as the operator itself.
py::object MakeChecked(py::object general, const std::string& name,
                       const std::vector<std::pair<std::string, std::string>>& parameters) {
  auto* op = new CheckedOperator{general.inc_ref().ptr(), {}};
  for (const auto& [parameter, type] : parameters) {
    op->parameters.push_back({name + ": " + parameter, parameter, type});
  }
  const py::capsule self(op);
  const py::object module = py::getattr(general, "__module__", py::none());
  PyObject* function = PyCFunction_NewEx(&call_checked_def, self.ptr(), module.ptr());
  if (!function) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(function);
}

}  // namespace

void BindOperators(py::module_& m) {
  m.attr("to_torch_async") =
      py::reinterpret_steal<py::object>(PyCFunction_New(&to_torch_async_def, nullptr));
  m.attr("fetch_tensors") =
      py::reinterpret_steal<py::object>(PyCFunction_New(&fetch_tensors_def, nullptr));
  m.def(
      "register_fetches",
      [](py::object one, py::object several, py::object tree) {
        get_tensor_async = one.release().ptr();
        get_tensors_async = several.release().ptr();
        fetch_tree = tree.release().ptr();
      },
      py::kw_only(), py::arg("one"), py::arg("several"), py::arg("tree"));
  m.def("fast_operator", [](py::object general) {
    general_operator = general.release().ptr();
    return py::reinterpret_steal<py::object>(PyCFunction_New(&call_operator_def, nullptr));
  });
  m.def("checked_operator", &MakeChecked);
}

}  // namespace dtorch::python
