#pragma once

#include "dtorch/base/api.h"
#include "dtorch/device/event.h"

#include <exception>
#include <memory>
#include <vector>

namespace dtorch {

/// What is to be done when a stream has got somewhere. Owns what must live until then.
class Completion {
 public:
  virtual ~Completion();
  /// Whether Complete() may run callbacks of the user, which may block.
  virtual bool RunsCallbacks() const = 0;
  /// Called once, in a background thread without locks. `error` is null, or the device's.
  virtual void Complete(std::exception_ptr error) noexcept = 0;
};

/// Completes `completion` once all `events` have been reached: the last was recorded on `stream`,
/// behind the others. Returns at once. Thread-safe.
///
/// Events of one stream are reached in order, so one thread waits for each stream in use, first in,
/// first out: no stream holds up another. It sleeps in the driver, and goes when it was of no use
/// for a second. While it runs callbacks another one takes its place, which waits a little for them
/// before it runs others: they run in the order of the stream, but for one that blocks.
///
/// In a forked child nothing is ever completed that was begun before. At exit the threads stay
/// where they are.
void WhenReached(const c10::Stream& stream, std::vector<Event> events,
                 std::unique_ptr<Completion> completion);

}  // namespace dtorch
