#pragma once

#include "dtorch/base/api.h"
#include "dtorch/promise/device_memory.h"
#include "dtorch/promise/reservation.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>

// Values that go from device memory to device memory of another process, without the host.
//
//    producer                                             consumer
//    snapshot on its stream; asks ------ device, bytes --> allocates a block, or has one
//    waits for the snapshot                                 |
//    opens the block         <---------- its handle -------'
//    copies into it, waits for the copy
//    publishes               ----------------------------> copies out of it: the value; the block
//                                                           is free for the producer's next one
//
// The block is the consumer's, so a value that was set survives its producer; the copy out of it
// is what torch's own allocator has made, so the value is like any tensor. Whatever fails before
// the producer publishes sends the value through the host.
namespace dtorch {

/// How one type of device gives its memory to other processes. Installed by a library that knows
/// the device. All are called by threads without locks, and throw what the device refuses.
struct DeviceSharing {
  /// Memory that other processes can open, with the handle by which they do: at most 120 bytes.
  void* (*allocate)(c10::Device device, uint64_t bytes, std::string& handle) = nullptr;
  void (*free)(c10::Device device, void* data) = nullptr;
  void* (*open)(c10::Device device, const std::string& handle) = nullptr;
  void (*close)(c10::Device device, void* data) = nullptr;
};
DTORCH_API void SetDeviceSharing(c10::DeviceType type, DeviceSharing sharing);

/// Whether a value like this one may be sent so.
bool CanShare(const at::Tensor& value);

/// Begins to send `value`, for which that is true, of another process's promise; it is that of the
/// call, in stream order. Takes the reservation, unless it throws.
void StartSharing(const at::Tensor& value, std::unique_ptr<Reservation>& reservation,
                  const char* op);

/// The consumer's side: see AcceleratorValues.
void ProvideMemory(DeviceMemoryRequest request);

/// Bytes of blocks that this process has provided, free ones included.
DTORCH_API uint64_t ProvidedBytes();

}  // namespace dtorch
