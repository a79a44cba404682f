#pragma once

#include "dtorch/base/api.h"

namespace dtorch {

/// What the runtime that embeds us (a Python interpreter, say) is told by the core. The core
/// itself knows no Python; a C++ program installs nothing and pays nothing.
struct Host {
  /// Called in a thread whose blocking wait was interrupted by a signal, and now and then while it
  /// is blocked. May throw: the wait ends with that exception, the future is unharmed.
  void (*check_interrupt)() = nullptr;

  /// Gives up the runtime's global lock if the calling thread holds it, and returns what
  /// `retake_lock` needs to take it again (nullptr: it was not held).
  void* (*drop_lock)() = nullptr;
  void (*retake_lock)(void*) = nullptr;
};

/// Installed once, at import, for the life of the process. Not thread-safe against waiters.
DTORCH_API void SetHost(const Host& host);
DTORCH_API const Host& GetHost();

/// Scope in which the runtime's global lock is not held by this thread. Everything that may block
/// or that runs foreign code (completing a future runs its callbacks) goes inside one, since
/// another thread may need the lock to get on.
class HostUnlocked {
 public:
  HostUnlocked() : held_(GetHost().drop_lock ? GetHost().drop_lock() : nullptr) {}
  ~HostUnlocked() {
    if (held_) GetHost().retake_lock(held_);
  }
  HostUnlocked(const HostUnlocked&) = delete;
  HostUnlocked& operator=(const HostUnlocked&) = delete;

 private:
  void* held_;
};

}  // namespace dtorch
