#include "python/future.h"

#include "dtorch/base/error.h"
#include "dtorch/base/host.h"
#include "dtorch/future/collect.h"
#include "dtorch/future/complete.h"
#include "dtorch/future/completion_queue.h"
#include "dtorch/future/outcome.h"
#include "dtorch/future/wait.h"
#include "dtorch/ops/tracing.h"

#include "python/awaiting.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/native_type.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>

namespace dtorch::python {
namespace {

namespace py = pybind11;
using Wrapper = torch::jit::PythonFutureWrapper;  // what torch._C.Future holds

// What a handle of ours holds: torch's wrapper, and whether get() has taken the result.
struct Handle final : Wrapper {
  explicit Handle(FuturePtr future, std::optional<Wrapper::UnwrapFunc> unwrap = std::nullopt,
                  PyObject* members = nullptr)
      : Wrapper(std::move(future), std::move(unwrap)), members(members) {}

  std::atomic<bool> consumed{false};
  // A collected future gives back the very objects that were collected: a list of them, or none.
  const SharedRef members;
};

// What Python registers, and torch's class. Leaked on purpose.
PyTypeObject* wrapper_type = nullptr;
py::detail::type_info* wrapper_info = nullptr;
PyTypeObject* handle_types[3] = {};  // by HandleKind
PyObject* before_blocking = nullptr;
PyObject* get_tensor_async = nullptr;  // the OpOverload

py::object WrapHandle(PyTypeObject* type, const std::shared_ptr<Handle>& handle) {
  auto self = py::reinterpret_steal<py::object>(py::detail::make_new_instance(type));
  const std::shared_ptr<Wrapper> holder = handle;
  SetNativeValue<Wrapper>(self.ptr(), wrapper_info, holder.get(), &holder);
  return self;
}

bool IsHandle(PyObject* object) { return PyObject_TypeCheck(object, handle_types[0]); }

Handle& HandleOf(PyObject* self) {
  auto* wrapper = NativeValue<Wrapper>(self);
  if (!wrapper) throw DTorchError("expected a future, got one whose __init__ has not been called");
  return *static_cast<Handle*>(wrapper);
}

Wrapper& WrapperOf(py::handle object, const char* what) {
  Wrapper* wrapper = nullptr;
  if (PyObject_TypeCheck(object.ptr(), wrapper_type)) wrapper = NativeValue<Wrapper>(object.ptr());
  TORCH_CHECK_TYPE(wrapper, what, ": expected a torch future, got ",
                   Py_TYPE(object.ptr())->tp_name);
  return *wrapper;
}

// The outcome of a complete future, in every way of reading it. Needs the lock.
py::object Read(Wrapper& wrapper, PyObject* members) {
  c10::IValue value = ValueOf(wrapper.fut);
  TraceWait(wrapper.fut, value);
  if (members) {
    return py::reinterpret_steal<py::object>(PyList_GetSlice(members, 0, PyList_GET_SIZE(members)));
  }
  py::object object = value.isTensor()
                          ? py::reinterpret_steal<py::object>(THPVariable_Wrap(value.toTensor()))
                          : torch::jit::toPyObject(std::move(value));
  if (!object) throw py::error_already_set();
  if (wrapper.unwrap_func) (*wrapper.unwrap_func)(object);
  return object;
}

py::object Read(Handle& handle) { return Read(handle, handle.members.get()); }

[[noreturn]] void ThrowAlreadyRetrieved() { throw FutureAlreadyRetrievedError(kAlreadyRetrieved); }

// ---- Callbacks ----------------------------------------------------------------------------------

// A Python callable that waits, inside a native future, for its completion.
class Callback {
 public:
  Callback(PyObject* self, const Handle& handle, PyObject* function)
      : function_(function),
        self_(py::weakref(py::handle(self)).ptr()),
        type_(reinterpret_cast<PyObject*>(Py_TYPE(self))),
        unwrap_func_(handle.unwrap_func),
        members_(handle.members.get()) {}

  // Calls it with the handle it was added to, or with another one on the same future if that is
  // gone. (Holding the handle would keep a future alive that nobody completes.)
  py::object operator()(c10::ivalue::Future& future) const {
    auto self = py::reinterpret_borrow<py::object>(PyWeakref_GetObject(self_.get()));
    if (self.is_none()) {
      self = WrapHandle(
          reinterpret_cast<PyTypeObject*>(type_.get()),
          std::make_shared<Handle>(FuturePtr::reclaim_copy(&future), unwrap_func_, members_.get()));
    }
    return py::reinterpret_steal<py::object>(CallOneArg(function_.get(), self.ptr()));
  }

  PyObject* function() const { return function_.get(); }

