#pragma once

#include "dtorch/base/api.h"

#include <c10/core/Stream.h>

#include <memory>

namespace dtorch {

/// A point in what a stream has been given to do. Any thread may use it, one at a time.
class DTORCH_API Event {
 public:
  /// Recorded behind all that `stream` has been given so far. What the device refuses is thrown.
  explicit Event(const c10::Stream& stream);
  ~Event();
  Event(Event&&) noexcept;

  /// Blocks this thread until the stream is there; throws the device's error, if it has failed. The
  /// caller holds no lock, nor the host's.
  void Synchronize() const;
  /// What `stream` is given from now on waits for the event. Does not block.
  void Block(const c10::Stream& stream) const;

  class Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

/// How one type of device makes events, where what c10 offers for all of them is not good enough:
/// CUDA's spin while a thread waits for one. Installed by a library that knows the device, before
/// the first event of that type; none is needed for the others.
class Event::Impl {
 public:
  virtual ~Impl();
  virtual void Synchronize() const = 0;
  virtual void Block(const c10::Stream& stream) const = 0;
};

struct EventFactory {
  std::unique_ptr<Event::Impl> (*record)(const c10::Stream& stream) = nullptr;
  /// Called once in every thread that will wait for events of ours. May be null.
  void (*prepare_thread)() = nullptr;
  /// Whether the stream records a graph rather than working. May be null.
  bool (*is_capturing)(const c10::Stream& stream) = nullptr;
};
DTORCH_API void SetEventFactory(c10::DeviceType type, EventFactory factory);
const EventFactory& EventFactoryOf(c10::DeviceType type);

}  // namespace dtorch
