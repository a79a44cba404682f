#pragma once

#include <pybind11/pybind11.h>

namespace dtorch::python {

/// What this process has in shared memory, for dtorch_ops.shared_memory.
void BindSharedMemory(pybind11::module_& m);

}  // namespace dtorch::python
