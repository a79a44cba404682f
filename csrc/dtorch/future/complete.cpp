#include "dtorch/future/complete.h"

#include "dtorch/base/host.h"

#include <utility>

namespace dtorch {

void CompleteWithValue(const FuturePtr& future, c10::IValue value) {
  HostUnlocked unlocked;
  future->markCompleted(std::move(value));
}

void CompleteWithError(const FuturePtr& future, std::exception_ptr error) {
  HostUnlocked unlocked;
  future->setError(std::move(error));
}

FuturePtr MakeCompletedFuture(c10::TypePtr type, c10::IValue value) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(std::move(type));
  future->markCompleted(std::move(value));  // nobody can have hung a callback on it
  return future;
}

}  // namespace dtorch
