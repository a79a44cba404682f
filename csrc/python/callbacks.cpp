#include "python/callbacks.h"

#include "dtorch/base/host.h"
#include "dtorch/future/callback.h"
#include "dtorch/future/complete.h"

#include "python/errors.h"
#include "python/future.h"
#include "python/gil.h"

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace dtorch::python {
namespace {

namespace py = pybind11;

// A Python callable that waits, inside a native future, for its completion.
class Callback {
 public:
  Callback(PyObject* self, PyObject* function)
      : function_(function), self_(py::weakref(py::handle(self)).ptr()), reissue_(Reissuer(self)) {}

  // Calls it with the handle it was added to, or with another one on the same future if that is
  // gone. (Holding the handle would keep a future alive that nobody completes.)
  py::object operator()(c10::ivalue::Future& future) const {
    auto self = py::reinterpret_steal<py::object>(StrongRef(self_.get()));
    if (!self) self = reissue_(FuturePtr::reclaim_copy(&future));
    return py::reinterpret_steal<py::object>(CallOneArg(function_.get(), self.ptr()));
  }

  PyObject* function() const { return function_.get(); }

 private:
  const SharedRef function_;
  const SharedRef self_;
  const std::function<py::object(FuturePtr)> reissue_;
};

std::shared_ptr<Callback> MakeCallback(PyObject* self, PyObject* function) {
  TORCH_CHECK_TYPE(PyCallable_Check(function), "callback: expected a callable, got ",
                   Py_TYPE(function)->tp_name);
  return std::make_shared<Callback>(self, function);
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
    if (future_->completed()) {
      DropInThisThread(std::move(future_));
      return;
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

}  // namespace

PyObject* Then(PyObject* self, PyObject* function) {
  return Guarded([&] {
    auto callback = MakeCallback(self, function);
    const FuturePtr parent = FutureFromObject(self, "future");
    const FuturePtr child = parent->createInstance(c10::PyObjectType::get());
    EnsureWaiterList(parent);
    if (!parent->completed()) {
      PrepareForWaiters(
          child, OriginOf(parent) == Origin::kAnything ? Origin::kAnything : Origin::kPromised);
    }
    const auto run = [child = FlatRef(child),
                      callback = std::move(callback)](c10::ivalue::Future& future) {
      c10::IValue value;
      std::exception_ptr error;
      {
        GilAcquire gil;
        if (!gil) return;
        Parked([&] {
          try {
            py::object result = (*callback)(future);
            if (result) {
              value = ValueFromObject(result);
            } else {
              error = TakePythonError();
            }
          } catch (abi::__forced_unwind&) {
            throw;
          } catch (const py::error_already_set&) {
            SetPythonErrorFromCurrent();
            error = TakePythonError();
          } catch (...) {
            error = std::current_exception();
          }
        });
      }
      if (error) {
        CompleteWithError(child.get(), std::move(error), Nesting::kDeferIfDeep);
      } else {
        CompleteWithValue(child.get(), std::move(value), Nesting::kDeferIfDeep);
      }
    };
    {
      HostUnlocked unlocked;  // runs at once if the parent is complete
      AddCallback(parent, run);
    }
    return NewHandle(HandleType(HandleKind::kFuture), child).release().ptr();
  });
}

PyObject* AddDoneCallback(PyObject* self, PyObject* function) {
  return Guarded([&] {
    auto callback = MakeCallback(self, function);
    const FuturePtr parent = FutureFromObject(self, "future");
    EnsureWaiterList(parent);
    const auto run = [callback = std::move(callback)](c10::ivalue::Future& future) {
      GilAcquire gil;
      if (!gil) return;
      Parked([&] {
        try {
          if ((*callback)(future)) return;
        } catch (abi::__forced_unwind&) {
          throw;
        } catch (...) {
          SetPythonErrorFromCurrent();
        }
        PyErr_WriteUnraisable(callback->function());
      });
    };
    {
      HostUnlocked unlocked;  // runs at once if the future is complete
      AddCallback(parent, run);
    }
    return Py_NewRef(Py_None);
  });
}

}  // namespace dtorch::python
