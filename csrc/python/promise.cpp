#include "python/promise.h"

#include "dtorch/base/error.h"
#include "dtorch/base/host.h"
#include "dtorch/device/leaving.h"
#include "dtorch/promise/promise_state.h"

#include "python/errors.h"
#include "python/future.h"
#include "python/native_type.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/api/object.h>

#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace dtorch::python {
namespace {

namespace py = pybind11;
using Object = torch::jit::Object;  // what torch._C.ScriptObject holds
py::detail::type_info* object_info = nullptr;

template <typename State>
struct PromiseMethods {
  static State& StateOf(PyObject* self) {
    return *static_cast<State*>(NativeValue<Object>(self)->_ivalue()->getSlot(0).toCapsule().get());
  }

  // A promise has its native object from the start, since torch does not check whether there is
  // one. What __init__ takes is of no interest here: a class derived in Python may take what it
  // likes.
  static PyObject* New(PyTypeObject* type, PyObject*, PyObject*) {
    return Guarded([&] {
      auto self = py::reinterpret_steal<py::object>(py::detail::make_new_instance(type));
      Own(self.ptr(), c10::make_intrusive<State>(PromiseMode::kUnset));
      return self.release().ptr();
    });
  }

  // The same for whoever calls it by name: the __new__ of a derived class.
  static PyObject* NewByName(PyObject*, PyObject* args, PyObject*) {
    return Guarded([&] {
      PyObject* type = PyTuple_GET_SIZE(args) > 0 ? PyTuple_GET_ITEM(args, 0) : nullptr;
      const bool derived = type && PyType_Check(type) &&
                           PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type), base_type);
      TORCH_CHECK_TYPE(derived, "__new__: expected a class of promises");
      return New(reinterpret_cast<PyTypeObject*>(type), nullptr, nullptr);
    });
  }
  static inline PyTypeObject* base_type = nullptr;  // leaked on purpose

  static PromiseMode ParseMode(PyObject* mode) {
    TORCH_CHECK_TYPE(PyUnicode_Check(mode), "mode: expected a string, got ",
                     Py_TYPE(mode)->tp_name);
    const char* utf8 = PyUnicode_AsUTF8(mode);
    if (!utf8) throw py::error_already_set();
    const std::string_view name = utf8;
    if (name == "auto") return PromiseMode::kAuto;
    if (name == "memory") return PromiseMode::kMemory;
    if (name == "file") return PromiseMode::kFile;
    TORCH_CHECK_VALUE(name == "network",
                      "mode: expected 'auto', 'memory', 'file' or 'network', got '", utf8, "'");
    return PromiseMode::kNetwork;
  }

  static PyObject* Init(PyObject* self, PyObject* args, PyObject* kwargs) {
    constexpr bool has_value = std::is_same_v<State, TensorPromiseState>;
    static const char* names[] = {"mode", has_value ? "device" : nullptr, nullptr};
    PyObject *mode = nullptr, *device = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, has_value ? "|O$O:__init__" : "|O:__init__",
                                     const_cast<char**>(names), &mode, &device)) {
      return nullptr;
    }
    return Guarded([&] {
      std::optional<c10::Device> wanted;
      if (device != Py_None) {
        try {
          wanted =
              py::module_::import("torch").attr("device")(py::handle(device)).cast<c10::Device>();
        } catch (py::error_already_set& error) {
          if (!error.matches(PyExc_RuntimeError)) throw;
          TORCH_CHECK_VALUE(false, "device: expected one that torch knows, got ",
                            py::repr(device).cast<std::string>());
        }
      }
      State& state = StateOf(self);
      state.SetMode(mode ? ParseMode(mode) : PromiseMode::kAuto);
      if (wanted) state.SetDevice(*wanted);
      return Py_NewRef(Py_None);
    });
  }

  static void Own(PyObject* self, c10::intrusive_ptr<State> state) {
    c10::IValue promise(std::move(state));
    SetNativeValue(self, object_info, new Object(std::move(promise).toObject()));
  }

  static PyObject* Token(PyObject* self, PyObject*) {
    return Guarded([&] {
      const std::string token = StateOf(self).Token();
      return PyUnicode_FromStringAndSize(token.data(), static_cast<Py_ssize_t>(token.size()));
    });
  }

  // Called by the class, which is the first argument of a class method.
  static PyObject* FromToken(PyObject* type, PyObject* token) {
    return Guarded([&] {
      TORCH_CHECK_TYPE(PyUnicode_Check(token), "token: expected a string, got ",
                       Py_TYPE(token)->tp_name);
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(token, &size);
      if (!text) throw py::error_already_set();  // UnicodeEncodeError, which is a ValueError
      auto state = State::FromToken(std::string(text, static_cast<size_t>(size)));
      auto self = py::reinterpret_steal<py::object>(
          py::detail::make_new_instance(reinterpret_cast<PyTypeObject*>(type)));
      Own(self.ptr(), std::move(state));
      return self.release().ptr();
    });
  }

  static PyObject* SetException(PyObject* self, PyObject* exception) {
    return Guarded([&] {
      TORCH_CHECK_TYPE(PyExceptionInstance_Check(exception),
                       "exception: expected an instance of an exception, got ",
                       Py_TYPE(exception)->tp_name);
      StateOf(self).SetError(MakePythonError(exception));
      return Py_NewRef(Py_None);
    });
  }

  static PyObject* Cancel(PyObject* self, PyObject*) {
    return Guarded([&] { return PyBool_FromLong(StateOf(self).Cancel()); });
  }

  static PyObject* Adopt(PyObject* self, PyObject*) {
    return Guarded([&] {
      StateOf(self).Adopt();
      return Py_NewRef(Py_None);
    });
  }

  static PyObject* IsPending(PyObject* self, PyObject*) {
    return Guarded([&] { return PyBool_FromLong(StateOf(self).is_pending()); });
  }

  static PyObject* Describe(PyObject* self, PyObject*) {
    return Guarded([&] { return py::str(StateOf(self).ToString()).release().ptr(); });
  }
};

