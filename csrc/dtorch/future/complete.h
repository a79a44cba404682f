#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/span.h"
#include "dtorch/future/waiter_list.h"

#include <ATen/core/ivalue.h>

#include <exception>
#include <functional>

// How everything of ours completes a future. Completing runs the callbacks of the future in this
// thread, so the host's lock is dropped meanwhile, unless there are none but the one that feeds the
// list of waiters: then the lock is kept, since every hand-over of it costs more than the rest. The
// caller holds no lock of ours.
namespace dtorch {

// A completion inside of a callback may be one of a long chain, which would exhaust the stack.
// Beyond some depth it waits until the stack has unwound, or until this thread is about to block,
// since that may be for it. The depth is small for a future that follows from another one's
// completion; what a user sets in a callback is set at once, but for absurd depths.
enum class Nesting { kAtOnce, kDeferIfDeep };

DTORCH_API void CompleteWithValue(const FuturePtr& future, c10::IValue value,
                                  Nesting nesting = Nesting::kAtOnce);
DTORCH_API void CompleteWithError(const FuturePtr& future, std::exception_ptr error,
                                  Nesting nesting = Nesting::kAtOnce);

/// Of the completion that this thread is in the middle of: what leads to those who waited for it.
Flow CompletingFlow();

/// Scope in which this thread has something to hand over to others before it blocks in one of our
/// waits. Called at each of them.
class BeforeBlocking {
 public:
  explicit BeforeBlocking(std::function<void()> hand_over);
  ~BeforeBlocking();
  BeforeBlocking(const BeforeBlocking&) = delete;
  BeforeBlocking& operator=(const BeforeBlocking&) = delete;

 private:
  friend void PrepareToBlock();
  const std::function<void()> hand_over_;
  BeforeBlocking* const outer_;
};

/// To be called before this thread blocks: runs what it has put off, and hands over what it has to.
DTORCH_API void PrepareToBlock();

/// Whether anybody waits for a pending future, or has hung a callback on it.
bool HasObservers(const FuturePtr& future);

/// Whether completing it would run callbacks of the user.
DTORCH_API bool RunsCallbacks(const FuturePtr& future);

/// Scope in which futures that follow from another one's completion, and have callbacks, wait for
/// its end: until then those without have been completed, whatever a callback may wait for.
class DeferCallbacks {
 public:
  DeferCallbacks();
  ~DeferCallbacks();
  DeferCallbacks(const DeferCallbacks&) = delete;
  DeferCallbacks& operator=(const DeferCallbacks&) = delete;
};

/// A future that is complete from the start.
DTORCH_API FuturePtr MakeCompletedFuture(c10::TypePtr type, c10::IValue value);

}  // namespace dtorch
