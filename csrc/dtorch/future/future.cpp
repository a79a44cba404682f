#include "dtorch/future/future.h"

#include "dtorch/base/error.h"
#include "dtorch/future/collect.h"
#include "dtorch/future/outcome.h"
#include "dtorch/future/wait.h"

#include <ATen/core/jit_type.h>

namespace dtorch {

void FutureHandle::Wait(int64_t timeout_ms) const {
  if (!WaitUntil(future_, DeadlineFromMs(timeout_ms))) throw TimeoutError(TimeoutMessage(1, 1));
}

void FutureHandle::Wait() const { WaitUntil(future_, Deadline::Never()); }

c10::IValue FutureHandle::Consume() {
  if (consumed_) throw FutureAlreadyRetrievedError(kAlreadyRetrieved);
  WaitUntil(future_, Deadline::Never());
  consumed_ = true;
  return ValueOf(future_);
}

VoidFutureCollect::VoidFutureCollect(const std::vector<VoidFuture>& futures)
    : VoidFuture([&] {
        std::vector<FuturePtr> members;
        for (const VoidFuture& future : futures) members.push_back(future.future());
        return CollectAll(members, c10::NoneType::get());
      }()) {}

}  // namespace dtorch
