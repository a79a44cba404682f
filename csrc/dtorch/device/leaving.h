#pragma once

#include "dtorch/base/api.h"
#include "dtorch/base/deadline.h"

namespace dtorch {

struct AllLeaving;

/// Counts a value that is on its way to another process, for as long as it lives.
class Leave {
 public:
  /// `leaves`: whether it goes anywhere.
  explicit Leave(bool leaves = true);
  ~Leave();
  Leave(const Leave&) = delete;
  Leave& operator=(const Leave&) = delete;

 private:
  AllLeaving* const all_;
};

/// Before a process ends: waits until what it has begun to send to other processes has got there.
/// False if the time is over: those promises break. To be called with the host's lock dropped.
DTORCH_API bool FlushPromises(Deadline deadline);

}  // namespace dtorch