 private:
  const SharedRef function_;
  const SharedRef self_;
  const SharedRef type_;
  const std::optional<Wrapper::UnwrapFunc> unwrap_func_;
  const SharedRef members_;
};

std::shared_ptr<Callback> MakeCallback(PyObject* self, PyObject* function) {
  TORCH_CHECK_TYPE(PyCallable_Check(function), "callback: expected a callable, got ",
                   Py_TYPE(function)->tp_name);
  return std::make_shared<Callback>(self, HandleOf(self), function);
}

// The child of a future, in the callback that the parent keeps. Parents that go unfulfilled take
// their children with them: one after the other, or a long chain would exhaust the stack.
class FlatRef {
 public:
  explicit FlatRef(FuturePtr future) : future_(std::move(future)) {}
  FlatRef(const FlatRef&) = default;
  FlatRef(FlatRef&&) = default;
  ~FlatRef() {
    static thread_local std::vector<FuturePtr>* dropping = nullptr;
    if (!future_) return;
    // Its value is a Python object, for which torch takes the lock in a destructor: at exit that
    // would end the process, and this parks the thread before. Whoever else holds the future may
    // drop it at any moment, so it does not matter how many there are now.
    std::optional<GilAcquire> gil;
    if (future_->completed()) {
      gil.emplace();
      if (!*gil) {  // the interpreter is gone, or going: what is left of it is left alone
        (void)future_.release();
        return;
      }
    }
    if (dropping) {
      dropping->push_back(std::move(future_));
      return;
    }
    std::vector<FuturePtr> dropped;
    dropping = &dropped;
    future_.reset();
    while (!dropped.empty()) {
      const FuturePtr next = std::move(dropped.back());
      dropped.pop_back();
    }
    dropping = nullptr;
  }
  const FuturePtr& get() const { return future_; }

