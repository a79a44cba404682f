#pragma once

#include "dtorch/base/api.h"
#include "dtorch/base/deadline.h"

#include <atomic>
#include <cstdint>

namespace dtorch {

enum class FutexResult {
  kWoken,        // woken, or the word had another value already, or for no reason at all
  kTimedOut,     // the deadline has passed
  kInterrupted,  // a signal handler has run in this thread
};

/// Whether a word is used by this process alone, or lies in memory that others map too.
enum class FutexScope { kPrivate, kShared };

/// Sleeps while `word` is `expected`, until woken. Callers loop: kWoken may be spurious.
/// A bare futex, since a condition variable swallows the interruption by a signal.
DTORCH_API FutexResult FutexWait(const std::atomic<uint32_t>& word, uint32_t expected,
                                 Deadline deadline, FutexScope scope = FutexScope::kPrivate);

/// Wakes up to `count` sleepers on `word`. The memory may be gone already: then nobody is woken.
DTORCH_API void FutexWake(const std::atomic<uint32_t>& word, int count,
                          FutexScope scope = FutexScope::kPrivate);

}  // namespace dtorch
