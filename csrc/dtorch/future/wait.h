#pragma once

#include "dtorch/base/api.h"
#include "dtorch/base/deadline.h"
#include "dtorch/future/waiter_list.h"

#include <string>
#include <vector>

namespace dtorch {

/// A time limit in milliseconds as it comes from the user; c10::ValueError if negative.
DTORCH_API Deadline DeadlineFromMs(int64_t timeout_ms);

/// What a TimeoutError and a FutureAlreadyRetrievedError say.
DTORCH_API std::string TimeoutMessage(size_t pending, size_t total);
inline constexpr char kAlreadyRetrieved[] =
    "expected a future whose result has not been taken, got one that get() has consumed: keep the "
    "result, or use wait(), which does not consume";

/// Blocks until `future` is complete (true) or the deadline has passed (false). Never consumes,
/// never throws the future's error. Throws what the host's interrupt check throws (Ctrl-C).
///
/// Drops the host's lock while it blocks. Leaves nothing behind on the future.
DTORCH_API bool WaitUntil(const FuturePtr& future, Deadline deadline);

/// WaitUntil(), then ValueOf(). TimeoutError if the deadline passes first.
DTORCH_API c10::IValue WaitForValue(const FuturePtr& future, Deadline deadline);

/// Blocks until all are complete. Throws the first error at once, while the rest still run;
/// TimeoutError, which counts the pending ones, if the deadline passes first.
DTORCH_API void WaitForAll(const std::vector<FuturePtr>& futures, Deadline deadline);

}  // namespace dtorch
