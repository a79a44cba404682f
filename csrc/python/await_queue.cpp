#include "python/await_queue.h"

#include <utility>

namespace py = pybind11;

namespace dtorch::python {

bool AwaitQueue::Push(std::shared_ptr<SharedRef> awaited) {
  std::lock_guard<std::mutex> lock(mutex_);
  ready_.push_back(std::move(awaited));
  return !std::exchange(scheduled_, true);
}

py::list AwaitQueue::Take() {
  std::vector<std::shared_ptr<SharedRef>> ready;
  {
    // Nobody who holds this lock wants the interpreter's, which we hold.
    std::lock_guard<std::mutex> lock(mutex_);
    ready.swap(ready_);
    scheduled_ = false;
  }
  py::list futures(ready.size());
  for (size_t i = 0; i < ready.size(); ++i) {
    PyList_SET_ITEM(futures.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(ready[i]->get()));
  }
  return futures;
}

void AwaitQueue::Wake() {
  GilAcquire gil;
  if (!gil) return;
  PyObject* loop = PyWeakref_GetObject(loop_ref_.get());
  if (loop == Py_None) return;
  Py_INCREF(loop);
  PyObject* handle = PyObject_CallMethod(loop, "call_soon_threadsafe", "O", drain_.get());
  if (!handle) PyErr_Clear();  // the loop has been closed: nobody is left to tell
  Py_XDECREF(handle);
  Py_DECREF(loop);
}

}  // namespace dtorch::python
