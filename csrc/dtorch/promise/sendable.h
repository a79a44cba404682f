#pragma once

#include "dtorch/base/api.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

// What of a tensor can leave its process: its elements, in order, with their dtype and shape.
namespace dtorch {

/// c10::TypeError, which names the kind and what to call instead, for what has no plain elements.
void CheckSendable(const at::Tensor& value);

/// `value`, which has passed, as it can be sent: on `device`, which is its own or the CPU, without
/// lazy conjugation or negation. Its elements may still be strided.
at::Tensor Sendable(const at::Tensor& value, c10::Device device = c10::kCPU);

/// Of what another process says that it has sent, which may be anything: the dtype.
/// std::runtime_error if there is none, or the shape is impossible or not one of `bytes` bytes.
c10::ScalarType CheckReceived(uint64_t dtype, at::IntArrayRef sizes, uint64_t bytes);
/// The device, which this process may lack; the CPU if there can be no such one.
c10::Device DeviceNamed(uint64_t type, int64_t index);

}  // namespace dtorch
