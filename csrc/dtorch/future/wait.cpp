#include "dtorch/future/wait.h"

#include "dtorch/base/error.h"
#include "dtorch/base/host.h"
#include "dtorch/future/complete.h"
#include "dtorch/future/completion_queue.h"
#include "dtorch/future/outcome.h"
#include "dtorch/future/sleeper.h"
#include "dtorch/future/span.h"

#include <c10/util/Exception.h>

#include <optional>
#include <string>

namespace dtorch {
namespace {

// A blocked thread.
class ThreadWaiter final : public Waiter {
 public:
  explicit ThreadWaiter(Alarm* alarm) : Waiter(/*of_thread=*/true), sleeper(alarm) {}

  // The thread may return, and with it this object, as soon as the sleeper is woken.
  std::shared_ptr<Waker> Notify() noexcept override {
    completed_by = CompletingFlow();
    sleeper.Wake();
    return nullptr;
  }
  Flow completed_by;
  Sleeper sleeper;
};

}  // namespace

std::string TimeoutMessage(size_t pending, size_t total) {
  if (total == 1)
    return "the future did not complete within the time limit; it can be waited for again";
  return std::to_string(pending) + " of " + std::to_string(total) +
         " futures did not complete within the time limit; they can be waited for again";
}

Deadline DeadlineFromMs(int64_t timeout_ms) {
  TORCH_CHECK_VALUE(timeout_ms >= 0, "timeout_ms: expected a number of milliseconds >= 0, got ",
                    timeout_ms, "; 0 only looks, None waits without a limit");
  return Deadline::AfterMs(timeout_ms);
}

bool WaitUntil(const FuturePtr& future, Deadline deadline) {
  if (future->completed()) return true;
  PrepareToBlock();
  if (future->completed()) return true;
  if (deadline.HasPassed()) return IsComplete(future);
  HostUnlocked unlocked;
  const Span span("dtorch::wait");
  const std::shared_ptr<Source> source = SourceOf(future);
  const std::unique_ptr<Alarm> alarm = source ? source->Listen() : nullptr;
  ThreadWaiter waiter(alarm.get());
  if (!waiter.LinkTo(future)) return true;
  try {
    if (waiter.sleeper.Sleep(deadline)) {
      const Span woken("dtorch::wake", waiter.completed_by);
      return true;
    }
  } catch (...) {
    waiter.Unlink();
    throw;
  }
  waiter.Unlink();
  return future->completed();
}

c10::IValue WaitForValue(const FuturePtr& future, Deadline deadline) {
  if (!WaitUntil(future, deadline)) throw TimeoutError(TimeoutMessage(1, 1));
  return ValueOf(future);
}

void WaitForAll(const std::vector<FuturePtr>& futures, Deadline deadline) {
  CompletionQueue queue(futures, /*of_thread=*/true);
  for (size_t pending = futures.size(); pending > 0; --pending) {
    const std::optional<size_t> index = queue.Pop(deadline);
    if (!index) throw TimeoutError(TimeoutMessage(pending, futures.size()));
    if (auto error = ErrorOf(futures[*index])) std::rethrow_exception(error);
  }
}

}  // namespace dtorch
