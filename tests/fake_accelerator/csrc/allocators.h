#pragma once

#include <c10/core/Allocator.h>

// The two kinds of memory (memory.h) as torch's allocators.
namespace fake {

/// For tensors: allocates on the current stream of the current device.
c10::Allocator* TensorAllocator();

/// For pinned host tensors; what at::getHostAllocator(PrivateUse1) gives.
c10::Allocator* PinnedAllocator();

}  // namespace fake
