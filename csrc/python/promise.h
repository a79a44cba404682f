#pragma once

#include <pybind11/pybind11.h>

namespace dtorch::python {

void BindPromise(pybind11::module_& m);

}  // namespace dtorch::python
