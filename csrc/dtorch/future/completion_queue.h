#pragma once

#include "dtorch/base/api.h"
#include "dtorch/base/deadline.h"
#include "dtorch/future/sleeper.h"
#include "dtorch/future/waiter_list.h"

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace dtorch {

/// Tells which futures of a group have completed, in the order in which they do. Every index is
/// told once; futures that are complete at the start come first, in the order given.
///
/// Thread-safe. Cost of a completion: constant. Leaves nothing on the futures.
class DTORCH_API CompletionQueue {
 public:
  /// `of_thread`: it lies on the stack of a thread that blocks, see Waiter.
  explicit CompletionQueue(std::vector<FuturePtr> futures, bool of_thread = false);
  ~CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  /// The next index, blocking until the deadline; nullopt if it passes, or if all were told.
  /// Interruptible, as WaitUntil() is.
  std::optional<size_t> Pop(Deadline deadline);

  size_t size() const { return futures_.size(); }
  /// How many indices are still to be told.
  size_t remaining() const;

 private:
  struct Node final : Waiter {
    explicit Node(bool of_thread) : Waiter(of_thread) {}
    ~Node() override { Unlink(); }
    std::shared_ptr<Waker> Notify() noexcept override;
    CompletionQueue* queue = nullptr;
    size_t index = 0;
  };

  std::optional<size_t> TryPop();

  std::vector<FuturePtr> futures_;  // kept alive, so that their lists are
  Sleeper sleeper_;
  mutable std::mutex mutex_;  // taken inside the lock of Waiter::Notify, takes none itself
  size_t remaining_;
  int sleeping_ = 0;  // threads
  std::deque<size_t> ready_;
  std::vector<std::unique_ptr<Node>> nodes_;  // last: they write to the members above until gone
};

}  // namespace dtorch
