#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/future.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

// The operators as C++ functions. Each is one call through PyTorch's dispatcher.
namespace dtorch {

/// The value of `tensor`, once it has really been computed. See the operator `get_tensor_async`.
DTORCH_API TensorFuture GetTensorAsync(const at::Tensor& tensor,
                                       std::optional<c10::Device> device = std::nullopt,
                                       bool copy = false);

/// Of several tensors that were fetched as one.
class DTORCH_API TensorListFuture : public FutureHandle {
 public:
  explicit TensorListFuture(FuturePtr future) : FutureHandle(std::move(future)) {}
  /// As TensorFuture::Get().
  std::vector<at::Tensor> Get() { return Consume().toTensorVector(); }
};

/// The values of `tensors` as one. See the operator `get_tensors_async`.
DTORCH_API TensorListFuture GetTensorsAsync(const std::vector<at::Tensor>& tensors,
                                            std::optional<c10::Device> device = std::nullopt,
                                            bool copy = false);

/// GetTensorAsync(tensor).Get().
DTORCH_API at::Tensor GetTensor(const at::Tensor& tensor,
                                std::optional<c10::Device> device = std::nullopt);

/// Completes when everything queued so far on the current stream of each device is done; nullopt:
/// of every initialised device.
DTORCH_API VoidFuture
SyncFuture(const std::optional<std::vector<c10::Device>>& devices = std::nullopt);

/// SyncFuture(devices).Get().
DTORCH_API void Sync(const std::optional<std::vector<c10::Device>>& devices = std::nullopt);

}  // namespace dtorch
