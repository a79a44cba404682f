#include "dtorch/future/complete.h"

#include "dtorch/base/host.h"

#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

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

template <typename F>
void RunCallbacks(const FuturePtr& future, const F& complete) {
  // Somebody has set the future behind our back, through torch's own class: that stands.
  if (future->completed()) return;
  std::optional<HostUnlocked> unlocked;
  if (CountCallbacks(*future) > (HasWaiterList(future) ? 1 : 0)) unlocked.emplace();
  try {
    complete();
  } catch (const std::exception&) {
    // Completed in this very moment, or a C++ callback has thrown. We may be in a destructor.
  }
}

constexpr int kMaxDepth = 64;
constexpr int kAbsurdDepth = 256;  // Python ends a recursion at 1,000

struct Pending {
  int depth = 0;
  std::deque<std::pair<FuturePtr, std::function<void()>>> deferred;
};
thread_local Pending pending;

template <typename F>
void Complete(const FuturePtr& future, Nesting nesting, F complete) {
  if (pending.depth >= (nesting == Nesting::kDeferIfDeep ? kMaxDepth : kAbsurdDepth)) {
    pending.deferred.emplace_back(future, std::move(complete));
    return;
  }
  ++pending.depth;
  RunCallbacks(future, complete);
  if (pending.depth == 1) RunDeferredCompletions();
  --pending.depth;
}

}  // namespace

void RunDeferredCompletions() {
  while (!pending.deferred.empty()) {
    const auto [future, complete] = std::move(pending.deferred.front());
    pending.deferred.pop_front();
    RunCallbacks(future, complete);
  }
}

void CompleteWithValue(const FuturePtr& future, c10::IValue value, Nesting nesting) {
  Complete(future, nesting,
           [f = future.get(), value = std::move(value)] { f->markCompleted(value); });
}

void CompleteWithError(const FuturePtr& future, std::exception_ptr error, Nesting nesting) {
  Complete(future, nesting, [f = future.get(), error = std::move(error)] { f->setError(error); });
}

FuturePtr MakeCompletedFuture(c10::TypePtr type, c10::IValue value) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(std::move(type));
  future->markCompleted(std::move(value));  // nobody can have hung a callback on it
  return future;
}

}  // namespace dtorch
