#pragma once

#include "dtorch/base/api.h"

#include <functional>

namespace dtorch {

/// Starts a thread of ours, which nobody joins. It takes no signals: those are for the threads of
/// the program. std::system_error if there is none to be had. `name`: at most 15 characters.
DTORCH_API void StartThread(std::function<void()> body, const char* name = "dtorch_ops");

/// For a thread that may neither go on nor end: one that was late for the exit.
[[noreturn]] DTORCH_API void SleepForEver();

}  // namespace dtorch
