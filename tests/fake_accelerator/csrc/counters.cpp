#include "counters.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <sys/syscall.h>
#include <unistd.h>

namespace fake {

namespace {

constexpr size_t kSyncs = static_cast<size_t>(Sync::kCount);
constexpr size_t kCalls = static_cast<size_t>(Call::kCount);

constexpr std::array<const char*, kSyncs> kSyncNames = {
    "synchronize_event", "synchronize_stream", "synchronize_device", "blocking_copy", "item",
    "fallback"};
constexpr std::array<const char*, kCalls> kCallNames = {
    "kernels",          "copies",         "events_created",      "events_recorded",
    "events_destroyed", "event_queries",  "stream_queries",      "stream_waits",
    "device_counts",    "captured_tasks", "captures_invalidated"};

struct OfThread {
  std::atomic<long> tid{0};  // 0: nobody's yet
  std::array<std::atomic<int64_t>, kSyncs> syncs{};
};

// More threads than any test has; those beyond share the last place.
std::array<OfThread, 4096> threads;
std::array<std::atomic<int64_t>, kCalls> calls;

OfThread& MyCounters() {
  const long me = syscall(SYS_gettid);  // asked each time: a fork changes it
  for (OfThread& thread : threads) {
    long owner = thread.tid.load(std::memory_order_relaxed);
    if (owner == 0 && thread.tid.compare_exchange_strong(owner, me)) return thread;
    if (owner == me) return thread;
  }
  return threads.back();
}

void Append(std::string& json, const char* name, int64_t value) {
  if (json.back() != '{') json += ", ";
  json += '"' + std::string(name) + "\": " + std::to_string(value);
}

}  // namespace

void CountSync(Sync sync) { MyCounters().syncs[static_cast<size_t>(sync)]++; }

void Count(Call call) { calls[static_cast<size_t>(call)]++; }

void ResetCounters() {
  for (auto& call : calls) call = 0;
  for (OfThread& thread : threads) {
    if (thread.tid == 0) break;
    for (auto& sync : thread.syncs) sync = 0;
  }
}

std::string CountersAsJson() {
  std::string json = "{\"calls\": {";
  for (size_t i = 0; i < kCalls; ++i) Append(json, kCallNames[i], calls[i]);
  json += "}, \"syncs\": {";
  for (const OfThread& thread : threads) {
    if (thread.tid == 0) break;
    if (json.back() != '{') json += ", ";
    json += '"' + std::to_string(thread.tid) + "\": {";
    for (size_t i = 0; i < kSyncs; ++i) Append(json, kSyncNames[i], thread.syncs[i]);
    json += '}';
  }
  return json + "}}";
}

}  // namespace fake
