#pragma once

#include "dtorch/base/api.h"

#include <functional>

namespace dtorch {

/// Runs `work` in a thread of ours, behind what it was given before; the thread goes when it was of
/// no use for a second. For calls of a driver that may take long, or want a plain thread. What
/// throws is dropped. std::system_error if no thread is to be had. A forked child has one of its
/// own; what its parent's had still to do is not done there.
void RunInWorkThread(std::function<void()> work);

}  // namespace dtorch
