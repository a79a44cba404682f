#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "stream.h"

// Events, and their firing late or never.
namespace fake {

/// One recording of an event. Pending, then reached (by its stream), then fired for good. The
/// machine's lock guards it.
struct Completion {
  Completion(Stream& stream, bool captured) : stream(stream), captured(captured) {}

  Stream& stream;
  const bool captured;  // recorded into a graph: it never fires, and asking is an error
  bool reached = false;
  bool fired = false;
  bool held_back = false;            // a test decides when it fires
  std::optional<std::string> error;  // the device's, if it ended by that
  std::chrono::steady_clock::time_point when;
  std::condition_variable changed;
};

/// What c10::Event points to. As there, one event is used by one thread at a time, but for queries
/// and waits. What is in a queue refers to the recording, not to the event.
struct Event {
  std::shared_ptr<Completion> last;  // nullptr: never recorded
};

/// Records the work queued so far on `stream`, making `event` if it is nullptr.
void RecordEvent(Event*& event, Stream& stream);
void DestroyEvent(Event* event) noexcept;

/// `stream` goes on when the event's last recording has fired.
void WaitEvent(Stream& stream, const Event& event);

/// Whether it has fired; true if it was never recorded. Throws the device's error.
bool QueryEvent(const Event& event);

/// Blocks until it has fired. Throws the device's error.
void SynchronizeEvent(const Event& event);

/// Milliseconds.
double ElapsedTime(const Event& from, const Event& to);

// ---- Steering -----------------------------------------------------------------------------------

/// From now on events recorded on `stream` (nullptr: any) fire only by FireEvents().
void DelayEvents(Stream* stream);
void StopDelayingEvents();

/// The number of delayed events that have not been told to fire.
int DelayedEvents();

/// The `index`-th of those, in the order recorded, or all if it is negative. One that its stream
/// has not reached yet fires when it has. False if there is none.
bool FireEvents(int index);

/// The next event recorded never fires, though its stream goes on.
void LoseNextEvent();

/// Everything fires, lost events too.
void FireEverything();

// ---- For the streams ----------------------------------------------------------------------------

void ReachedLocked(Completion& completion);
/// It ends at once, reached or not, with the error of its device.
void FailedLocked(Completion& completion, const std::string& error);
/// The same for all events of a device that are held back.
void FailHeldBackLocked(int device, const std::string& error);

}  // namespace fake
