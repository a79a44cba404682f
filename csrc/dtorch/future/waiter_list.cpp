#include "dtorch/future/waiter_list.h"

#include "dtorch/base/error.h"
#include "dtorch/base/fork.h"
#include "dtorch/future/complete.h"

#include <array>
#include <utility>
#include <vector>

namespace dtorch {
namespace {

using Key = const c10::ivalue::Future*;

// Future -> entry: a hash table whose chains run through the entries, since nodes of its own would
// cost more than all else that is kept for a pending future.
class Table {
 public:
  class Entry {
   public:
    explicit Entry(Key key) : key_(key) {}
    Key key() const { return key_; }
    bool in_table() const { return in_table_; }

   private:
    friend class Table;
    Entry* next_ = nullptr;
    const Key key_;
    bool in_table_ = false;
  };

  Entry* Find(Key key) const {
    Entry* entry = buckets_[BucketOf(key)];
    while (entry && entry->key_ != key) entry = entry->next_;
    return entry;
  }

  // In front of an older one with the same key.
  void Insert(Entry& entry) {
    if (size_ >= buckets_.size()) Grow();
    Link(entry);
    entry.in_table_ = true;
    ++size_;
  }

  void Erase(Entry& entry) {
    if (!std::exchange(entry.in_table_, false)) return;
    Entry** link = &buckets_[BucketOf(entry.key_)];
    while (*link != &entry) link = &(*link)->next_;
    *link = entry.next_;
    --size_;
  }

  template <typename F>
  void ForEach(const F& function) const {
    for (Entry* first : buckets_) {
      for (Entry* entry = first; entry; entry = entry->next_) function(*entry);
    }
  }

 private:
  size_t BucketOf(Key key) const {
    return reinterpret_cast<uintptr_t>(key) * 0x9E3779B97F4A7C15u >> (64 - bits_);
  }

  void Link(Entry& entry) {
    Entry*& first = buckets_[BucketOf(entry.key_)];
    entry.next_ = std::exchange(first, &entry);
  }

  void Grow() {
    const std::vector<Entry*> old =
        std::exchange(buckets_, std::vector<Entry*>(size_t{2} << bits_));
    ++bits_;
    for (Entry* entry : old) {
      while (entry) Link(*std::exchange(entry, entry->next_));
    }
  }

  int bits_ = 4;
  std::vector<Entry*> buckets_ = std::vector<Entry*>(size_t{1} << bits_);
  size_t size_ = 0;
};

// A table, and the lock of every list in it. One lock for many lists keeps a list small; there are
// enough shards for unrelated futures to meet rarely.
struct Shard {
  std::mutex mutex;
  Table lists;
};

constexpr size_t kShards = 64;
void ForgetThreadsInChild();

std::array<Shard, kShards>& Shards() {
  // Leaked on purpose: futures may complete while static destructors run.
  static auto* shards = [] {
    auto* made = new std::array<Shard, kShards>;
    for (Shard& shard : *made) HoldAcrossFork(shard.mutex);
    OnFork({.child = ForgetThreadsInChild});
    return made;
  }();
  return *shards;
}

Shard& ShardOf(Key future) {
  const auto address = reinterpret_cast<uintptr_t>(future);
  return Shards()[(address >> 6 ^ address >> 12) % kShards];
}

}  // namespace

// The waiters of one pending future, in the order of arrival.
//
// Owned by the callback that is hung on the future: it goes when that has completed or was
// dropped. In the table until then. Everything mutable is guarded by the shard's lock.
class WaiterList final : public c10::intrusive_ptr_target, public Table::Entry {
 public:
  WaiterList(Key key, Origin origin)
      : Entry(key), origin(origin), fork_generation_(ForkGeneration()) {}

  ~WaiterList() override {
    if (!in_table()) return;
    // The future was dropped without having completed.
    std::vector<std::shared_ptr<void>> keep;  // dropped behind the lock, as the source is
    Shard& shard = ShardOf(key());
    std::lock_guard<std::mutex> lock(shard.mutex);
    shard.lists.Erase(*this);
    while (Waiter* w = PopFront()) {
      if (w->keep_alive_) keep.push_back(std::move(w->keep_alive_));
    }
  }

