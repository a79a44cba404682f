#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

// Guards for the interpreter lock that are safe at exit. Once the interpreter is shutting down, a
// thread that asks for the lock is ended by a forced unwinding, which aborts the process when it
// meets a noexcept frame or a destructor that touches Python. So such a thread is parked instead,
// until the process ends.
namespace dtorch::python {

[[noreturn]] inline void ParkForEver() {
  for (;;) pause();
}

/// Calls Python code from a native frame: nothing of that frame is unwound if the thread is ended
/// in the call.
inline PyObject* CallOneArg(PyObject* function, PyObject* argument) {
  try {
    return PyObject_CallOneArg(function, argument);
  } catch (abi::__forced_unwind&) {
    ParkForEver();
  }
}

/// Holds the lock for its scope. False if there is no interpreter any more: touch no PyObject.
class GilAcquire {
 public:
  GilAcquire() {
    if (!Py_IsInitialized()) return;
    try {
      state_ = PyGILState_Ensure();
      held_ = true;
    } catch (abi::__forced_unwind&) {
      ParkForEver();
    }
  }
  ~GilAcquire() {
    if (held_) PyGILState_Release(state_);
  }
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;
  explicit operator bool() const { return held_; }

 private:
  PyGILState_STATE state_{};
  bool held_ = false;
};

/// For dtorch::Host: gives up the lock if this thread holds it.
inline void* DropGil() {
  return Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
}

inline void RetakeGil(void* state) {
  try {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state));
  } catch (abi::__forced_unwind&) {
    ParkForEver();
  }
}

/// A strong reference that may be dropped by any thread, with or without the lock.
class SharedRef {
 public:
  SharedRef() = default;
  /// Needs the lock. Takes a reference of its own; nullptr is none.
  explicit SharedRef(PyObject* object) : object_(Py_XNewRef(object)) {}
  SharedRef(SharedRef&& other) noexcept : object_(other.object_) { other.object_ = nullptr; }
  SharedRef& operator=(SharedRef&&) = delete;
  SharedRef(const SharedRef&) = delete;
  SharedRef& operator=(const SharedRef&) = delete;
  ~SharedRef() {
    if (!object_) return;
    GilAcquire gil;
    if (gil) Py_DECREF(object_);
  }
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

}  // namespace dtorch::python
