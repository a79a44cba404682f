#include "event.h"

#include <utility>

#include "counters.h"
#include "errors.h"
#include "faults.h"

namespace fake {

namespace {

struct HeldBack {
  bool delaying = false;
  Stream* delaying_on = nullptr;  // nullptr: on any stream
  bool lose_next = false;
  std::vector<std::shared_ptr<Completion>> delayed;
  std::vector<std::shared_ptr<Completion>> lost;
};

HeldBack& held_back() {
  static HeldBack* const leaked = new HeldBack;
  return *leaked;
}

void FiredLocked(Completion& completion) {
  if (completion.fired) return;
  completion.fired = true;
  completion.when = std::chrono::steady_clock::now();
  completion.changed.notify_all();
  WakeWaitingStreamsLocked();
}

void LetFireLocked(Completion& completion) {
  completion.held_back = false;
  if (completion.reached) FiredLocked(completion);
}

void ThrowIfCaptured(const Completion& completion) {
  if (completion.captured) ThrowAcceleratorError("the event was recorded into a graph");
}

}  // namespace

void RecordEvent(Event*& event, Stream& stream) {
  Use(stream.device);
  if (event == nullptr) {
    Count(Call::kEventsCreated);
    event = new Event;
  }
  Count(Call::kEventsRecorded);
  Locked lock(MachineLock());
  ThrowIfFailedLocked(stream.device);
  MayFailCallLocked("event");
  auto completion = std::make_shared<Completion>(stream, stream.capture.active);
  // The one before may be the last that knows of its recording: gone after the lock.
  const std::shared_ptr<Completion> before = std::exchange(event->last, completion);
  if (completion->captured) {
    Count(Call::kCapturedTasks);
    return;
  }
  HeldBack& held = held_back();
  if (std::exchange(held.lose_next, false)) {
    completion->held_back = true;
    held.lost.push_back(completion);
  } else if (held.delaying && (held.delaying_on == nullptr || held.delaying_on == &stream)) {
    completion->held_back = true;
    held.delayed.push_back(completion);
  }
  Task task;
  task.kind = Kind::kEvent;
  task.completion = std::move(completion);
  task.failure = TakeTaskFaultLocked("event");
  EnqueueLocked(stream, std::move(task));
}

void DestroyEvent(Event* event) noexcept {
  Count(Call::kEventsDestroyed);
  Locked lock(MachineLock());
  delete event;
}

void WaitEvent(Stream& stream, const Event& event) {
  Use(stream.device);
  Count(Call::kStreamWaits);
  Locked lock(MachineLock());
  ThrowIfFailedLocked(stream.device);
  MayFailCallLocked("wait");
  if (stream.capture.active || event.last == nullptr) return;
  ThrowIfCaptured(*event.last);
  Task task;
  task.kind = Kind::kWait;
  task.ready = [completion = event.last] { return completion->fired; };
  EnqueueLocked(stream, std::move(task));
}

bool QueryEvent(const Event& event) {
  Count(Call::kEventQueries);
  Locked lock(MachineLock());
  if (event.last == nullptr) return true;
  const Completion& completion = *event.last;
  Use(completion.stream.device);
  CheckNoCaptureForbidsLocked("query_event");
  ThrowIfCaptured(completion);
  ThrowIfFailedLocked(completion.stream.device);
  MayFailCallLocked("query_event");
  if (completion.error) ThrowAcceleratorError(*completion.error);
  return completion.fired;
}

void SynchronizeEvent(const Event& event) {
  CountSync(Sync::kEvent);
  Locked lock(MachineLock());
  if (event.last == nullptr) return;
  const std::shared_ptr<Completion> completion = event.last;
  Use(completion->stream.device);
  CheckNoCaptureForbidsLocked("synchronize_event");
  ThrowIfCaptured(*completion);
  ThrowIfFailedLocked(completion->stream.device);
  MayFailCallLocked("synchronize_event");
  {
    const Blocked blocked;
    completion->changed.wait(lock, [&] { return completion->fired; });
  }
  if (completion->error) ThrowAcceleratorError(*completion->error);
  ThrowIfFailedLocked(completion->stream.device);
}

double ElapsedTime(const Event& from, const Event& to) {
  Locked lock(MachineLock());
  if (!from.last || !to.last || !from.last->fired || !to.last->fired) {
    ThrowAcceleratorError("elapsed time of an event that has not fired");
  }
  return std::chrono::duration<double, std::milli>(to.last->when - from.last->when).count();
}

// ---- Steering -----------------------------------------------------------------------------------

void DelayEvents(Stream* stream) {
  Locked lock(MachineLock());
  held_back().delaying = true;
  held_back().delaying_on = stream;
}

void StopDelayingEvents() {
  Locked lock(MachineLock());
  held_back().delaying = false;
}

int DelayedEvents() {
  Locked lock(MachineLock());
  return static_cast<int>(held_back().delayed.size());
}

bool FireEvents(int index) {
  if (InBadFork()) return false;
  Locked lock(MachineLock());
  auto& delayed = held_back().delayed;
  if (index >= static_cast<int>(delayed.size())) return false;
  const auto first = index < 0 ? delayed.begin() : delayed.begin() + index;
  const auto last = index < 0 ? delayed.end() : first + 1;
  for (auto it = first; it != last; ++it) LetFireLocked(**it);
  delayed.erase(first, last);
  return true;
}

void LoseNextEvent() {
  Locked lock(MachineLock());
  held_back().lose_next = true;
}

void FireEverything() {
  if (InBadFork()) return;
  Locked lock(MachineLock());
  HeldBack held = std::exchange(held_back(), {});
  for (const auto& completion : held.delayed) LetFireLocked(*completion);
  for (const auto& completion : held.lost) LetFireLocked(*completion);
}

// ---- For the streams ----------------------------------------------------------------------------

void ReachedLocked(Completion& completion) {
  completion.reached = true;
  if (!completion.held_back) FiredLocked(completion);
}

void FailedLocked(Completion& completion, const std::string& error) {
  completion.reached = true;
  completion.error = error;
  FiredLocked(completion);
}

void FailHeldBackLocked(int device, const std::string& error) {
  for (auto* events : {&held_back().delayed, &held_back().lost}) {
    std::erase_if(*events, [&](const std::shared_ptr<Completion>& completion) {
      if (completion->stream.device != device) return false;
      FailedLocked(*completion, error);
      return true;
    });
  }
}

}  // namespace fake