  static bool Link(const FuturePtr& future, Waiter* waiter, std::shared_ptr<void> keep_alive,
                   Origin origin) {
    c10::intrusive_ptr<WaiterList> made;
    {
      Shard& shard = ShardOf(future.get());
      std::lock_guard<std::mutex> lock(shard.mutex);
      if (future->completed()) return false;
      auto* list = static_cast<WaiterList*>(shard.lists.Find(future.get()));
      if (!list || list->IsInherited()) {
        // What another generation made is left alone: its callback may never come.
        made = c10::make_intrusive<WaiterList>(future.get(), origin);
        list = made.get();
        shard.lists.Insert(*list);
      }
      if (waiter) list->PushBack(*waiter, shard, std::move(keep_alive));
    }
    // Outside of the lock: it runs at once if the future has completed meanwhile.
    if (made) {
      future->addCallback([made](c10::ivalue::Future&) { made->Complete(); },
                          /*uses_future=*/false);
    }
    return true;
  }

  // Notifies all; more than once does nothing more.
  void Complete() {
    std::vector<std::shared_ptr<Waker>> wakers;
    std::vector<std::shared_ptr<void>> keep;  // dropped behind the lock
    std::shared_ptr<Source> spent;            // the same
    {
      Shard& shard = ShardOf(key());
      std::lock_guard<std::mutex> lock(shard.mutex);
      if (in_table()) shard.lists.Erase(*this);
      spent = std::move(source);
      while (Waiter* w = PopFront()) {
        if (w->keep_alive_) keep.push_back(std::move(w->keep_alive_));
        if (auto waker = w->Notify()) wakers.push_back(std::move(waker));  // may be the end of *w
      }
    }
    if (wakers.empty()) return;
    DeferCallbacks deferred;  // of one group they may block: all other groups come first
    for (auto& waker : wakers) waker->Wake();
  }

  void Remove(Waiter& waiter) {
    waiter.prev_->next_ = waiter.next_;
    waiter.next_->prev_ = waiter.prev_;
    if (last_ == &waiter) last_ = waiter.prev_ == &waiter ? nullptr : waiter.prev_;
    waiter.list_ = nullptr;
  }

  static WaiterList* Find(const Shard& shard, Key future) {
    return static_cast<WaiterList*>(shard.lists.Find(future));
  }

  bool empty() const { return last_ == nullptr; }
  Origin origin = Origin::kAnything;
  std::optional<c10::Device> wanted_device;
  std::shared_ptr<Source> source;

  bool RunsCallbacks() const {
    Waiter* const last = last_;
    for (Waiter* w = last ? last->next_ : nullptr; w; w = w == last ? nullptr : w->next_) {
      if (w->RunsCallbacks()) return true;
    }
    return false;
  }

  void ForgetThreads() {
    Waiter* const last = last_;
    for (Waiter* w = last ? last->next_ : nullptr; w;) {
      Waiter* const next = w == last ? nullptr : w->next_;
      if (w->of_thread_) Remove(*w);
      w = next;
    }
  }

 private:
  bool IsInherited() const {
    if (fork_generation_ == ForkGeneration()) return false;
    if (origin == Origin::kAnything) return true;
    throw DTorchError(
        "expected a future of this process, got one whose promise was made before the process "
        "forked: only the parent process can complete it. Make the promise in the process that "
        "waits for it.");
  }

  void PushBack(Waiter& waiter, Shard& shard, std::shared_ptr<void> keep_alive) {
    waiter.lock_ = &shard.mutex;
    waiter.list_ = this;
    waiter.keep_alive_ = std::move(keep_alive);
    Waiter* first = last_ ? last_->next_ : &waiter;
    waiter.prev_ = last_ ? last_ : &waiter;
    waiter.next_ = first;
    waiter.prev_->next_ = &waiter;
    first->prev_ = &waiter;
    last_ = &waiter;
  }

  Waiter* PopFront() {
    Waiter* waiter = last_ ? last_->next_ : nullptr;
    if (waiter) Remove(*waiter);
    return waiter;
  }

  const uint32_t fork_generation_;
  Waiter* last_ = nullptr;  // of a ring
};

namespace {

// The stacks of the parent's threads are still as they were; soon they are other threads'.
void ForgetThreadsInChild() {
  for (Shard& shard : Shards()) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    shard.lists.ForEach(
        [](Table::Entry& entry) { static_cast<WaiterList&>(entry).ForgetThreads(); });
  }
}

}  // namespace

Waker::~Waker() = default;
Source::~Source() = default;

Waiter::~Waiter() = default;

bool Waiter::LinkTo(const FuturePtr& future, std::shared_ptr<void> keep_alive) {
  return WaiterList::Link(future, this, std::move(keep_alive), Origin::kAnything);
}