using TensorMethods = PromiseMethods<TensorPromiseState>;
using VoidMethods = PromiseMethods<VoidPromiseState>;

PyObject* SetTensor(PyObject* self, PyObject* value) {
  return Guarded([&] {
    TORCH_CHECK_TYPE(THPVariable_Check(value), "value: expected a torch.Tensor, got ",
                     Py_TYPE(value)->tp_name);
    TensorMethods::StateOf(self).Set(THPVariable_Unpack(value));
    return Py_NewRef(Py_None);
  });
}

PyObject* EmptyTensor(PyObject* self, PyObject* args) {
  return Guarded([&] {
    PyObject *size = nullptr, *dtype = nullptr;
    if (!PyArg_ParseTuple(args, "OO:_empty", &size, &dtype)) throw py::error_already_set();
    TORCH_CHECK_TYPE(THPDtype_Check(dtype), "dtype: expected a torch.dtype, got ",
                     Py_TYPE(dtype)->tp_name);
    std::vector<int64_t> extents;
    for (py::handle extent : py::handle(size)) {
      TORCH_CHECK_TYPE(PyIndex_Check(extent.ptr()), "size: expected whole numbers, got ",
                       Py_TYPE(extent.ptr())->tp_name);
      int overflow = 0;
      const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(extent.ptr()));
      if (!index) throw py::error_already_set();
      extents.push_back(PyLong_AsLongLongAndOverflow(index.ptr(), &overflow));
      TORCH_CHECK_VALUE(overflow == 0,
                        "size: expected numbers of a tensor that fits into memory, got ",
                        py::str(index).cast<std::string>());
      TORCH_CHECK_VALUE(extents.back() >= 0, "size: expected numbers >= 0, got ", extents.back());
    }
    return THPVariable_Wrap(TensorMethods::StateOf(self).Empty(
        extents, reinterpret_cast<THPDtype*>(dtype)->scalar_type));
  });
}

PyObject* SetNothing(PyObject* self, PyObject*) {
  return Guarded([&] {
    VoidMethods::StateOf(self).Set();
    return Py_NewRef(Py_None);
  });
}

