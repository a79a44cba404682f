#include "python/future.h"

#include "dtorch/base/error.h"
#include "dtorch/future/outcome.h"
#include "dtorch/future/wait.h"
#include "dtorch/ops/tracing.h"

#include "python/awaiting.h"
#include "python/callbacks.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/native_type.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <unistd.h>
#include <utility>

namespace dtorch::python {
namespace {

namespace py = pybind11;
using Wrapper = torch::jit::PythonFutureWrapper;  // what torch._C.Future holds

// The unwrap function of a handle of ours: what tells one from a wrapper that torch has made. (Its
// class is no proof: torch._C.Future.__init__ may be called on an instance of any class.)
struct NoUnwrap {
  void operator()(const py::object&) const {}
};
struct Unwrap {
  Wrapper::UnwrapFunc unwrap;
  void operator()(const py::object& value) const { unwrap(value); }
};

Wrapper::UnwrapFunc Marked(std::optional<Wrapper::UnwrapFunc> unwrap) {
  if (!unwrap) return NoUnwrap();
  if (unwrap->target<NoUnwrap>() || unwrap->target<Unwrap>()) return *std::move(unwrap);
  return Unwrap{*std::move(unwrap)};
}

// What a handle of ours holds: torch's wrapper, and whether get() has taken the result.
struct Handle final : Wrapper {
  explicit Handle(FuturePtr future, std::optional<Wrapper::UnwrapFunc> unwrap = std::nullopt,
                  PyObject* shape = nullptr)
      : Wrapper(std::move(future), Marked(std::move(unwrap))), shape(shape) {}
  ~Handle() { ReleaseFuture(std::move(fut)); }

  // nullptr if torch has made `wrapper`.
  static Handle* From(Wrapper& wrapper) {
    const auto& mark = wrapper.unwrap_func;
    if (!mark || !(mark->target<NoUnwrap>() || mark->target<Unwrap>())) return nullptr;
    return static_cast<Handle*>(&wrapper);
  }

