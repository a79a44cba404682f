#pragma once

#include <chrono>
#include <cstdint>

namespace dtorch {

/// A point on the monotonic clock up to which a caller is willing to wait. Setting the wall clock
/// changes nothing. A value type; immutable.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline Never() { return Deadline(Clock::time_point::max()); }

  /// `ms` from now; has passed at once for 0. What would overflow the clock is "never".
  /// Requires ms >= 0.
  static Deadline AfterMs(int64_t ms) {
    const auto now = Clock::now();
    const auto room =
        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::time_point::max() - now);
    if (ms >= room.count()) return Never();
    return Deadline(now + std::chrono::milliseconds(ms));
  }

  bool IsNever() const { return when_ == Clock::time_point::max(); }
  bool HasPassed() const { return !IsNever() && Clock::now() >= when_; }
  Clock::time_point when() const { return when_; }

  /// The nearer one of this and `ms` from now.
  Deadline AtMostMs(int64_t ms) const {
    const Deadline other = AfterMs(ms);
    return other.when_ < when_ ? other : *this;
  }

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}

  Clock::time_point when_;
};

}  // namespace dtorch
