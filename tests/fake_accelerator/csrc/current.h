#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "stream.h"

// What is current in the calling thread, and the two ways to name a stream. Initialises nothing.
namespace fake {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

int CurrentDevice();
/// Returns the one before. Throws for an index that there is not.
int SetCurrentDevice(int device);

Stream& CurrentStream(int device);
/// Returns the one before.
Stream& SetCurrentStream(Stream& stream);

c10::Stream ToC10(const Stream& stream);
Stream& FromC10(const c10::Stream& stream);

/// An index of -1 means the current device.
int IndexOf(c10::Device device);

}  // namespace fake
