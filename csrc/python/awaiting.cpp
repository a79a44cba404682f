#include "python/awaiting.h"

#include "dtorch/base/error.h"

#include "python/errors.h"
#include "python/future.h"

#include <cerrno>
#include <sys/eventfd.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace py = pybind11;

namespace dtorch::python {
namespace {

// Leaked on purpose, as all that lives as long as the module.
PyObject* queue_of = nullptr;          // loop -> AwaitQueue, for good
PyObject* get_running_loop = nullptr;  // None if there is none
PyTypeObject* iterator_type = nullptr;

py::object Owned(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

// Looking a loop up in a weak table costs as much as the rest of an await, and it is nearly always
// the one of last time.
std::shared_ptr<AwaitQueue> QueueOf(PyObject* loop) {
  struct Last {
    PyObject* loop_ref = nullptr;
    std::shared_ptr<AwaitQueue> queue;
  };
  static auto* last = new Last;  // guarded by the interpreter lock
  const auto known =
      py::reinterpret_steal<py::object>(last->loop_ref ? StrongRef(last->loop_ref) : nullptr);
  if (known.ptr() != loop) {
    auto queue = Owned(PyObject_CallOneArg(queue_of, loop)).cast<std::shared_ptr<AwaitQueue>>();
    PyObject* loop_ref = PyWeakref_NewRef(loop, nullptr);
    if (!loop_ref) throw py::error_already_set();
    std::swap(last->loop_ref, loop_ref);
    last->queue.swap(queue);
    Py_XDECREF(loop_ref);
  }
  return last->queue;
}

// ---- The iterator -------------------------------------------------------------------------------

struct AwaitIterator {
  PyObject_HEAD PyObject* future;
  AwaitWaiter* waiter;  // while suspended
  bool started;
};

// Suspends the coroutine: an asyncio future to wait for; nullptr if `future` is complete.
PyObject* Suspend(AwaitIterator* self, const FuturePtr& future) {
  if (future->completed()) return nullptr;
  const py::object loop = Owned(PyObject_CallNoArgs(get_running_loop));
  if (loop.is_none()) {
    throw DTorchError(
        "expected a running asyncio event loop, got none: a pending future is awaited in a "
        "coroutine that asyncio runs; elsewhere use wait() or get()");
  }
  static PyObject* create_future = PyUnicode_InternFromString("create_future");
  static PyObject* blocking = PyUnicode_InternFromString("_asyncio_future_blocking");
  py::object awaited = Owned(PyObject_CallMethodNoArgs(loop.ptr(), create_future));
  auto waiter = std::make_unique<AwaitWaiter>(QueueOf(loop.ptr()), awaited);
  if (!waiter->LinkTo(future)) return nullptr;
  // What a Task expects of a future that it is given to wait for.
  if (PyObject_SetAttr(awaited.ptr(), blocking, Py_True) != 0) throw py::error_already_set();
  self->waiter = waiter.release();
  return awaited.release().ptr();
}

// A StopIteration out of an iterator is its end, and none may leave a coroutine (PEP 479).
void ReplaceStopIteration() {
  if (!PyErr_ExceptionMatches(PyExc_StopIteration)) return;
  py::error_already_set stop;
  py::raise_from(stop, PyExc_RuntimeError,
                 "the future failed with StopIteration, which cannot be raised in a coroutine");
}

PySendResult Send(PyObject* object, PyObject*, PyObject** result) {
  auto* self = reinterpret_cast<AwaitIterator*>(object);
  *result = Guarded([&] {
    const FuturePtr future = FutureFromObject(self->future, "await");
    if (!std::exchange(self->started, true)) {
      if (PyObject* awaited = Suspend(self, future)) return awaited;
    }
    delete std::exchange(self->waiter, nullptr);
    if (!future->completed()) {
      throw DTorchError("expected to be resumed when the future is complete, got resumed before");
    }
    return ReadComplete(self->future).release().ptr();
  });
  if (!*result) {
    ReplaceStopIteration();
    return PYGEN_ERROR;
  }
  return self->waiter ? PYGEN_NEXT : PYGEN_RETURN;
}

PyObject* Next(PyObject* self) {
  PyObject* result = nullptr;
  if (Send(self, Py_None, &result) != PYGEN_RETURN) return result;
  // Called with the value, so that a tuple or an exception stays one value.
  PyObject* stop = PyObject_CallOneArg(PyExc_StopIteration, result);
  if (stop) PyErr_SetObject(PyExc_StopIteration, stop);
  Py_XDECREF(stop);
  Py_DECREF(result);
  return nullptr;
}

void Dealloc(PyObject* object) {
  auto* self = reinterpret_cast<AwaitIterator*>(object);
  delete self->waiter;
  Py_XDECREF(self->future);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyTypeObject* MakeIteratorType() {
  static PyType_Slot slots[] = {
      {Py_tp_iter, reinterpret_cast<void*>(PyObject_SelfIter)},
      {Py_tp_iternext, reinterpret_cast<void*>(Next)},
      {Py_am_send, reinterpret_cast<void*>(Send)},
      {Py_tp_dealloc, reinterpret_cast<void*>(Dealloc)},
      {0, nullptr},
  };
  static PyType_Spec spec = {"dtorch_ops._C.AwaitIterator", sizeof(AwaitIterator), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  return reinterpret_cast<PyTypeObject*>(Owned(PyType_FromSpec(&spec)).release().ptr());
}

PyMethodDef await_method = {"__await__", AwaitFuture, METH_NOARGS,
                            "The outcome of the future, once it is complete."};

}  // namespace

AwaitQueue::AwaitQueue() : wake_up_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_up_) throw std::system_error(errno, std::generic_category(), "dtorch_ops: eventfd");
}

void AwaitQueue::Push(std::shared_ptr<SharedRef> awaited) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ready_.push_back(std::move(awaited));
    if (std::exchange(scheduled_, true)) return;
  }
  const uint64_t one = 1;
  (void)!write(wake_up_.get(), &one, sizeof(one));  // a closed loop does not read it: no error
}

