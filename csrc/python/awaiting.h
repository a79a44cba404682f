#pragma once

#include "dtorch/future/waiter_list.h"

#include "python/gil.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>
#include <vector>

// `await` for every torch future: no polling, no thread. The coroutine sleeps on a future of its
// own event loop, which the completion of the torch future sets.
namespace dtorch::python {

/// Carries completions, from any thread, to the coroutines of one event loop that await them.
///
/// The first completion calls `loop.call_soon_threadsafe(queue.drain)`; those that follow until the
/// loop has got round to it only join the list, without the interpreter lock: ten thousand
/// completions wake the loop once. Thread-safe.
class AwaitQueue final : public Waker, public std::enable_shared_from_this<AwaitQueue> {
 public:
  /// A weak reference to the loop: the table that maps loops to queues must not keep loops alive.
  explicit AwaitQueue(pybind11::object loop_ref) : loop_ref_(loop_ref.ptr()) {}

  /// Any thread. True if the loop must be woken.
  bool Push(std::shared_ptr<SharedRef> awaited);

  /// In the loop's thread: sets the asyncio futures that were pushed.
  void Drain();

  void Wake() override;

 private:
  const SharedRef loop_ref_;
  std::mutex mutex_;  // taken inside the lock of Waiter::Notify, takes none itself
  std::vector<std::shared_ptr<SharedRef>> ready_;
  bool scheduled_ = false;
};

/// One coroutine that awaits one future. Lives as long as the await, however that ends.
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

/// `__await__` of torch futures: an iterator that ends with the outcome.
PyObject* AwaitFuture(PyObject* future, PyObject* unused);

void BindAwaiting(pybind11::module_& m);

}  // namespace dtorch::python
