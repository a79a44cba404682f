#pragma once

#include <cstdint>
#include <string>

// What was called how often. Lock-free, so that it may be counted anywhere, and in a forked child.
namespace fake {

/// What blocks the calling thread until the device has done something. Counted by thread.
enum class Sync : uint8_t {
  kEvent,         // synchronizeEvent
  kStream,        // synchronizeStream
  kDevice,        // synchronizeDevice
  kBlockingCopy,  // a copy to or from the host that is not non_blocking, or not of pinned memory
  kItem,          // _local_scalar_dense
  kFallback,      // an operator that ran on the CPU
  kCount
};

enum class Call : uint8_t {
  kKernels,
  kCopies,
  kEventsCreated,
  kEventsRecorded,
  kEventsDestroyed,
  kEventQueries,
  kStreamQueries,
  kStreamWaits,   // block()
  kDeviceCounts,  // deviceCount(): with a real driver, the call that makes a later fork unsafe
  kCapturedTasks,
  kCapturesInvalidated,
  kCount
};

void CountSync(Sync sync);
void Count(Call call);
void ResetCounters();

/// {"calls": {name: n}, "syncs": {thread: {name: n}}}, with native thread ids. Names without "k".
std::string CountersAsJson();

}  // namespace fake
