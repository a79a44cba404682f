#include "dtorch/future/sleeper.h"

#include "dtorch/base/host.h"
#include "dtorch/sys/futex.h"

#include <unistd.h>

namespace dtorch {
namespace {

// A signal that arrives in the instant before the futex call does not interrupt it, so the thread
// that handles signals looks again after this time. Two looks a second cost nothing measurable.
constexpr int64_t kLookForSignalsMs = 500;

bool HandlesSignals() { return GetHost().check_interrupt != nullptr && getpid() == gettid(); }

}  // namespace

bool Sleeper::Sleep(Deadline deadline) {
  const bool handles_signals = HandlesSignals();
  for (;;) {
    // Acquire: what the waker wrote before Wake() is visible behind it.
    if (woken_.exchange(0, std::memory_order_acquire) != 0) return true;
    if (deadline.HasPassed()) return false;
    const Deadline nap = handles_signals ? deadline.AtMostMs(kLookForSignalsMs) : deadline;
    const FutexResult result = FutexWait(woken_, 0, nap);
    if (result != FutexResult::kWoken && handles_signals) GetHost().check_interrupt();
  }
}

void Sleeper::Wake() {
  woken_.store(1, std::memory_order_release);
  FutexWake(woken_, 1);
}

}  // namespace dtorch