PyObject* GetTensorFuture(PyObject* self, PyObject*) {
  return Guarded([&] {
    return NewHandle(HandleKind::kTensorFuture, TensorMethods::StateOf(self).future())
        .release()
        .ptr();
  });
}

PyObject* GetVoidFuture(PyObject* self, PyObject*) {
  return Guarded([&] {
    return NewHandle(HandleKind::kVoidFuture, VoidMethods::StateOf(self).future()).release().ptr();
  });
}

template <typename F>
constexpr PyCFunction AsCFunction(F function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

constexpr char kInitDoc[] =
    "__init__($self, /, mode='auto')\n--\n\n"
    "``mode``: 'auto', 'memory', 'file' or 'network'. ValueError for an unknown one.\n";
constexpr char kTensorInitDoc[] =
    "__init__($self, /, mode='auto', *, device=None)\n--\n\n"
    "``mode``: 'auto', 'memory', 'file' or 'network'. ``device``: where the value is to be. "
    "ValueError for "
    "an\n"
    "unknown mode, or what names no device.\n";
constexpr char kSetExceptionDoc[] =
    "set_exception($self, exception, /)\n--\n\n"
    "Fail the future with ``exception``, an instance. Every read of the future raises a fresh\n"
    "exception of the same type, with its args and the text of its traceback.\n\n"
    "Raises PromiseAlreadySatisfiedError if the promise was set, cancelled or broken before,\n"
    "BrokenPromiseError if the process that made it is gone. As ``set_value``, it waits for the\n"
    "answer of another machine's.\n";
constexpr char kGetFutureDoc[] =
    "get_future($self, /)\n--\n\n"
    "The future of this promise. Each call gives a handle of its own.\n\n"
    "Raises DTorchError where the promise was unpickled: its future stays with its maker.\n";
constexpr char kCancelDoc[] =
    "cancel($self, /)\n--\n\n"
    "Fail the future with concurrent.futures.CancelledError; a later set_value is told so.\n\n"
    "Returns False if the promise was set, cancelled or broken before, or its value is on its "
    "way.\n"
    "Raises DTorchError where the promise was unpickled: only its maker cancels it.\n";
constexpr char kTokenDoc[] =
    "token($self, /)\n--\n\n"
    "Text of at most 300 characters that stands for this promise in another process:\n"
    "``from_token`` makes a promise of it there, on this machine or, where\n"
    "``torch.distributed.rpc`` is initialised, on another one. What pickling sends; for a command\n"
    "line, say.\n\n"
    "Raises DTorchError for mode 'memory', and for mode 'network' without RPC;\n"
    "PromiseAlreadySatisfiedError if it is fulfilled.\n";
constexpr char kFromTokenDoc[] =
    "from_token($type, token, /)\n--\n\n"
    "The promise that ``token()`` of another process stands for. This process is a producer of it\n"
    "then: if it ends, or drops the promise, unset, and no other one has it, the future fails "
    "with\n"
    "BrokenPromiseError.\n\n"
    "Raises ValueError if ``token`` is none, DTorchError, which says why, if that process cannot "
    "be\n"
    "reached.\n";
constexpr char kAdoptDoc[] =
    "_adopt($self, /)\n--\n\nIn a forked child that was given the promise: be a producer of it.\n";
constexpr char kIsPendingDoc[] =
    "is_pending($self, /)\n--\n\n"
    "Whether it can be set now. False once it was set, cancelled or broken, and while the value "
    "of\n"
    "another producer is on its way; True again if that one dies before it has come.\n\n"
    "A promise of another machine's asks there, and blocks for it: BrokenPromiseError if that is\n"
    "not to be reached.\n";

PyMethodDef tensor_methods[] = {
    {"__new__", AsCFunction(TensorMethods::NewByName), METH_VARARGS | METH_KEYWORDS | METH_STATIC,
     "A new promise."},
    {"__init__", AsCFunction(TensorMethods::Init), METH_VARARGS | METH_KEYWORDS, kTensorInitDoc},
    {"set_value", SetTensor, METH_O,
     "set_value($self, value, /)\n--\n\n"
     "Complete the future with the tensor ``value``; its callbacks run in this thread.\n\n"
     "In one process the tensor itself arrives, differentiable.\n\n"
     "For a promise of another machine's it blocks until that has answered.\n\n"
     "Raises PromiseAlreadySatisfiedError if the promise was set, cancelled or broken before,\n"
     "BrokenPromiseError if the process that made it is gone, TypeError for anything but a "
     "tensor,\n"
     "which leaves the promise pending. A tensor that cannot be sent to another process, one\n"
     "without plain elements or one for which there is no room, raises an error that says what to\n"
     "do, and the future fails with the same.\n"},
    {"_empty", EmptyTensor, METH_VARARGS, "empty(size, dtype)"},
    {"_adopt", TensorMethods::Adopt, METH_NOARGS, kAdoptDoc},
    {"set_exception", TensorMethods::SetException, METH_O, kSetExceptionDoc},
    {"get_future", GetTensorFuture, METH_NOARGS, kGetFutureDoc},
    {"token", TensorMethods::Token, METH_NOARGS, kTokenDoc},
    {"from_token", TensorMethods::FromToken, METH_O | METH_CLASS, kFromTokenDoc},
    {"cancel", TensorMethods::Cancel, METH_NOARGS, kCancelDoc},
    {"is_pending", TensorMethods::IsPending, METH_NOARGS, kIsPendingDoc},
    {"_describe", TensorMethods::Describe, METH_NOARGS, "_describe($self, /)"},
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef void_methods[] = {
    {"__new__", AsCFunction(VoidMethods::NewByName), METH_VARARGS | METH_KEYWORDS | METH_STATIC,
     "A new promise."},
    {"__init__", AsCFunction(VoidMethods::Init), METH_VARARGS | METH_KEYWORDS, kInitDoc},
    {"set_value", SetNothing, METH_NOARGS,
     "set_value($self, /)\n--\n\n"
     "Complete the future; its callbacks run in this thread. For a promise of another machine's "
     "it\n"
     "blocks until that has answered.\n\n"
     "Raises PromiseAlreadySatisfiedError if the promise was set, cancelled or broken before,\n"
     "BrokenPromiseError if the process that made it is gone.\n"},
    {"_adopt", VoidMethods::Adopt, METH_NOARGS, kAdoptDoc},
    {"set_exception", VoidMethods::SetException, METH_O, kSetExceptionDoc},
    {"get_future", GetVoidFuture, METH_NOARGS, kGetFutureDoc},
    {"token", VoidMethods::Token, METH_NOARGS, kTokenDoc},
    {"from_token", VoidMethods::FromToken, METH_O | METH_CLASS, kFromTokenDoc},
    {"cancel", VoidMethods::Cancel, METH_NOARGS, kCancelDoc},
    {"is_pending", VoidMethods::IsPending, METH_NOARGS, kIsPendingDoc},
    {"_describe", VoidMethods::Describe, METH_NOARGS, "_describe($self, /)"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void BindPromise(py::module_& m) {
  const py::object base = py::module_::import("torch").attr("_C").attr("ScriptObject");
  object_info = py::detail::get_type_info(reinterpret_cast<PyTypeObject*>(base.ptr()));
  const auto define = [&](auto methods, const char* name, PyMethodDef* table, const char* doc) {
    using Methods = decltype(methods);
    const py::object type = MakeNativeType(name, base, table, doc, Methods::New);
    m.attr(name) = type;
    Methods::base_type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
  };
  m.def(
      "flush_promises",
      [](int64_t timeout_ms) {
        HostUnlocked unlocked;
        return FlushPromises(Deadline::AfterMs(timeout_ms));
      },
      py::arg("timeout_ms"));
  define(TensorMethods(), "TensorPromiseBase", tensor_methods, "The producing end of a tensor.");
  define(VoidMethods(), "VoidPromiseBase", void_methods, "The producing end without a value.");
}

}  // namespace dtorch::python
