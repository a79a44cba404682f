// What tests call through ctypes: plain functions, documented in __init__.py. ctypes releases the
// interpreter lock meanwhile. A stream is its device and its id; nothing throws.

#include <cstdint>
#include <string>
#include <string_view>

#include "counters.h"
#include "event.h"
#include "faults.h"
#include "memory.h"
#include "stream.h"

#define FAKE_API extern "C" __attribute__((visibility("default")))

namespace {

using namespace fake;

// Valid until the thread's next call.
const char* Text(std::string text) {
  thread_local std::string last;
  last = std::move(text);
  return last.c_str();
}

std::string AsJson(const MemoryStats& stats) {
  const auto field = [](const char* name, int64_t value) {
    return '"' + std::string(name) + "\": " + std::to_string(value);
  };
  return "{" + field("live_bytes", stats.live_bytes) + ", " +
         field("live_blocks", stats.live_blocks) + ", " +
         field("cached_blocks", stats.cached_blocks) + ", " +
         field("deferred_blocks", stats.deferred_blocks) + ", " +
         field("allocations", stats.allocations) + ", " + field("reuses", stats.reuses) + "}";
}

std::string Joined(const auto& names) {
  std::string text;
  for (const auto& name : names) {
    if (!text.empty()) text += ' ';
    text += name;
  }
  return text;
}

}  // namespace

// Whether there is that stream. The functions below may be given no other.
FAKE_API int fake_has_stream(int device, int64_t id) {
  try {
    FindStream(device, id);
    return 1;
  } catch (const std::exception&) {
    return 0;
  }
}

// ---- Streams ------------------------------------------------------------------------------------

FAKE_API void fake_hold(int device, int64_t id) { Hold(FindStream(device, id)); }
FAKE_API void fake_release(int device, int64_t id) { Release(FindStream(device, id)); }
FAKE_API const char* fake_step(int device, int64_t id) { return Step(FindStream(device, id)); }
FAKE_API const char* fake_queued(int device, int64_t id) {
  return Text(Joined(Queued(FindStream(device, id))));
}
FAKE_API int fake_drain(int device, int64_t id, int64_t timeout_ms) {
  return Drain(FindStream(device, id), timeout_ms);
}
FAKE_API int fake_until_blocked(int count, int64_t timeout_ms) {
  return UntilBlocked(count, timeout_ms);
}
FAKE_API const char* fake_streams_in_use() {
  const Locked lock(MachineLock());
  return Text(Joined(StreamsInUseLocked()));
}

// ---- Events -------------------------------------------------------------------------------------

FAKE_API void fake_delay_events() { DelayEvents(nullptr); }
FAKE_API void fake_delay_events_of(int device, int64_t id) { DelayEvents(&FindStream(device, id)); }
FAKE_API void fake_stop_delaying_events() { StopDelayingEvents(); }
FAKE_API int fake_delayed_events() { return DelayedEvents(); }
FAKE_API int fake_fire_events(int index) { return FireEvents(index); }
FAKE_API void fake_lose_next_event() { LoseNextEvent(); }

// ---- Faults -------------------------------------------------------------------------------------

FAKE_API void fake_fail_next(const char* kind, const char* message) {
  const Locked lock(MachineLock());
  FailNextLocked(kind, message);
}
FAKE_API void fake_fail_call(const char* call, const char* message) {
  const Locked lock(MachineLock());
  FailCallLocked(call, message);
}
FAKE_API void fake_reset_errors() {
  const Locked lock(MachineLock());
  ClearFaultsLocked();
  ResetErrorsLocked();
}

// ---- Capture ------------------------------------------------------------------------------------

FAKE_API void fake_begin_capture(int device, int64_t id, int mode) {
  BeginCapture(FindStream(device, id), static_cast<CaptureMode>(mode));
}
FAKE_API int fake_end_capture(int device, int64_t id) { return EndCapture(FindStream(device, id)); }

// ---- What has happened --------------------------------------------------------------------------

FAKE_API const char* fake_counters() { return Text(CountersAsJson()); }
FAKE_API void fake_reset_counters() { ResetCounters(); }
FAKE_API int fake_is_initialized() { return IsInitialized(); }
FAKE_API int fake_has_context(int device) { return HasContext(device); }
FAKE_API int fake_in_bad_fork() { return InBadFork(); }
FAKE_API const char* fake_device_memory(int device) {
  const Locked lock(MachineLock());
  return Text(AsJson(device_memory().StatsLocked(device)));
}
FAKE_API const char* fake_pinned_memory() {
  const Locked lock(MachineLock());
  return Text(AsJson(pinned_memory().StatsLocked(-1)));
}

// ---- The end of a test --------------------------------------------------------------------------

FAKE_API void fake_reset() {
  ReleaseAll();
  FireEverything();
  fake_reset_errors();
  EndAllCaptures();
}
