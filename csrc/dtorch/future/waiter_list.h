#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <mutex>

#include "dtorch/base/api.h"

namespace dtorch {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

class WaiterList;

/// Work that a notification leaves to be done once no lock is held.
class DTORCH_API Waker {
 public:
  virtual ~Waker();
  /// Runs in the completing thread, without locks. May take the host's lock; must not block.
  virtual void Wake() = 0;
};

/// One party that waits for one future: a blocked thread, a coroutine, a group. It is linked into
/// the future's WaiterList while it waits and unlinks without a trace when it stops waiting.
///
/// States: idle -> linked -> notified | unlinked (idle again).
/// The owner keeps it alive until it is notified or Unlink() has returned.
class DTORCH_API Waiter {
 public:
  Waiter() = default;
  virtual ~Waiter();
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  /// After it has returned, Notify() is not running and will not be called. Any thread; not from
  /// within Notify().
  void Unlink();

 protected:
  /// The future is complete. Called once, in the completing thread, under the list's lock: it may
  /// take locks of its own, but neither block, nor run foreign code, nor want the host's lock.
  /// What needs more is returned, and is woken outside of the lock.
  virtual std::shared_ptr<Waker> Notify() noexcept = 0;

 private:
  friend class WaiterList;
  std::weak_ptr<WaiterList> list_;
  // Guarded by the list's lock:
  Waiter* prev_ = nullptr;
  Waiter* next_ = nullptr;
  std::shared_ptr<void> keep_alive_;
  bool linked_ = false;
};

/// The waiters of one pending future.
///
/// A callback of ivalue::Future can never be taken back, so that every timed-out wait and every
/// cancelled await would leave one behind. Hence one callback is hung on a future, by the first
/// waiter; it notifies this list, from which waiters come and go.
///
/// For a future made by a promise of ours the list is made with it: so its waiters are notified
/// before any callback of the user, which may block.
///
/// Owned by the callback, so it goes when the future has completed or was dropped. Thread-safe.
class DTORCH_API WaiterList : public std::enable_shared_from_this<WaiterList> {
 public:
  /// The list of `future`, made if there is none. If the future belongs to a promise that was
  /// made before a fork and we are in the child, DTorchError: nobody here can complete it.
  static std::shared_ptr<WaiterList> Of(const FuturePtr& future);

  /// As Of(), for a promise's new future.
  static void Prepare(const FuturePtr& promised);

  explicit WaiterList(const c10::ivalue::Future* future, bool promised);
  ~WaiterList();

  /// Links an idle `waiter`. False if the future has completed: it will not be notified.
  /// `keep_alive`, if given, is held for as long as the waiter is linked.
  bool Add(Waiter& waiter, std::shared_ptr<void> keep_alive = nullptr);

 private:
  friend class Waiter;
  void Complete();
  void Remove(Waiter& waiter);

  static std::shared_ptr<WaiterList> FindOrMake(const FuturePtr& future, bool promised);

  const c10::ivalue::Future* const key_;
  const uint64_t fork_generation_;
  const bool promised_;
  std::mutex mutex_;
  Waiter* head_ = nullptr;  // in the order of arrival
  Waiter* tail_ = nullptr;
  bool complete_ = false;
};

}  // namespace dtorch
