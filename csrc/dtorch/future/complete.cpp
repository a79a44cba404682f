#include "dtorch/future/complete.h"

#include "dtorch/base/host.h"
#include "dtorch/base/log.h"
#include "dtorch/future/outcome.h"

#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace dtorch {

namespace {

// ivalue::Future does not tell how many callbacks it has. An explicit instantiation may name
// private members, and fails to compile should torch rename them.
template <auto kCallbacks, auto kMutex>
struct Peek {
  friend size_t CountCallbacks(c10::ivalue::Future& future) {
    std::lock_guard<std::mutex> lock(future.*kMutex);
    return (future.*kCallbacks).size();
  }
};
size_t CountCallbacks(c10::ivalue::Future& future);
template struct Peek<&c10::ivalue::Future::callbacks_, &c10::ivalue::Future::mutex_>;

// Others than the one that feeds the list of waiters.
bool HasCallbacks(const FuturePtr& future) {
  return CountCallbacks(*future) > (HasWaiterList(future) ? 1 : 0);
}

constexpr int kMaxDepth = 64;
constexpr int kAbsurdDepth = 256;  // Python ends a recursion at 1,000

struct Pending {
  int depth = 0;      // of completions inside of each other
  int deferring = 0;  // scopes of DeferCallbacks
  Flow flow;
  std::deque<std::pair<FuturePtr, std::function<void()>>> deferred;
};
thread_local Pending pending;

template <typename F>
void CompleteNow(const FuturePtr& future, const F& complete) {
  // Somebody has set the future behind our back, through torch's own class: that stands.
  if (future->completed()) return;
  const Span span("dtorch::complete");
  Log(LogLevel::kDebug, "future", future.get(), " is completed");
  struct Depth {
    explicit Depth(Flow flow) : outer(std::exchange(pending.flow, flow)) { ++pending.depth; }
    ~Depth() {
      --pending.depth;
      pending.flow = outer;
    }
    const Flow outer;
  } depth(span ? Span("dtorch::ready").flow() : Flow());
  std::optional<HostUnlocked> unlocked;
  if (HasCallbacks(future)) unlocked.emplace();
  try {
    complete();
  } catch (const std::exception&) {
    // Completed in this very moment, or a C++ callback has thrown, or a device has refused the
    // event that torch records: then it is complete, and nobody was told. We may be in a
    // destructor.
    NotifyWaiters(future);
  }
}

// Completions that this thread has put off, since they were nested too deeply.
void RunDeferredCompletions() {
  while (!pending.deferred.empty()) {
    const auto [future, complete] = std::move(pending.deferred.front());
    pending.deferred.pop_front();
    CompleteNow(future, complete);
  }
}

thread_local BeforeBlocking* before_blocking = nullptr;

template <typename F>
void Complete(const FuturePtr& future, Nesting nesting, F complete) {
  const bool follows = nesting == Nesting::kDeferIfDeep;
  if (pending.depth >= (follows ? kMaxDepth : kAbsurdDepth) ||
      (follows && pending.deferring > 0 && HasCallbacks(future))) {
    pending.deferred.emplace_back(future, std::move(complete));
    return;
  }
  CompleteNow(future, complete);
  if (pending.depth == 0) RunDeferredCompletions();
}

}  // namespace

Flow CompletingFlow() { return pending.flow; }

void PrepareToBlock() {
  RunDeferredCompletions();
  for (BeforeBlocking* each = before_blocking; each; each = each->outer_) each->hand_over_();
}

BeforeBlocking::BeforeBlocking(std::function<void()> hand_over)
    : hand_over_(std::move(hand_over)), outer_(before_blocking) {
  before_blocking = this;
}

BeforeBlocking::~BeforeBlocking() { before_blocking = outer_; }

bool RunsCallbacks(const FuturePtr& future) {
  return HasCallbacks(future) || HasWaitersThatRunCallbacks(future);
}

bool HasObservers(const FuturePtr& future) { return HasWaiters(future) || HasCallbacks(future); }

DeferCallbacks::DeferCallbacks() { ++pending.deferring; }

DeferCallbacks::~DeferCallbacks() {
  // At some depth a completion further up does it, when the stack has unwound.
  if (--pending.deferring == 0 && pending.depth < kMaxDepth) RunDeferredCompletions();
}

namespace {

// Torch refuses a value of a device that the future was not made with, one that was not in use
// then; it asks the storages, which may be said to be none. Nor does anybody ask without devices,
// and to find the storages takes longer than all else. See RecordUse() for what torch then leaves
// to us.
void MarkCompleted(c10::ivalue::Future& future, c10::IValue value) {
  if (future.devices().empty() || (value.isTensor() && !KnowsDeviceOf(future, value.toTensor()))) {
    future.markCompleted(std::move(value),
                         std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>());
  } else {
    future.markCompleted(std::move(value));
  }
}

}  // namespace

void CompleteWithValue(const FuturePtr& future, c10::IValue value, Nesting nesting) {
  Complete(future, nesting,
           [f = future.get(), value = std::move(value)] { MarkCompleted(*f, value); });
}

void CompleteWithError(const FuturePtr& future, std::exception_ptr error, Nesting nesting) {
  Complete(future, nesting, [f = future.get(), error = std::move(error)] { f->setError(error); });
}

FuturePtr MakeCompletedFuture(c10::TypePtr type, c10::IValue value) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(std::move(type));
  MarkCompleted(*future, std::move(value));  // nobody can have hung a callback on it
  return future;
}

}  // namespace dtorch
