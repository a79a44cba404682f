#pragma once

#include <Python.h>

// Python callables that run when a future completes: the methods of the future classes.
namespace dtorch::python {

/// `then(self, function)`: a new Future of what `function(self)` returns or raises.
PyObject* Then(PyObject* self, PyObject* function);

/// `add_done_callback(self, function)`.
PyObject* AddDoneCallback(PyObject* self, PyObject* function);

}  // namespace dtorch::python
