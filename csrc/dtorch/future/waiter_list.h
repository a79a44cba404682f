#pragma once

#include "dtorch/base/api.h"

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace dtorch {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

class WaiterList;
class Alarm;

/// Where the value of a pending future comes from, if it is not set by somebody in this process.
/// The future keeps it for as long as it is pending, and drops it when it is complete, or with
/// itself: the destructor is where what was asked for is given back.
class DTORCH_API Source {
 public:
  virtual ~Source();

  /// A holder of the pending future has gone: see ReleaseFuture().
  virtual void OnRelease() = 0;

  /// Completes the future, if its value is there and nobody was told yet. Never blocks, and runs no
  /// callbacks of the user.
  virtual void Poll() = 0;

  /// For a thread that is about to wait for the future: what wakes it when the value is there, so
  /// that it need not wait for another thread to see that first. nullptr if there is none.
  virtual std::unique_ptr<Alarm> Listen() = 0;
};

/// Work that a notification leaves to be done once no lock is held.
class DTORCH_API Waker {
 public:
  virtual ~Waker();
  /// Runs in the completing thread, without locks; may complete other futures.
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

  /// Whether being notified may run callbacks of the user.
  virtual bool RunsCallbacks() const { return false; }

 private:
  friend class WaiterList;
  const bool of_thread_;
  std::mutex* lock_ = nullptr;  // of the list it was last linked into; guards what follows
  WaiterList* list_ = nullptr;  // while linked
  Waiter* prev_ = nullptr;
  Waiter* next_ = nullptr;
  std::shared_ptr<void> keep_alive_;
};

/// What a future of ours depends on: tells what becomes of it in a forked child.
enum class Origin : uint8_t {
  kAnything,  // a future that torch has made, say
  kPromised,  // something that only this process can do
  kPromise,   // a promise of this process, which may leave it
};

/// Makes the list of a new future of ours at once, so that its waiters are notified before any
/// callback of the user, which may block.
DTORCH_API void PrepareForWaiters(const FuturePtr& future, Origin origin);

/// kAnything unless a pending future was prepared as something else.
DTORCH_API Origin OriginOf(const FuturePtr& future);
DTORCH_API void SetOrigin(const FuturePtr& future, Origin origin);

/// Where the value of a promise is to be, whatever device it comes from; nullopt where it comes
/// from. Set before anybody can fulfil it; nullopt once the future is complete.
DTORCH_API void SetWantedDevice(const FuturePtr& future, c10::Device device);
DTORCH_API std::optional<c10::Device> WantedDevice(const FuturePtr& future);

/// The source that the future has then: an earlier one if there is one, nullptr if it is complete.
DTORCH_API std::shared_ptr<Source> SetSource(const FuturePtr& future,
                                             std::shared_ptr<Source> source);
DTORCH_API std::shared_ptr<Source> SourceOf(const FuturePtr& future);

/// Whether the future is complete, or its source has what completes it: then it is, on return.
DTORCH_API bool IsComplete(const FuturePtr& future);

/// Drops a share of a future, and tells its source, if it is pending and has one: that has a share
/// too, and gives it up if it is the last.
DTORCH_API void ReleaseFuture(FuturePtr future);

/// What drops the last share of a complete future, or a value, if the binding that knows the host's
/// objects has installed it: such an object, which the value may be, may not be dropped in a
/// destructor everywhere.
using DropFunction = void (*)(c10::IValue future_or_value);
DTORCH_API void SetDropFunction(DropFunction drop);

/// Drops a value as in a thread of ours.
DTORCH_API void DropValue(c10::IValue value);

/// The pending futures of origin kPromise that have no source. A promise changes the origin before
/// it drops its share.
DTORCH_API std::vector<FuturePtr> FindPromisesWithoutSource();

/// Makes the list of any future, if it is pending and has none: before a callback of the user is
/// hung on it. In a forked child throws DTorchError, as Waiter::LinkTo() does.
DTORCH_API void EnsureWaiterList(const FuturePtr& future);

/// Notifies all who wait for a complete future, if that has not been done.
void NotifyWaiters(const FuturePtr& future);

/// Whether the callback that feeds a list of waiters hangs on `future`.
bool HasWaiterList(const FuturePtr& future);

/// Whether that list has anybody in it; anybody whose notification may run callbacks of the user.
bool HasWaiters(const FuturePtr& future);
bool HasWaitersThatRunCallbacks(const FuturePtr& future);

}  // namespace dtorch
