#pragma once

#include <pybind11/pybind11.h>

namespace dtorch::python {

/// What Python's side of logging needs: see dtorch_ops/_logging.py.
void BindLogging(pybind11::module_& m);

}  // namespace dtorch::python
