#pragma once

#include "dtorch/base/api.h"
#include "dtorch/base/deadline.h"

#include <atomic>
#include <cstdint>
#include <pthread.h>

namespace dtorch {

/// What a sleeping thread may be woken by besides Sleeper::Wake(): a counter, in memory that other
/// processes may map, that whoever provides the value increases, and wakes.
class DTORCH_API Alarm {
 public:
  virtual ~Alarm();
  /// Lives for as long as the process.
  virtual std::atomic<uint32_t>& counter() = 0;
  /// Called once, before the thread enters: may watch for a moment whether it comes at once, which
  /// is cheaper than to be woken, and may complete what is waited for.
  virtual void LookOut() = 0;
  /// The thread is about to look and sleep; it is not any more. In turn, in the thread that sleeps.
  virtual void Enter() = 0;
  virtual void Leave() = 0;
  /// Called in between, before the thread sleeps and when the counter has changed. May complete
  /// what is waited for, and leave for that.
  virtual void Look() = 0;
};

/// Blocks one thread until another one wakes it: a binary semaphore that a signal can interrupt.
/// Wake() before Sleep() is not lost; several Wake() count as one.
class DTORCH_API Sleeper {
 public:
  /// `alarm`, if given, must outlive the sleeper.
  /// One thread, the one that makes the sleeper, sleeps then.
  explicit Sleeper(Alarm* alarm = nullptr) : alarm_(alarm), thread_(pthread_self()) {}

  /// True once woken (which takes the wake-up), false when the deadline has passed. Asks the
  /// host's interrupt check when a signal has arrived, and throws what it throws. Call it with
  /// the host's lock dropped.
  bool Sleep(Deadline deadline);

  /// Any thread. Does not touch this object after the sleeper may have seen the wake-up.
  void Wake();

 private:
  Alarm* const alarm_;
  const pthread_t thread_;
  std::atomic<uint32_t> woken_{0};
};

}  // namespace dtorch
