# The target dtorch::torch: headers and libraries of an installed torch, found beside its CMake
# files (torch.utils.cmake_prefix_path in CMAKE_PREFIX_PATH, or Torch_DIR). Sets
# DTORCH_TORCH_VERSION, DTORCH_TORCH_ROOT and DTORCH_TORCH_LIB_DIR.
#
# Not find_package(Torch): of a CUDA build of torch that asks for a CUDA toolkit, which nothing here
# needs. A project that has called it anyway gets along with this.
if(NOT TARGET dtorch::torch)
  find_path(DTORCH_TORCH_CMAKE_DIR TorchConfigVersion.cmake
    HINTS ${Torch_DIR} PATH_SUFFIXES Torch share/cmake/Torch)
  if(NOT DTORCH_TORCH_CMAKE_DIR)
    message(FATAL_ERROR "dtorch_ops: torch was not found. Add what "
      "`python -c 'import torch; print(torch.utils.cmake_prefix_path)'` prints to CMAKE_PREFIX_PATH.")
  endif()
  get_filename_component(DTORCH_TORCH_ROOT "${DTORCH_TORCH_CMAKE_DIR}/../../.." ABSOLUTE)
  set(DTORCH_TORCH_LIB_DIR "${DTORCH_TORCH_ROOT}/lib")
  file(STRINGS "${DTORCH_TORCH_CMAKE_DIR}/TorchConfigVersion.cmake" _dtorch_line
    REGEX "set\\(PACKAGE_VERSION " LIMIT_COUNT 1)
  string(REGEX MATCH "[0-9]+\\.[0-9]+[^\"]*" DTORCH_TORCH_VERSION "${_dtorch_line}")

  add_library(dtorch::torch INTERFACE IMPORTED)
  target_include_directories(dtorch::torch SYSTEM INTERFACE
    "${DTORCH_TORCH_ROOT}/include" "${DTORCH_TORCH_ROOT}/include/torch/csrc/api/include")
  target_link_libraries(dtorch::torch INTERFACE
    "${DTORCH_TORCH_LIB_DIR}/libtorch_cpu.so" "${DTORCH_TORCH_LIB_DIR}/libc10.so")
endif()
