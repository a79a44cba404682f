#pragma once

#include "dtorch/future/waiter_list.h"
#include "dtorch/sys/fd.h"

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
/// The loop reads a descriptor of the queue (`loop.add_reader(queue.fileno(), queue.drain)`). The
/// first completion makes it readable; those that follow until the loop has got round to it only
/// join the list: ten thousand completions wake the loop once. No completion needs the interpreter
/// lock, which `loop.call_soon_threadsafe` would.
///
/// Held by the loop, through its reader; holds nothing of the loop. Thread-safe.
class AwaitQueue {
 public:
  AwaitQueue();

  int fileno() const { return wake_up_.get(); }

  /// Any thread. Never blocks, and runs nothing: may be called under a lock.
  void Push(std::shared_ptr<SharedRef> awaited);

  /// In the loop's thread: sets the asyncio futures that were pushed.
  void Drain();

 private:
  const Fd wake_up_;  // an eventfd
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
    queue_->Push(awaited_);
    return nullptr;
  }

  const std::shared_ptr<AwaitQueue> queue_;
  const std::shared_ptr<SharedRef> awaited_;
};

/// `__await__` of torch futures: an iterator that ends with the outcome.
PyObject* AwaitFuture(PyObject* future, PyObject* unused);

void BindAwaiting(pybind11::module_& m);

}  // namespace dtorch::python
