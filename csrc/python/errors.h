#pragma once

#include "python/gil.h"

#include <pybind11/pybind11.h>

#include <Python.h>
#include <exception>

namespace dtorch::python {

/// What a future holds when a Python exception was set on it. TorchScript and C++ see a
/// std::exception that says "Type: message"; every read in Python raises a fresh exception of the
/// original type, with its args and the text of its traceback.
///
/// Frames are never kept: they hold the setter's locals, often the promise itself, and a cycle
/// through a native future can never be collected. Needs the lock; throws nothing, and leaves no
/// Python error set.
std::exception_ptr MakePythonError(pybind11::handle exception);

/// The Python error that is set, and no longer is, as MakePythonError() makes it. Needs the lock.
std::exception_ptr TakePythonError();

/// The error behind `value` if it is an exception object, as torch.futures.Future.set_exception
/// leaves it; nullptr otherwise. Takes the lock.
std::exception_ptr ErrorInObject(PyObject* value);

/// Sets the Python error for whatever is being handled by the calling catch block. Needs the lock.
void SetPythonErrorFromCurrent();

/// Runs `body` for a C-API function: nullptr, and the Python error set, if it throws.
template <typename Body>
PyObject* Guarded(const Body& body) {
  try {
    return body();
  } catch (abi::__forced_unwind&) {
    SleepForEver();
  } catch (...) {
    SetPythonErrorFromCurrent();
    return nullptr;
  }
}

void BindErrors(pybind11::module_& m);

}  // namespace dtorch::python
