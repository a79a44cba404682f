#include "dtorch/future/completion_queue.h"

#include "dtorch/base/host.h"
#include "dtorch/future/complete.h"
#include "dtorch/future/span.h"

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

CompletionQueue::~CompletionQueue() {
  nodes_.clear();
  for (FuturePtr& future : futures_) ReleaseFuture(std::move(future));
}

std::optional<size_t> CompletionQueue::TryPop() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ready_.empty()) return std::nullopt;
  const size_t index = ready_.front();
  ready_.pop_front();
  // Several completions count as one wake-up, and whoever waits for none that is left shall know.
  --remaining_;
  if (sleeping_ > 0 && (remaining_ == 0 || !ready_.empty())) sleeper_.Wake();
  return index;
}

size_t CompletionQueue::remaining() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return remaining_;
}

std::optional<size_t> CompletionQueue::Pop(Deadline deadline) {
  if (auto index = TryPop()) return index;
  PrepareToBlock();
  HostUnlocked unlocked;
  const Span span("dtorch::wait");
  struct Sleeping {
    explicit Sleeping(CompletionQueue& queue) : queue(queue) { Add(1); }
    ~Sleeping() { Add(-1); }
    void Add(int n) {
      std::lock_guard<std::mutex> lock(queue.mutex_);
      queue.sleeping_ += n;
      // A wake-up that came for all is passed on.
      if (n < 0 && queue.remaining_ == 0 && queue.sleeping_ > 0) queue.sleeper_.Wake();
    }
    CompletionQueue& queue;
  } sleeping(*this);
  for (;;) {
    if (auto index = TryPop()) return index;
    if (remaining() == 0 || !sleeper_.Sleep(deadline)) return TryPop();
  }
}

}  // namespace dtorch
