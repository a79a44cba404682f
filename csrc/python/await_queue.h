#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>
#include <vector>

#include "dtorch/future/waiter_list.h"
#include "python/gil.h"

namespace dtorch::python {

/// Carries completions, from any thread, to the coroutines of one event loop that await them.
///
/// The first completion calls `loop.call_soon_threadsafe(drain)`; those that follow until the loop
/// has got round to it only join the list, without the interpreter lock: ten thousand completions
/// wake the loop once. Thread-safe.
class AwaitQueue final : public Waker {
 public:
  /// `loop`: a weak reference, or the table that maps loops to queues would keep loops alive.
  /// `drain`: what the loop runs; it calls Take().
  AwaitQueue(pybind11::object loop_ref, pybind11::object drain)
      : loop_ref_(loop_ref.ptr()), drain_(drain.ptr()) {}

  /// Called without the lock of the list; true if the loop must be woken.
  bool Push(std::shared_ptr<SharedRef> awaited);

  /// The asyncio futures whose torch futures have completed since the last call.
  pybind11::list Take();

  void Wake() override;

 private:
  const SharedRef loop_ref_;
  const SharedRef drain_;
  std::mutex mutex_;  // taken inside a WaiterList's lock, takes none itself
  std::vector<std::shared_ptr<SharedRef>> ready_;
  bool scheduled_ = false;
};

/// One coroutine that awaits one future. Lives in the coroutine's frame; Unlink() it when the
/// await ends, for whatever reason.
class AwaitWaiter final : public Waiter {
 public:
  AwaitWaiter(std::shared_ptr<AwaitQueue> queue, pybind11::object awaited)
      : queue_(std::move(queue)), awaited_(std::make_shared<SharedRef>(awaited.ptr())) {}
  ~AwaitWaiter() override { Unlink(); }

 private:
  std::shared_ptr<Waker> Notify() noexcept override {
    return queue_->Push(awaited_) ? queue_ : nullptr;
  }

  const std::shared_ptr<AwaitQueue> queue_;
  const std::shared_ptr<SharedRef> awaited_;
};

}  // namespace dtorch::python
