#pragma once

#include <pybind11/pybind11.h>

namespace dtorch::python {

/// What Python's side of the network needs: see dtorch_ops/network.py.
void BindNetwork(pybind11::module_& m);

}  // namespace dtorch::python
