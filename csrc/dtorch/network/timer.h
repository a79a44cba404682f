#pragma once

#include <cstdint>
#include <functional>

namespace dtorch::network {

/// Runs `work` in a thread of its own when the time has passed; one thread for all, which goes when
/// there was nothing to do for a while. At exit it stays where it is. `work` is short, and what it
/// throws is dropped. What cannot be planned, for want of a thread, is not done.
void RunAfter(int64_t ms, std::function<void()> work);

}  // namespace dtorch::network
