#pragma once

#include <pybind11/pybind11.h>

namespace dtorch::python {

/// Groups of futures, for dtorch_ops.groups.
void BindGroups(pybind11::module_& m);

}  // namespace dtorch::python
