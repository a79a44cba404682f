#include "dtorch/future/sleeper.h"

#include "dtorch/base/fork.h"
#include "dtorch/base/host.h"
#include "dtorch/sys/futex.h"

#include <climits>
#include <unistd.h>

namespace dtorch {
namespace {

// A signal that arrives in the instant before the futex call does not interrupt it, so the thread
// that handles signals looks again after this time. Two looks a second cost nothing measurable.
constexpr int64_t kLookForSignalsMs = 500;

// Whether this is the thread that the process, or the fork that made it, began with.
bool IsMainThread() {
  thread_local uint32_t generation = ~uint32_t{0};
  thread_local bool is_main = false;
  if (generation != ForkGeneration()) {  // two system calls
    is_main = getpid() == gettid();
    generation = ForkGeneration();
  }
  return is_main;
}

bool HandlesSignals() { return GetHost().check_interrupt != nullptr && IsMainThread(); }

}  // namespace

Alarm::~Alarm() = default;

bool Sleeper::Sleep(Deadline deadline) {
  if (alarm_ && !deadline.HasPassed()) {
    alarm_->LookOut();
    if (woken_.exchange(0, std::memory_order_acquire) != 0) return true;
  }
  const bool handles_signals = HandlesSignals();
  struct Entered {
    explicit Entered(Alarm* alarm) : alarm(alarm) { Enter(); }
    ~Entered() { Leave(); }
    void Enter() {
      if (alarm) alarm->Enter();
    }
    void Leave() {
      if (alarm) alarm->Leave();
    }
    Alarm* const alarm;
  } entered(alarm_);
  for (;;) {
    // Read before anything is looked at: what happens later changes it.
    const uint32_t rung = alarm_ ? alarm_->counter().load() : 0;
    if (alarm_) alarm_->Look();
    // Acquire: what the waker wrote before Wake() is visible behind it.
    if (woken_.exchange(0, std::memory_order_acquire) != 0) return true;
    if (deadline.HasPassed()) return false;
    const Deadline nap = handles_signals ? deadline.AtMostMs(kLookForSignalsMs) : deadline;
    const FutexResult result = alarm_ ? FutexWait(alarm_->counter(), rung, nap, FutexScope::kShared)
                                      : FutexWait(woken_, 0, nap);
    if (result == FutexResult::kWoken || !handles_signals) continue;
    entered.Leave();  // a handler may take any time
    GetHost().check_interrupt();
    entered.Enter();
  }
}

void Sleeper::Wake() {
  std::atomic<uint32_t>* const counter = alarm_ ? &alarm_->counter() : nullptr;
  const bool awake = alarm_ && pthread_equal(thread_, pthread_self());  // it has looked, and found
  woken_.store(1, std::memory_order_release);
  if (!counter) {
    FutexWake(woken_, 1);
    return;
  }
  if (awake) return;
  counter->fetch_add(1);
  FutexWake(*counter, INT_MAX, FutexScope::kShared);  // others may sleep on it as well
}

}  // namespace dtorch