 private:
  FuturePtr future_;
};

std::exception_ptr TakePythonError() {
  py::error_already_set error;
  if (error.trace()) PyException_SetTraceback(error.value().ptr(), error.trace().ptr());
  return MakePythonError(error.value());
}

// ---- Methods ------------------------------------------------------------------------------------

PyObject* Init(PyObject* self, PyObject* source) {
  return Guarded([&] {
    Wrapper& wrapper = WrapperOf(source, "future");
    if (NativeValue<Wrapper>(self))
      throw DTorchError("__init__ has been called on this future before");
    PyObject* members = IsHandle(source) ? static_cast<Handle&>(wrapper).members.get() : nullptr;
    const std::shared_ptr<Wrapper> holder =
        std::make_shared<Handle>(wrapper.fut, wrapper.unwrap_func, members);
    SetNativeValue<Wrapper>(self, wrapper_info, holder.get(), &holder);
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
    if (!handle.fut->completed()) {
      throw DTorchError("expected a complete future, got a pending one: wait() or await it first");
    }
    return Read(handle).release().ptr();
  });
}

PyObject* IsReady(PyObject* self, PyObject*) {
  return Guarded([&] { return PyBool_FromLong(HandleOf(self).fut->completed()); });
}

PyObject* Valid(PyObject* self, PyObject*) {
  return Guarded([&] { return PyBool_FromLong(!HandleOf(self).consumed); });
}

PyObject* Then(PyObject* self, PyObject* function) {
  return Guarded([&] {
    auto callback = MakeCallback(self, function);
    const FuturePtr parent = HandleOf(self).fut;
    const FuturePtr child = parent->createInstance(c10::PyObjectType::get());
    EnsureWaiterList(parent);
    if (!parent->completed()) PrepareForWaiters(child);
    const auto run = [child = FlatRef(child),
                      callback = std::move(callback)](c10::ivalue::Future& future) {
      c10::IValue value;
      std::exception_ptr error;
      {
        GilAcquire gil;
        if (!gil) return;
        try {
          py::object result = (*callback)(future);
          if (result) {
            value = torch::jit::toIValue(result, c10::PyObjectType::get());
          } else {
            error = TakePythonError();
          }
        } catch (abi::__forced_unwind&) {
          ParkForEver();
        } catch (const py::error_already_set& raised) {
          error = MakePythonError(raised.value());
        } catch (...) {
          error = std::current_exception();
        }
      }
      if (error) {
        CompleteWithError(child.get(), std::move(error), Nesting::kDeferIfDeep);
      } else {
        CompleteWithValue(child.get(), std::move(value), Nesting::kDeferIfDeep);
      }
    };
    {
      HostUnlocked unlocked;  // runs at once if the parent is complete
      parent->addCallback(run);
    }
    return NewHandle(HandleKind::kFuture, child).release().ptr();
  });
}

PyObject* AddDoneCallback(PyObject* self, PyObject* function) {
  return Guarded([&] {
    auto callback = MakeCallback(self, function);
    const FuturePtr parent = HandleOf(self).fut;
    EnsureWaiterList(parent);
    const auto run = [callback = std::move(callback)](c10::ivalue::Future& future) {
      GilAcquire gil;
      if (!gil) return;
      try {
        if ((*callback)(future)) return;
      } catch (abi::__forced_unwind&) {
        ParkForEver();
      } catch (...) {
        SetPythonErrorFromCurrent();
      }
      PyErr_WriteUnraisable(callback->function());
    };
    {
      HostUnlocked unlocked;  // runs at once if the future is complete
      parent->addCallback(run);
    }
    return Py_NewRef(Py_None);
  });
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
     "    The error that was set on the future, which consumes as well.\n\n"
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
     "    The error that was set on the future.\n\n"
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

// ---- to_torch_async -----------------------------------------------------------------------------

// What a __torch_function__ of the tensor's class, or of a mode, makes of the call.
py::object CallOverridden(PyObject* input, PyObject* device, PyObject* copy) {
  py::dict kwargs;
  kwargs["device"] = py::handle(device);
  kwargs["copy"] = py::handle(copy);
  auto result = py::reinterpret_steal<py::object>(
      PyObject_Call(get_tensor_async, py::make_tuple(py::handle(input)).ptr(), kwargs.ptr()));
  if (!result) throw py::error_already_set();
  if (!PyObject_TypeCheck(result.ptr(), wrapper_type)) return result;
  return NewHandle(HandleKind::kTensorFuture, NativeValue<Wrapper>(result.ptr())->fut);
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

FuturePtr Dispatch(PyObject* input, c10::IValue device, bool copy) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("dtorch::get_tensor_async", "");
  torch::jit::Stack stack;
  stack.reserve(3);
  stack.emplace_back(THPVariable_Unpack(input));
  stack.push_back(std::move(device));
  stack.emplace_back(copy);
  {
    HostUnlocked unlocked;  // a copy takes time
    op.callBoxed(&stack);
  }
  return std::move(stack.back()).toFuture();
}

PyObject* ToTorchAsync(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  return Guarded([&] {
    TORCH_CHECK_TYPE(nargs == 3, "to_torch_async: expected input, device and copy");
    PyObject *input = args[0], *device = args[1], *copy = args[2];
    TORCH_CHECK_TYPE(THPVariable_Check(input), "input: expected a torch.Tensor, got ",
                     Py_TYPE(input)->tp_name);
    TORCH_CHECK_TYPE(PyBool_Check(copy), "copy: expected a bool, got ", Py_TYPE(copy)->tp_name);
    if (!THPVariable_CheckExact(input) || at::impl::torch_function_mode_enabled()) {
      return CallOverridden(input, device, copy).release().ptr();
    }
    FuturePtr future = Dispatch(input, DeviceArgument(device), copy == Py_True);
    return NewHandle(HandleKind::kTensorFuture, std::move(future)).release().ptr();
  });
}

// What OpOverload calls. torch's own matches arguments against the schema in a general way, which
// costs more than all the rest: one plain tensor goes to the dispatcher at once, all else to torch.
PyObject* general_operator = nullptr;

PyObject* CallOperator(PyObject*, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  if (nargs != 1 || names || !THPVariable_CheckExact(args[0]) ||
      at::impl::torch_function_mode_enabled()) {
    return PyObject_Vectorcall(general_operator, args, static_cast<size_t>(nargs), names);
  }
  return Guarded([&] {
    FuturePtr future = Dispatch(args[0], c10::IValue(), false);
    return py::cast(std::make_shared<Wrapper>(std::move(future))).release().ptr();
  });
}

PyMethodDef call_operator_def = {
    "get_tensor_async", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(CallOperator)),
    METH_FASTCALL | METH_KEYWORDS, "dtorch::get_tensor_async"};

PyMethodDef to_torch_async_def = {
    "to_torch_async", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(ToTorchAsync)),
    METH_FASTCALL, "to_torch_async(input, device, copy, /)\n--\n\nCall the operator."};

// ---- Groups -------------------------------------------------------------------------------------

c10::TypePtr ElementType(const std::vector<FuturePtr>& futures) {
  return futures.empty() ? c10::TypePtr(c10::AnyType::get()) : futures.front()->elementType();
}

py::list ListOf(py::handle iterable) {
  PyObject* list = PySequence_List(iterable.ptr());
  if (!list) throw py::error_already_set();
  return py::reinterpret_steal<py::list>(list);
}

py::object PyCollectAll(py::object futures) {
  const py::list list = ListOf(futures);
  const auto members = FuturesFromSequence(list, "futures");
  return WrapHandle(handle_types[static_cast<int>(HandleKind::kFuture)],
                    std::make_shared<Handle>(CollectAll(members, ElementType(members)),
                                             std::nullopt, list.ptr()));
}

py::object PyCollectAny(py::object futures) {
  const py::list list = ListOf(futures);
  const auto members = FuturesFromSequence(list, "futures");
  const FuturePtr result = CollectAny(members, ElementType(members));
  TraceCollect("dtorch::collect_any", members, result);
  PyTypeObject* type = handle_types[static_cast<int>(HandleKind::kFuture)];
  for (py::handle item : list) {
    if (!IsHandle(item.ptr())) return WrapHandle(type, std::make_shared<Handle>(result));
  }
  // All of one class: so is the result.
  PyTypeObject* first = Py_TYPE(list[0].ptr());
  for (py::handle item : list) {
    if (Py_TYPE(item.ptr()) != first) first = type;
  }
  return WrapHandle(first, std::make_shared<Handle>(result));
}

py::list PyWaitAll(py::object futures, py::object timeout_ms) {
  const Deadline deadline = DeadlineFromObject(timeout_ms.ptr());
  const py::list list = ListOf(futures);
  WaitForAll(FuturesFromSequence(list, "futures"), deadline);
  py::list values;
  for (py::handle item : list) values.append(ReadComplete(item));
  return values;
}

// A CompletionQueue with one deadline for all of it.
class TimedCompletionQueue {
 public:
  TimedCompletionQueue(py::object futures, py::object timeout_ms)
      : deadline_(DeadlineFromObject(timeout_ms.ptr())),
        queue_(FuturesFromSequence(futures, "futures")) {}

