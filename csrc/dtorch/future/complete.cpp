#include "dtorch/future/complete.h"

#include "dtorch/base/host.h"

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

template <typename Complete>
void RunCallbacks(const FuturePtr& future, const Complete& complete) {
  std::optional<HostUnlocked> unlocked;
  if (CountCallbacks(*future) > (HasWaiterList(future) ? 1 : 0)) unlocked.emplace();
  complete();
}

}  // namespace

void CompleteWithValue(const FuturePtr& future, c10::IValue value) {
  RunCallbacks(future, [&] { future->markCompleted(std::move(value)); });
}

void CompleteWithError(const FuturePtr& future, std::exception_ptr error) {
  RunCallbacks(future, [&] { future->setError(std::move(error)); });
}

FuturePtr MakeCompletedFuture(c10::TypePtr type, c10::IValue value) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(std::move(type));
  future->markCompleted(std::move(value));  // nobody can have hung a callback on it
  return future;
}

}  // namespace dtorch
