// CUDA's memory between processes. What is shared comes from cudaMalloc, whatever torch's allocator
// is configured to do: memory of expandable segments has no handle.

#include "dtorch/device/sharing.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <cuda_runtime_api.h>
#include <string>

namespace dtorch {
namespace {

void* Allocate(c10::Device device, uint64_t bytes, std::string& handle) {
  const c10::cuda::CUDAGuard guard(device);
  void* data = nullptr;
  C10_CUDA_CHECK(cudaMalloc(&data, bytes));
  cudaIpcMemHandle_t made;
  const cudaError_t error = cudaIpcGetMemHandle(&made, data);
  if (error != cudaSuccess) (void)cudaFree(data);
  C10_CUDA_CHECK(error);
  handle.assign(made.reserved, sizeof(made.reserved));
  return data;
}

void Free(c10::Device device, void* data) {
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(cudaFree(data));
}

void* Open(c10::Device device, const std::string& handle) {
  cudaIpcMemHandle_t theirs;
  TORCH_CHECK(handle.size() == sizeof(theirs.reserved), "expected a handle of CUDA's, got ",
              handle.size(), " bytes");
  std::memcpy(theirs.reserved, handle.data(), handle.size());
  const c10::cuda::CUDAGuard guard(device);
  void* data = nullptr;
  C10_CUDA_CHECK(cudaIpcOpenMemHandle(&data, theirs, cudaIpcMemLazyEnablePeerAccess));
  return data;
}

void Close(c10::Device device, void* data) {
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(cudaIpcCloseMemHandle(data));
}

const bool registered [[maybe_unused]] = [] {
  SetDeviceSharing(c10::DeviceType::CUDA, {Allocate, Free, Open, Close});
  return true;
}();

}  // namespace
}  // namespace dtorch
