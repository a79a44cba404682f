#pragma once

#include <string>

// The exceptions of the fake, made in one place: what simulates the hardware includes no torch
// header, and is compiled in seconds.
namespace fake {

/// c10::AcceleratorError: torch.AcceleratorError in Python.
[[noreturn]] void ThrowAcceleratorError(const std::string& message);

/// c10::OutOfMemoryError: torch.OutOfMemoryError in Python.
[[noreturn]] void ThrowOutOfMemory(const std::string& message);

}  // namespace fake
