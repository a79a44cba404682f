#include "dtorch/future/completion_queue.h"

#include "dtorch/base/host.h"
#include "dtorch/future/complete.h"

#include <utility>

namespace dtorch {

std::shared_ptr<Waker> CompletionQueue::Node::Notify() noexcept {
  std::lock_guard<std::mutex> lock(queue->mutex_);
  queue->ready_.push_back(index);
  queue->sleeper_.Wake();
  return nullptr;
}

CompletionQueue::CompletionQueue(std::vector<FuturePtr> futures, bool of_thread)
    : futures_(std::move(futures)), remaining_(futures_.size()) {
  for (size_t i = 0; i < futures_.size(); ++i) {
    auto node = std::make_unique<Node>(of_thread);
    node->queue = this;
    node->index = i;
    if (!futures_[i]->completed() && node->LinkTo(futures_[i])) {
      nodes_.push_back(std::move(node));
    } else {
      std::lock_guard<std::mutex> lock(mutex_);
      ready_.push_back(i);
    }
  }
}

std::optional<size_t> CompletionQueue::TryPop() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ready_.empty()) return std::nullopt;
  const size_t index = ready_.front();
  ready_.pop_front();
  --remaining_;
  return index;
}

std::optional<size_t> CompletionQueue::Pop(Deadline deadline) {
  if (remaining_ == 0) return std::nullopt;
  if (auto index = TryPop()) return index;
  RunDeferredCompletions();
  HostUnlocked unlocked;
  for (;;) {
    const bool woken = sleeper_.Sleep(deadline);
    if (auto index = TryPop()) return index;
    if (!woken) return std::nullopt;
  }
}

}  // namespace dtorch