void Waiter::Unlink() {
  if (!lock_) return;              // never linked
  std::shared_ptr<void> keep;      // dropped behind the lock: it may be the end of this waiter
  std::shared_ptr<Source> source;  // may want to know that nobody waits any more
  {
    std::lock_guard<std::mutex> lock(*lock_);
    if (!list_) return;
    keep = std::move(keep_alive_);
    WaiterList* const list = list_;
    list->Remove(*this);
    if (list->empty()) source = list->source;
  }
  if (source) source->OnRelease();
}

void EnsureWaiterList(const FuturePtr& future) {
  WaiterList::Link(future, nullptr, nullptr, Origin::kAnything);
}

void PrepareForWaiters(const FuturePtr& future, Origin origin) {
  WaiterList::Link(future, nullptr, nullptr, origin);
}

namespace {

// What `function` gives for the list of `future`, under its lock; `otherwise` if there is none.
template <typename F, typename T>
T WithList(Key future, const F& function, T otherwise) {
  Shard& shard = ShardOf(future);
  std::lock_guard<std::mutex> lock(shard.mutex);
  WaiterList* list = WaiterList::Find(shard, future);
  return list ? function(*list) : std::move(otherwise);
}

}  // namespace

void NotifyWaiters(const FuturePtr& future) {
  if (!future->completed()) return;
  const auto list = WithList(
      future.get(),
      [](WaiterList& found) { return c10::intrusive_ptr<WaiterList>::reclaim_copy(&found); },
      c10::intrusive_ptr<WaiterList>());
  if (list) list->Complete();
}

bool HasWaiterList(const FuturePtr& future) {
  return WithList(future.get(), [](WaiterList&) { return true; }, false);
}

bool HasWaiters(const FuturePtr& future) {
  return WithList(future.get(), [](WaiterList& list) { return !list.empty(); }, false);
}

bool HasWaitersThatRunCallbacks(const FuturePtr& future) {
  return WithList(future.get(), [](WaiterList& list) { return list.RunsCallbacks(); }, false);
}

Origin OriginOf(const FuturePtr& future) {
  return WithList(future.get(), [](WaiterList& list) { return list.origin; }, Origin::kAnything);
}

void SetOrigin(const FuturePtr& future, Origin origin) {
  WithList(future.get(), [&](WaiterList& list) { return (list.origin = origin); }, origin);
}

void SetWantedDevice(const FuturePtr& future, c10::Device device) {
  WithList(
      future.get(), [&](WaiterList& list) { return (list.wanted_device = device).has_value(); },
      false);
}

std::optional<c10::Device> WantedDevice(const FuturePtr& future) {
  return WithList(
      future.get(), [](WaiterList& list) { return list.wanted_device; },
      std::optional<c10::Device>());
}

std::shared_ptr<Source> SetSource(const FuturePtr& future, std::shared_ptr<Source> source) {
  EnsureWaiterList(future);
  return WithList(
      future.get(),
      [&](WaiterList& list) {
        if (!list.source) list.source = std::move(source);
        return list.source;
      },
      std::shared_ptr<Source>());
}

std::shared_ptr<Source> SourceOf(const FuturePtr& future) {
  return WithList(
      future.get(), [](WaiterList& list) { return list.source; }, std::shared_ptr<Source>());
}

bool IsComplete(const FuturePtr& future) {
  if (future->completed()) return true;
  const std::shared_ptr<Source> source = SourceOf(future);
  if (!source) return false;
  source->Poll();
  return future->completed();
}

namespace {
DropFunction drop_function = nullptr;
}

void SetDropFunction(DropFunction drop) { drop_function = drop; }

void DropValue(c10::IValue value) {
  if (drop_function && !value.isNone()) drop_function(std::move(value));
}

void ReleaseFuture(FuturePtr future) {
  if (!future) return;
  if (future->completed()) {
    if (drop_function && future.use_count() == 1) drop_function(std::move(future));
    return;
  }
  const std::shared_ptr<Source> source = SourceOf(future);
  future.reset();  // first, or of two holders that go at once neither would be the last
  if (source) source->OnRelease();
}

std::vector<FuturePtr> FindPromisesWithoutSource() {
  std::vector<FuturePtr> promises;
  for (Shard& shard : Shards()) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    shard.lists.ForEach([&](Table::Entry& entry) {
      auto& list = static_cast<WaiterList&>(entry);
      if (list.origin != Origin::kPromise || list.source) return;
      promises.push_back(FuturePtr::reclaim_copy(const_cast<c10::ivalue::Future*>(list.key())));
    });
  }
  return promises;
}

}  // namespace dtorch
