#pragma once

#include "dtorch/base/api.h"

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <mutex>

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

/// One party that waits for one future: a blocked thread, a coroutine, a group. It is linked to
/// the future while it waits, and unlinks without a trace when it stops waiting.
///
/// A callback of ivalue::Future can never be taken back, so that every timed-out wait and every
/// cancelled await would leave one behind. Hence one callback is hung on a future, by its first
/// waiter; it notifies a list, from which waiters come and go.
///
/// States: idle -> linked -> notified | unlinked (idle again).
/// The owner keeps it alive until it is notified or Unlink() has returned. Thread-safe.
class DTORCH_API Waiter {
 public:
  /// `of_thread`: it stands for a thread that is blocked, and goes with it: a forked child, which
  /// has no such thread, forgets it.
  explicit Waiter(bool of_thread = false) : of_thread_(of_thread) {}
  virtual ~Waiter();
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  /// Links this idle waiter to `future`. False if that is complete: there will be no notification.
  /// `keep_alive`, if given, is held for as long as the waiter is linked.
  ///
  /// If the future belongs to a promise that was made before a fork and we are in the child,
  /// DTorchError: nobody here can complete it.
  bool LinkTo(const FuturePtr& future, std::shared_ptr<void> keep_alive = nullptr);

  /// After it has returned, Notify() is not running and will not be called. Any thread; not from
  /// within Notify().
  void Unlink();

 protected:
  /// The future is complete. Called once, in the completing thread, under a lock that many futures
  /// share: it may take locks of its own, but neither block, nor run foreign code, nor want the
  /// host's lock. What needs more is returned, and is woken outside of the lock.
  virtual std::shared_ptr<Waker> Notify() noexcept = 0;

 private:
  friend class WaiterList;
  const bool of_thread_;
  std::mutex* lock_ = nullptr;  // of the list it was last linked into; guards what follows
  WaiterList* list_ = nullptr;  // while linked
  Waiter* prev_ = nullptr;
  Waiter* next_ = nullptr;
  std::shared_ptr<void> keep_alive_;
};

/// Makes the list of a new future of ours at once, so that its waiters are notified before any
/// callback of the user, which may block; and so that a forked child knows the future as one of
/// its parent's.
DTORCH_API void PrepareForWaiters(const FuturePtr& future);

/// Makes the list of any future, if it is pending and has none: before a callback of the user is
/// hung on it. In a forked child throws DTorchError, as Waiter::LinkTo() does.
DTORCH_API void EnsureWaiterList(const FuturePtr& future);

/// Whether the callback that feeds a list of waiters hangs on `future`.
bool HasWaiterList(const FuturePtr& future);

}  // namespace dtorch
