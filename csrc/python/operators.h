#pragma once

#include <pybind11/pybind11.h>

namespace dtorch::python {

/// Calls of operators from Python, where torch's own way is slow, or does not check enough.
void BindOperators(pybind11::module_& m);

}  // namespace dtorch::python
