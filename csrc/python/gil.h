#pragma once

#include "dtorch/sys/thread.h"

#include <Python.h>
#include <atomic>
#include <cxxabi.h>
#include <unistd.h>

// Guards for the interpreter lock that are safe at exit. Once the interpreter is shutting down, a
// thread that asks for the lock is ended by a forced unwinding, which aborts the process when it
// meets a noexcept frame or a destructor that touches Python. So such a thread is parked instead,
// until the process ends.
namespace dtorch::python {

/// Runs `body`, which may run Python code, from a native frame: nothing of that frame is unwound if
/// the thread is ended meanwhile.
template <typename Body>
auto Parked(const Body& body) {
  try {
    return body();
  } catch (abi::__forced_unwind&) {
    SleepForEver();
  }
}

inline PyObject* CallOneArg(PyObject* function, PyObject* argument) {
  return Parked([&] { return PyObject_CallOneArg(function, argument); });
}

/// What a weak reference leads to: a new reference, or nullptr.
inline PyObject* StrongRef(PyObject* weak) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  (void)PyWeakref_GetRef(weak, &object);
  return object;
#else
  PyObject* object = PyWeakref_GetObject(weak);
  return object == Py_None ? nullptr : Py_XNewRef(object);
#endif
}

/// Holds the lock for its scope. False if there is no interpreter any more: touch no PyObject.
class GilAcquire {
 public:
  GilAcquire() {
    if (!Py_IsInitialized()) return;
    state_ = Parked(PyGILState_Ensure);
    held_ = true;
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
  Parked([&] { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); });
}

/// Scope in which a thread of ours may drop the last reference to an object, and with it a tensor:
/// torch gives up the lock for that, and takes it again in a destructor. A thread that does so once
/// the interpreter is going ends the process. False from the exit handler on, which waits for those
/// that are at it: what is dropped then is left alone.
class MayDrop {
 public:
  MayDrop() {
    dropping_.fetch_add(1);
    allowed_ = !exiting_.load() || getpid() == gettid();
  }
  ~MayDrop() { dropping_.fetch_sub(1); }
  MayDrop(const MayDrop&) = delete;
  MayDrop& operator=(const MayDrop&) = delete;
  explicit operator bool() const { return allowed_; }

  /// For the exit handler, which holds the lock.
  static void NoMore() {
    exiting_.store(true);
    Py_BEGIN_ALLOW_THREADS;
    for (int tries = 0; dropping_.load() > 0 && tries < 1000; ++tries) usleep(1000);
    Py_END_ALLOW_THREADS;
  }

  /// In a forked child, which lacks the threads that were at it.
  static void Forget() { dropping_.store(0); }

 private:
  inline static std::atomic<int> dropping_{0};
  inline static std::atomic<bool> exiting_{false};
  bool allowed_;
};

/// A strong reference that may be dropped by any thread, with or without the lock.
class SharedRef {
 public:
  SharedRef() = default;
  /// Needs the lock. Takes a reference of its own; nullptr is none.
  explicit SharedRef(PyObject* object) : object_(Py_XNewRef(object)) {}
  SharedRef(const SharedRef&) = delete;
  SharedRef& operator=(const SharedRef&) = delete;
  ~SharedRef() {
    if (!object_) return;
    const MayDrop may_drop;
    if (!may_drop) return;
    GilAcquire gil;
    if (gil) Parked([&] { Py_DECREF(object_); });  // may run a __del__
  }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_ = nullptr;
};

}  // namespace dtorch::python
