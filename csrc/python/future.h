#pragma once

#include "dtorch/base/deadline.h"
#include "dtorch/future/waiter_list.h"

#include <pybind11/pybind11.h>

#include <vector>

namespace dtorch::python {

/// A new handle of the registered class `kind` on `future`.
enum class HandleKind { kFuture, kTensorFuture, kVoidFuture };
pybind11::object NewHandle(HandleKind kind, FuturePtr future);

/// The future in a Python object; TypeError, which names `what`, if it is no torch future.
FuturePtr FutureFromObject(pybind11::handle object, const char* what);

/// The same for a sequence of them.
std::vector<FuturePtr> FuturesFromSequence(pybind11::handle sequence, const char* what);

/// The outcome of a complete torch future: what every way of reading it in Python gives.
pybind11::object ReadComplete(pybind11::handle future);

/// None, or a number of milliseconds. TypeError / ValueError otherwise.
Deadline DeadlineFromObject(PyObject* timeout_ms);

void BindFuture(pybind11::module_& m);

}  // namespace dtorch::python