void AwaitQueue::Drain() {
  uint64_t wake_ups = 0;
  (void)!read(wake_up_.get(), &wake_ups, sizeof(wake_ups));  // before the list is taken
  std::vector<std::shared_ptr<SharedRef>> ready;
  {
    // Nobody who holds this lock wants the interpreter's, which we hold.
    std::lock_guard<std::mutex> lock(mutex_);
    ready.swap(ready_);
    scheduled_ = false;
  }
  static PyObject* done = PyUnicode_InternFromString("done");
  static PyObject* set_result = PyUnicode_InternFromString("set_result");
  for (const auto& awaited : ready) {
    // A cancelled await is done, and keeps its place in the list.
    if (Owned(PyObject_CallMethodNoArgs(awaited->get(), done)).ptr() == Py_True) continue;
    Owned(PyObject_CallMethodOneArg(awaited->get(), set_result, Py_None));
  }
}

PyObject* AwaitFuture(PyObject* future, PyObject*) {
  auto* self = PyObject_New(AwaitIterator, iterator_type);
  if (!self) return nullptr;
  self->future = Py_NewRef(future);
  self->waiter = nullptr;
  self->started = false;
  return reinterpret_cast<PyObject*>(self);
}

void BindAwaiting(py::module_& m) {
  iterator_type = MakeIteratorType();
  get_running_loop =
      py::object(py::module_::import("asyncio").attr("_get_running_loop")).release().ptr();

  py::class_<AwaitQueue, std::shared_ptr<AwaitQueue>>(m, "AwaitQueue")
      .def(py::init<>())
      .def("fileno", &AwaitQueue::fileno)
      .def("drain", &AwaitQueue::Drain);
  py::class_<AwaitWaiter>(m, "AwaitWaiter")
      .def(py::init<std::shared_ptr<AwaitQueue>, py::object>())
      .def("link", [](AwaitWaiter& waiter, py::object future) {
        const FuturePtr torch_future = FutureFromObject(future, "future");
        return !torch_future->completed() && waiter.LinkTo(torch_future);
      });
  m.def("register_queue_of", [](py::function function) { queue_of = function.release().ptr(); });
  m.def("add_await", [](py::type type) {
    type.attr("__await__") =
        Owned(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &await_method));
  });
}

}  // namespace dtorch::python
