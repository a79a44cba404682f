#pragma once

#include "dtorch/shm/attachment.h"
#include "dtorch/shm/mailbox.h"

#include <ATen/core/ivalue.h>

#include <exception>

// Tensors and errors as bytes in shared memory, and back.
namespace dtorch::file {

/// What Attachment::Prepare is told of a sendable tensor. Refers to its sizes.
shm::Attachment::Value Describe(const at::Tensor& sendable);

/// A tensor, not initialised, in memory that `attachment` lends.
at::Tensor Lent(const std::shared_ptr<shm::Attachment>& attachment, at::IntArrayRef size,
                c10::ScalarType dtype);

/// Writes the elements, in order, to `bytes`.
void Write(const at::Tensor& sendable, std::byte* bytes);

/// The tensor in what was received, without a copy: it keeps the block. std::runtime_error if what
/// was received makes no sense. On the CPU, or in the memory of a device that the producer was
/// given; DeviceOf() says where it is wanted.
at::Tensor Read(shm::Received received);
c10::Device DeviceOf(const shm::Received& received);

}  // namespace dtorch::file
