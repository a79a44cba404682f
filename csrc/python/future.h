#pragma once

#include "dtorch/base/deadline.h"
#include "dtorch/future/waiter_list.h"

#include "python/gil.h"

#include <ATen/core/ivalue.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

// Futures as Python objects: torch's own (torch._C.Future), and handles, whose classes derive from
// it and add a timeout, `await`, and a result that is taken once.
namespace dtorch::python {

/// The registered classes of handles.
enum class HandleKind { kFuture, kTensorFuture, kVoidFuture, kTreeFuture };
PyTypeObject* HandleType(HandleKind kind);

pybind11::object NewHandle(PyTypeObject* type, FuturePtr future);
inline pybind11::object NewHandle(HandleKind kind, FuturePtr future) {
  return NewHandle(HandleType(kind), std::move(future));
}

/// A handle whose value is a list of the very objects in `members`.
pybind11::object NewGroupHandle(FuturePtr future, const pybind11::list& members);

/// A handle of a future of a list of tensors whose value is `tree(list)`. What its error says of a
/// place in the list becomes a note: `tree.add_note(error)`.
pybind11::object NewTreeHandle(FuturePtr future, PyObject* tree);

/// What torch's operators return.
pybind11::object NewBareFuture(FuturePtr future);

/// What makes another handle like `handle`. May be dropped without the interpreter lock.
std::function<pybind11::object(FuturePtr)> Reissuer(PyObject* handle);

/// Drops a share of a complete future, or a value. At exit a thread other than the main one may be
/// ended wherever it takes the interpreter lock, as it does to drop a Python object; in a
/// destructor that ends the process. So the object is dropped behind that of the future, and the
/// thread parked.
void DropInThisThread(c10::IValue dropped);

/// Whether `object` is of torch's class or one derived from it; its __init__ may not have run.
bool IsTorchFuture(PyObject* object);

/// The future in a Python object; TypeError, which names `what`, if it is no torch future.
FuturePtr FutureFromObject(pybind11::handle object, const char* what);

/// The same for a sequence of them.
std::vector<FuturePtr> FuturesFromSequence(pybind11::handle sequence, const char* what);

/// Whether reading the future in Python gives something else than its native value: an error that
/// torch keeps as a value, the members of a group, or a tree.
bool IsReadSpecially(pybind11::handle future);

/// The outcome of a complete torch future: what every way of reading it in Python gives.
pybind11::object ReadComplete(pybind11::handle future);

/// A Python object as the value of a future.
c10::IValue ValueFromObject(const pybind11::object& object);

/// None, or a number of milliseconds. TypeError / ValueError otherwise.
Deadline DeadlineFromObject(PyObject* timeout_ms);

void BindFuture(pybind11::module_& m);

}  // namespace dtorch::python