  std::atomic<bool> consumed{false};
  // A collected future gives back the very objects that were collected: a list of them. That of a
  // tree makes the tree of its values: a callable. None for the others.
  const SharedRef shape;
};

// What Python registers, and torch's class. Leaked on purpose.
PyTypeObject* wrapper_type = nullptr;
py::detail::type_info* wrapper_info = nullptr;
PyTypeObject* handle_types[4] = {};  // by HandleKind
PyObject* before_blocking = nullptr;
PyObject* pending_watcher = nullptr;  // None, but for report_pending()

// Tells who asked for it that a handle was made on a pending future; whatever that raises.
void TellWatcher(PyObject* self, const FuturePtr& future) {
  if (!pending_watcher || future->completed()) return;
  const auto address = py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(future.get()));
  const auto watcher = py::reinterpret_borrow<py::object>(pending_watcher);
  const auto done = py::reinterpret_steal<py::object>(
      PyObject_CallFunctionObjArgs(watcher.ptr(), self, address.ptr(), nullptr));
  if (!done) PyErr_WriteUnraisable(watcher.ptr());
}

py::object WrapHandle(PyTypeObject* type, const std::shared_ptr<Handle>& handle) {
  auto self = py::reinterpret_steal<py::object>(py::detail::make_new_instance(type));
  const std::shared_ptr<Wrapper> holder = handle;
  SetNativeValue<Wrapper>(self.ptr(), wrapper_info, holder.get(), &holder);
  TellWatcher(self.ptr(), handle->fut);
  return self;
}

Handle& HandleOf(PyObject* self) {
  auto* wrapper = NativeValue<Wrapper>(self);
  if (!wrapper) throw DTorchError("expected a future, got one whose __init__ has not been called");
  Handle* handle = Handle::From(*wrapper);
  if (!handle) {
    throw DTorchError(
        "expected a future as dtorch_ops makes them, got one that torch._C.Future.__init__ was "
        "called on");
  }
  return *handle;
}

Wrapper& WrapperOf(py::handle object, const char* what) {
  Wrapper* wrapper = nullptr;
  if (PyObject_TypeCheck(object.ptr(), wrapper_type)) wrapper = NativeValue<Wrapper>(object.ptr());
  if (wrapper) return *wrapper;
  // Of the type, since torch's own objects may hold nothing.
  const bool is_of_another_engine = !PyObject_TypeCheck(object.ptr(), wrapper_type) &&
                                    py::hasattr(py::type::handle_of(object), "add_done_callback");
  TORCH_CHECK_TYPE(false, what, ": expected a torch future, got ", Py_TYPE(object.ptr())->tp_name,
                   is_of_another_engine ? ": dtorch_ops.from_future(it) is one" : "");
}

c10::IValue ValueOfTree(const FuturePtr& future, PyObject* tree) {
  try {
    return ValueOf(future);
  } catch (const std::exception&) {
    SetPythonErrorFromCurrent();
    py::error_already_set error;
    py::handle(tree).attr("add_note")(error.value());
    throw error;
  }
}

// The outcome of a complete future, in every way of reading it. Needs the lock.
py::object Read(Wrapper& wrapper) {
  const Handle* handle = Handle::From(wrapper);
  PyObject* const shape = handle ? handle->shape.get() : nullptr;
  const bool is_tree = shape && !PyList_Check(shape);
  c10::IValue value = is_tree ? ValueOfTree(wrapper.fut, shape) : ValueOf(wrapper.fut);
  TraceWait(wrapper.fut, value);
  if (shape && !is_tree) {
    return py::reinterpret_steal<py::object>(PyList_GetSlice(shape, 0, PyList_GET_SIZE(shape)));
  }
  py::object object = value.isTensor()
                          ? py::reinterpret_steal<py::object>(THPVariable_Wrap(value.toTensor()))
                          : torch::jit::toPyObject(std::move(value));
  if (!object) throw py::error_already_set();
  if (is_tree) {
    object = py::reinterpret_steal<py::object>(PyObject_CallOneArg(shape, object.ptr()));
    if (!object) throw py::error_already_set();
  }
  if (wrapper.unwrap_func) (*wrapper.unwrap_func)(object);
  return object;
}

[[noreturn]] void ThrowAlreadyRetrieved() { throw FutureAlreadyRetrievedError(kAlreadyRetrieved); }

// ---- Methods ------------------------------------------------------------------------------------

PyObject* Init(PyObject* self, PyObject* source) {
  return Guarded([&] {
    Wrapper& wrapper = WrapperOf(source, "future");
    if (NativeValue<Wrapper>(self))
      throw DTorchError("__init__ has been called on this future before");
    const Handle* handle = Handle::From(wrapper);
    const std::shared_ptr<Wrapper> holder = std::make_shared<Handle>(
        wrapper.fut, wrapper.unwrap_func, handle ? handle->shape.get() : nullptr);
    SetNativeValue<Wrapper>(self, wrapper_info, holder.get(), &holder);
    TellWatcher(self, holder->fut);
    return Py_NewRef(Py_None);
  });
}

PyObject* Get(PyObject* self, PyObject*) {
  return Guarded([&] {
    Handle& handle = HandleOf(self);
    if (handle.consumed) ThrowAlreadyRetrieved();
    if (!handle.fut->completed()) {
      if (!py::reinterpret_steal<py::object>(PyObject_CallNoArgs(before_blocking))) {
        throw py::error_already_set();
      }
      WaitUntil(handle.fut, Deadline::Never());
    }
    if (handle.consumed.exchange(true)) ThrowAlreadyRetrieved();
    return Read(handle).release().ptr();
  });
}

PyObject* Wait(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"timeout_ms", nullptr};
  PyObject* timeout_ms = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:wait", const_cast<char**>(names),
                                   &timeout_ms)) {
    return nullptr;
  }
  return Guarded([&] {
    const Deadline deadline = DeadlineFromObject(timeout_ms);
    Handle& handle = HandleOf(self);
    if (!WaitUntil(handle.fut, deadline)) throw TimeoutError(TimeoutMessage(1, 1));
    return Read(handle).release().ptr();
  });
}

PyObject* Value(PyObject* self, PyObject*) {
  return Guarded([&] {
    Handle& handle = HandleOf(self);
    if (!IsComplete(handle.fut)) {
      throw DTorchError("expected a complete future, got a pending one: wait() or await it first");
    }
    return Read(handle).release().ptr();
  });
}

PyObject* IsReady(PyObject* self, PyObject*) {
  return Guarded([&] { return PyBool_FromLong(IsComplete(HandleOf(self).fut)); });
}

PyObject* Valid(PyObject* self, PyObject*) {
  return Guarded([&] { return PyBool_FromLong(!HandleOf(self).consumed); });
}

PyObject* State(PyObject* self, PyObject*) {
  return Guarded([&] {
    Handle& handle = HandleOf(self);
    const char* state = !handle.fut->completed() ? "pending"
                        : ErrorOf(handle.fut)    ? "failed"
                                                 : "ready";
    return PyUnicode_FromString(state);
  });
}

