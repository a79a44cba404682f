#pragma once

#include "dtorch/base/api.h"
#include "dtorch/base/deadline.h"

#include <atomic>
#include <cstdint>

namespace dtorch {

/// Blocks one thread until another one wakes it: a binary semaphore that a signal can interrupt.
/// Wake() before Sleep() is not lost; several Wake() count as one.
class DTORCH_API Sleeper {
 public:
  /// True once woken (which takes the wake-up), false when the deadline has passed. Asks the
  /// host's interrupt check when a signal has arrived, and throws what it throws. Call it with
  /// the host's lock dropped.
  bool Sleep(Deadline deadline);

  /// Any thread. Does not touch this object after the sleeper may have seen the wake-up.
  void Wake();

 private:
  std::atomic<uint32_t> woken_{0};
};

}  // namespace dtorch
