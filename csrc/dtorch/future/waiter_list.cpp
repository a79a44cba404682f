#include "dtorch/future/waiter_list.h"

#include <array>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dtorch/base/error.h"
#include "dtorch/base/fork.h"

namespace dtorch {
namespace {

// Where the list of a pending future is found. Sharded, so that unrelated futures rarely meet.
struct Shard {
  std::mutex mutex;
  std::unordered_map<const c10::ivalue::Future*, std::weak_ptr<WaiterList>> lists;
};

Shard& ShardOf(const c10::ivalue::Future* future) {
  static constexpr size_t kShards = 16;
  // Leaked on purpose: futures may complete while static destructors run.
  static auto* shards = [] {
    auto* made = new std::array<Shard, kShards>;
    for (Shard& shard : *made) HoldAcrossFork(shard.mutex);
    return made;
  }();
  return (*shards)[(reinterpret_cast<uintptr_t>(future) >> 6) % kShards];
}

}  // namespace

Waker::~Waker() = default;

Waiter::~Waiter() = default;

void Waiter::Unlink() {
  if (auto list = list_.lock()) list->Remove(*this);
}

WaiterList::WaiterList(const c10::ivalue::Future* future, bool promised)
    : key_(future), fork_generation_(ForkGeneration()), promised_(promised) {}

WaiterList::~WaiterList() {
  // The future was dropped without having completed. Nobody else can see this list any more.
  while (Waiter* w = head_) {
    head_ = w->next_;
    w->linked_ = false;
    std::shared_ptr<void> keep = std::move(w->keep_alive_);  // may end *w here
  }
  Shard& shard = ShardOf(key_);
  std::lock_guard<std::mutex> lock(shard.mutex);
  auto it = shard.lists.find(key_);
  // Another future may live at the same address by now, with a list of its own.
  if (it != shard.lists.end() && it->second.expired()) shard.lists.erase(it);
}

std::shared_ptr<WaiterList> WaiterList::FindOrMake(const FuturePtr& future, bool promised) {
  std::shared_ptr<WaiterList> list;
  {
    Shard& shard = ShardOf(future.get());
    std::lock_guard<std::mutex> lock(shard.mutex);
    std::weak_ptr<WaiterList>& entry = shard.lists[future.get()];
    list = entry.lock();
    if (list && list->fork_generation_ != ForkGeneration()) {
      if (list->promised_) {
        throw DTorchError(
            "expected a future of this process, got one whose promise was made before the process "
            "forked: only the parent process can complete it. Make the promise in the process "
            "that waits for it.");
      }
      list = nullptr;  // its lock may be held by a thread that we do not have
    }
    if (list) return list;
    list = std::make_shared<WaiterList>(future.get(), promised);
    entry = list;
  }
  // Outside of the lock: runs at once if the future has completed meanwhile.
  future->addCallback([list](c10::ivalue::Future&) { list->Complete(); }, /*uses_future=*/false);
  return list;
}

std::shared_ptr<WaiterList> WaiterList::Of(const FuturePtr& future) {
  return FindOrMake(future, /*promised=*/false);
}

void WaiterList::Prepare(const FuturePtr& promised) { FindOrMake(promised, /*promised=*/true); }

bool WaiterList::Add(Waiter& waiter, std::shared_ptr<void> keep_alive) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (complete_) return false;
  waiter.list_ = weak_from_this();
  waiter.keep_alive_ = std::move(keep_alive);
  waiter.prev_ = tail_;
  waiter.next_ = nullptr;
  waiter.linked_ = true;
  (tail_ ? tail_->next_ : head_) = &waiter;
  tail_ = &waiter;
  return true;
}

void WaiterList::Remove(Waiter& waiter) {
  std::shared_ptr<void> keep;  // dropped behind the lock: it may be the end of the waiter
  std::lock_guard<std::mutex> lock(mutex_);
  if (!waiter.linked_) return;
  waiter.linked_ = false;
  keep = std::move(waiter.keep_alive_);
  (waiter.prev_ ? waiter.prev_->next_ : head_) = waiter.next_;
  (waiter.next_ ? waiter.next_->prev_ : tail_) = waiter.prev_;
}

void WaiterList::Complete() {
  std::vector<std::shared_ptr<Waker>> wakers;
  std::vector<std::shared_ptr<void>> keep;  // dropped behind the lock
  {
    std::lock_guard<std::mutex> lock(mutex_);
    complete_ = true;
    while (Waiter* w = head_) {
      head_ = w->next_;
      w->linked_ = false;
      if (w->keep_alive_) keep.push_back(std::move(w->keep_alive_));
      if (auto waker = w->Notify()) wakers.push_back(std::move(waker));  // may be the end of *w
    }
    tail_ = nullptr;
  }
  for (auto& waker : wakers) waker->Wake();
}

}  // namespace dtorch