PyMethodDef handle_methods[] = {
    {"__init__", Init, METH_O, "Make a handle of its own on an existing torch future."},
    {"get", Get, METH_NOARGS,
     "get($self, /)\n--\n\n"
     "Block until the future is complete, take its result, and return it.\n\n"
     "Consumes this handle: ``valid()`` is False afterwards. Ctrl-C ends the wait and consumes\n"
     "nothing. In a coroutine use ``await``: this blocks the event loop, and warns once.\n\n"
     "Raises:\n"
     "    FutureAlreadyRetrievedError: the second time.\n"
     "    Exception: the error that was set on the future, which consumes as well.\n\n"
     "Example:\n"
     "    >>> dtorch_ops.to_torch_async(torch.ones(2)).get()\n"
     "    tensor([1., 1.])\n"},
    {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Wait)),
     METH_VARARGS | METH_KEYWORDS,
     "wait($self, /, timeout_ms=None)\n--\n\n"
     "Block until the future is complete, at most ``timeout_ms`` milliseconds on the monotonic\n"
     "clock, and return its result without consuming it.\n\n"
     "``None`` waits without a limit, 0 only looks.\n\n"
     "Raises:\n"
     "    TimeoutError: pending when the time is over; the future can be waited for again.\n"
     "    ValueError: a negative time.\n"
     "    Exception: the error that was set on the future.\n\n"
     "Example:\n"
     "    >>> dtorch_ops.to_torch_async(torch.ones(2)).wait(1000)\n"
     "    tensor([1., 1.])\n"},
    {"value", Value, METH_NOARGS,
     "value($self, /)\n--\n\n"
     "The result of a complete future, without consuming it. Never blocks: raises DTorchError\n"
     "while the future is pending.\n"},
    {"is_ready", IsReady, METH_NOARGS,
     "is_ready($self, /)\n--\n\n"
     "Whether the future is complete, with a value or with an error. Never blocks.\n"},
    {"valid", Valid, METH_NOARGS,
     "valid($self, /)\n--\n\n"
     "True until ``get()`` has consumed the result of this handle.\n"},
    {"then", Then, METH_O,
     "then($self, callback, /)\n--\n\n"
     "A future of ``callback(self)``, which runs when this one is complete, in the thread that\n"
     "completes it, or at once if it is complete. An error keeps its type through the chain. An\n"
     "exception object that the callback returns counts as raised: torch's own futures keep their\n"
     "errors as such values.\n\n"
     "Example:\n"
     "    >>> f = dtorch_ops.to_torch_async(torch.ones(2))\n"
     "    >>> f.then(lambda f: f.value().sum().item()).get()\n"
     "    2.0\n"},
    {"add_done_callback", AddDoneCallback, METH_O,
     "add_done_callback($self, callback, /)\n--\n\n"
     "Call ``callback(self)`` when the future is complete, in the thread that completes it, in\n"
     "the order added; at once if it is complete. What it raises goes to sys.unraisablehook.\n"},
    {"__await__", AwaitFuture, METH_NOARGS, "The outcome of the future, once it is complete."},
    {"_state", State, METH_NOARGS, "pending, ready or failed."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyTypeObject* HandleType(HandleKind kind) { return handle_types[static_cast<int>(kind)]; }

py::object NewHandle(PyTypeObject* type, FuturePtr future) {
  return WrapHandle(type, std::make_shared<Handle>(std::move(future)));
}

py::object NewGroupHandle(FuturePtr future, const py::list& members) {
  return WrapHandle(HandleType(HandleKind::kFuture),
                    std::make_shared<Handle>(std::move(future), std::nullopt, members.ptr()));
}

py::object NewTreeHandle(FuturePtr future, PyObject* tree) {
  return WrapHandle(HandleType(HandleKind::kTreeFuture),
                    std::make_shared<Handle>(std::move(future), std::nullopt, tree));
}

py::object NewBareFuture(FuturePtr future) {
  return py::cast(std::make_shared<Wrapper>(std::move(future)));
}

std::function<py::object(FuturePtr)> Reissuer(PyObject* handle) {
  struct Recipe {
    explicit Recipe(PyObject* handle)
        : type(reinterpret_cast<PyObject*>(Py_TYPE(handle))),
          unwrap_func(HandleOf(handle).unwrap_func),
          shape(HandleOf(handle).shape.get()) {}
    const SharedRef type;
    const std::optional<Wrapper::UnwrapFunc> unwrap_func;
    const SharedRef shape;
  };
  auto recipe = std::make_shared<Recipe>(handle);
  return [recipe = std::move(recipe)](FuturePtr future) {
    return WrapHandle(
        reinterpret_cast<PyTypeObject*>(recipe->type.get()),
        std::make_shared<Handle>(std::move(future), recipe->unwrap_func, recipe->shape.get()));
  };
}

void DropInThisThread(c10::IValue dropped) {
  static thread_local const bool is_main = getpid() == gettid();
  if (is_main) return;
  const MayDrop may_drop;
  std::optional<GilAcquire> gil;
  if (may_drop) gil.emplace();
  if (!gil || !*gil) {  // the interpreter is gone, or going: what is left of it is left alone
    new c10::IValue(std::move(dropped));
    return;
  }
  std::vector<PyObject*> objects;
  const auto keep = [&](const at::Tensor& tensor) {
    if (tensor.defined()) objects.push_back(THPVariable_Wrap(tensor));
  };
  FuturePtr future = dropped.isFuture() ? dropped.toFuture() : nullptr;
  if (!future || !future->hasError()) {
    const c10::IValue& value = future ? future->constValue() : dropped;
    if (value.isPyObject()) objects.push_back(Py_NewRef(value.toPyObject()));
    if (value.isTensor()) keep(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) keep(tensor);
    }
  }
  future.reset();
  dropped = c10::IValue();
  Parked([&] {
    for (PyObject* object : objects) Py_XDECREF(object);
  });
}

