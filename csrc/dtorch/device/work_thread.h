#pragma once

#include "dtorch/base/api.h"

#include <functional>

namespace dtorch {

/// What a thread is for: a driver that takes memory back may wait for all that a device has to do.
enum class Work { kProvide, kGiveBack };

/// Runs `work` in the thread of its kind, behind what that was given before; it goes when it was of
/// no use for a second. At exit it stays where it is. For calls of a driver that may take long, or
/// want a plain thread. What throws is dropped. std::system_error if no thread is to be had. A
/// forked child has one of its own; what its parent's had still to do is not done there.
void RunInWorkThread(Work kind, std::function<void()> work);

}  // namespace dtorch
