#include "dtorch/sys/futex.h"

#include <cerrno>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace dtorch {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
static_assert(std::atomic<uint32_t>::is_always_lock_free);

namespace {
int Flag(FutexScope scope) { return scope == FutexScope::kPrivate ? FUTEX_PRIVATE_FLAG : 0; }
}  // namespace

FutexResult FutexWait(const std::atomic<uint32_t>& word, uint32_t expected, Deadline deadline,
                      FutexScope scope) {
  timespec limit{};
  timespec* limit_ptr = nullptr;
  if (!deadline.IsNever()) {
    const auto since_boot = deadline.when().time_since_epoch();
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_boot);
    limit.tv_sec = seconds.count();
    limit.tv_nsec =
        std::chrono::duration_cast<std::chrono::nanoseconds>(since_boot - seconds).count();
    limit_ptr = &limit;
  }
  // FUTEX_WAIT_BITSET takes an absolute time on CLOCK_MONOTONIC, which is what steady_clock reads.
  const long rc = syscall(SYS_futex, &word, FUTEX_WAIT_BITSET | Flag(scope), expected, limit_ptr,
                          nullptr, FUTEX_BITSET_MATCH_ANY);
  if (rc == 0) return FutexResult::kWoken;
  if (errno == ETIMEDOUT) return FutexResult::kTimedOut;
  if (errno == EINTR) return FutexResult::kInterrupted;
  return FutexResult::kWoken;  // EAGAIN: the word has changed
}

void FutexWake(const std::atomic<uint32_t>& word, int count, FutexScope scope) {
  syscall(SYS_futex, &word, FUTEX_WAKE | Flag(scope), count, nullptr, nullptr, 0);
}

}  // namespace dtorch