  // The next index, or None when all were told. Threads that share an iteration take turns.
  std::optional<size_t> Pop() {
    HostUnlocked unlocked;
    std::lock_guard<std::mutex> turn(turn_);
    if (queue_.remaining() == 0) return std::nullopt;
    const auto index = queue_.Pop(deadline_);
    if (!index) throw TimeoutError(TimeoutMessage(queue_.remaining(), queue_.size()));
    return index;
  }

  std::optional<double> SecondsLeft() const {
    if (deadline_.IsNever()) return std::nullopt;
    return std::chrono::duration<double>(deadline_.when() - Deadline::Clock::now()).count();
  }

 private:
  const Deadline deadline_;
  std::mutex turn_;
  CompletionQueue queue_;
};

}  // namespace

py::object NewHandle(HandleKind kind, FuturePtr future) {
  return WrapHandle(handle_types[static_cast<int>(kind)],
                    std::make_shared<Handle>(std::move(future)));
}

py::object ReadComplete(py::handle object) {
  Wrapper& wrapper = WrapperOf(object, "future");
  if (IsHandle(object.ptr())) return Read(static_cast<Handle&>(wrapper));
  return Read(wrapper, nullptr);
}

FuturePtr FutureFromObject(py::handle object, const char* what) {
  return WrapperOf(object, what).fut;
}

std::vector<FuturePtr> FuturesFromSequence(py::handle sequence, const char* what) {
  std::vector<FuturePtr> futures;
  for (py::handle item : sequence) futures.push_back(FutureFromObject(item, what));
  return futures;
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

  m.def(
      "register_futures",
      [](py::type future, py::type tensor_future, py::type void_future, py::function hook,
         py::object op) {
        const py::handle types[] = {future, tensor_future, void_future};
        for (int i = 0; i < 3; ++i) {
          handle_types[i] = reinterpret_cast<PyTypeObject*>(types[i].inc_ref().ptr());
        }
        before_blocking = hook.release().ptr();
        get_tensor_async = op.release().ptr();
      },
      py::kw_only(), py::arg("future"), py::arg("tensor_future"), py::arg("void_future"),
      py::arg("before_blocking"), py::arg("get_tensor_async"));

  PyObject* function = PyCFunction_New(&to_torch_async_def, nullptr);
  m.attr("to_torch_async") = py::reinterpret_steal<py::object>(function);

  m.def("fast_operator", [](py::object general) {
    general_operator = general.release().ptr();
    return py::reinterpret_steal<py::object>(PyCFunction_New(&call_operator_def, nullptr));
  });
  m.def("collect_all", &PyCollectAll);
  m.def("collect_any", &PyCollectAny);
  m.def("wait_all", &PyWaitAll);

  py::class_<TimedCompletionQueue>(m, "CompletionQueue")
      .def(py::init<py::object, py::object>())
      .def("pop", &TimedCompletionQueue::Pop)
      .def("seconds_left", &TimedCompletionQueue::SecondsLeft);
}

}  // namespace dtorch::python