bool IsTorchFuture(PyObject* object) { return PyObject_TypeCheck(object, wrapper_type); }

bool IsReadSpecially(py::handle object) {
  Wrapper& wrapper = WrapperOf(object, "future");
  if (const Handle* handle = Handle::From(wrapper)) {
    return handle->shape.get() || !handle->unwrap_func->target<NoUnwrap>();
  }
  return wrapper.unwrap_func.has_value();
}

FuturePtr FutureFromObject(py::handle object, const char* what) {
  return WrapperOf(object, what).fut;
}

std::vector<FuturePtr> FuturesFromSequence(py::handle sequence, const char* what) {
  std::vector<FuturePtr> futures;
  for (py::handle item : sequence) futures.push_back(FutureFromObject(item, what));
  return futures;
}

py::object ReadComplete(py::handle object) { return Read(WrapperOf(object, "future")); }

c10::IValue ValueFromObject(const py::object& object) {
  return torch::jit::toIValue(object, c10::PyObjectType::get());
}

Deadline DeadlineFromObject(PyObject* timeout_ms) {
  if (timeout_ms == Py_None) return Deadline::Never();
  const bool number =
      !PyBool_Check(timeout_ms) && (PyFloat_Check(timeout_ms) || PyIndex_Check(timeout_ms));
  TORCH_CHECK_TYPE(number, "timeout_ms: expected a number of milliseconds or None, got ",
                   Py_TYPE(timeout_ms)->tp_name);
  if (!PyFloat_Check(timeout_ms)) {
    auto integer = py::reinterpret_steal<py::object>(PyNumber_Index(timeout_ms));
    if (!integer) throw py::error_already_set();
    int overflow = 0;
    const int64_t ms = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
    if (overflow > 0) return Deadline::Never();
    return DeadlineFromMs(overflow < 0 ? std::numeric_limits<int64_t>::min() : ms);
  }
  const double ms = PyFloat_AS_DOUBLE(timeout_ms);
  TORCH_CHECK_VALUE(!std::isnan(ms), "timeout_ms: expected a number of milliseconds, got nan");
  TORCH_CHECK_VALUE(ms >= 0, "timeout_ms: expected a number of milliseconds >= 0, got ", ms,
                    "; 0 only looks, None waits without a limit");
  // Rounded up, so that a wait is never shorter than asked for.
  return ms >= 9e18 ? Deadline::Never() : Deadline::AfterMs(static_cast<int64_t>(std::ceil(ms)));
}

void BindFuture(py::module_& m) {
  const py::object base = py::module_::import("torch").attr("_C").attr("Future");
  wrapper_type = reinterpret_cast<PyTypeObject*>(py::object(base).release().ptr());
  wrapper_info = py::detail::get_type_info(wrapper_type);
  const py::object handle_base =
      MakeNativeType("FutureBase", base, handle_methods, "What the future classes share.");
  handle_base.attr("__class_getitem__") =
      py::module_::import("builtins")
          .attr("classmethod")(py::module_::import("types").attr("GenericAlias"));
  m.attr("FutureBase") = handle_base;

  SetDropFunction(DropInThisThread);
  m.def("set_pending_watcher", [](const py::object& watcher) {
    PyObject* before =
        std::exchange(pending_watcher, watcher.is_none() ? nullptr : watcher.inc_ref().ptr());
    Py_XDECREF(before);
  });
  m.def(
      "register_futures",
      [](py::type future, py::type tensor_future, py::type void_future, py::type tree_future,
         py::function hook) {
        const py::handle types[] = {future, tensor_future, void_future, tree_future};
        for (int i = 0; i < 4; ++i) {
          handle_types[i] = reinterpret_cast<PyTypeObject*>(types[i].inc_ref().ptr());
        }
        before_blocking = hook.release().ptr();
      },
      py::kw_only(), py::arg("future"), py::arg("tensor_future"), py::arg("void_future"),
      py::arg("tree_future"), py::arg("before_blocking"));
}

}  // namespace dtorch::python
