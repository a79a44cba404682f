#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "machine.h"

// A stream: a queue of tasks and a thread that runs them, one after the other.
//
// Streams live for ever, and so do their threads, which start with the first task. Thread-safe.
namespace fake {

struct Completion;

enum class Kind : uint8_t {
  kKernel,
  kCopy,
  kEvent,     // an event is reached
  kWait,      // for an event of another stream
  kInternal,  // of the fake itself: runs when it is the first, on a held stream too
};
const char* Name(Kind kind);

struct Task {
  Kind kind = Kind::kInternal;
  std::function<void()> run;               // on the worker, without the lock; may be empty
  std::function<bool()> ready;             // with the lock: may it start? Empty: it may
  std::shared_ptr<Completion> completion;  // reached when this is done
  std::optional<std::string> failure;      // it fails with this instead of running
  uint64_t sequence = 0;
};

/// What a graph capture on another thread may not do: as cudaStreamCaptureMode.
enum class CaptureMode : uint8_t { kGlobal, kThreadLocal, kRelaxed };

struct Capture {
  bool active = false;
  bool invalidated = false;
  CaptureMode mode = CaptureMode::kGlobal;
  long thread = 0;
};

struct Stream {
  int device = 0;
  int64_t id = 0;  // 0: the device's default stream

  std::deque<Task> queue;
  uint64_t submitted = 0;  // sequence of the last task queued
  uint64_t finished = 0;   // of the last one done
  bool started = false;
  bool running = false;  // a task's run() is being executed
  bool held = false;
  int steps = 0;  // tasks that a held stream may run nevertheless
  Capture capture;

  std::condition_variable work;      // for the worker
  std::condition_variable progress;  // for everybody else
};

/// A place in a stream's queue: done when all that was queued up to it is.
struct Position {
  Stream* stream;
  uint64_t sequence;
};

// ---- Finding ------------------------------------------------------------------------------------

/// The stream `id` of `device`, which need not be initialised; throws if there is none.
Stream& FindStream(int device, int64_t id);

/// Round-robin, from 32 of each priority a device, as CUDA's pool. Initialises the device.
Stream& PoolStream(int device, bool high_priority);

/// One that nobody else gets. Initialises the device.
Stream& NewStream(int device);

/// "fake:DEVICE/ID" of every stream that ever had a task.
std::vector<std::string> StreamsInUseLocked();

// ---- Queueing -----------------------------------------------------------------------------------

/// Queues `run`, which is executed on the stream's thread; counted. Throws the device's error, or
/// what a test asked for. On a capturing stream it is dropped: a graph would have it.
Position Submit(Stream& stream, Kind kind, std::function<void()> run);

/// Queues as it is, without any check.
Position EnqueueLocked(Stream& stream, Task task);

/// `stream` goes on when `position` is done. For the fake itself: neither counted nor seen.
void WaitForPositionLocked(Stream& stream, Position position);

Position LastLocked(Stream& stream);
bool IsDoneLocked(const Position& position);

/// Nothing is queued on any stream.
bool AllIdleLocked();

// ---- Waiting ------------------------------------------------------------------------------------

/// Blocks until done; throws the device's error. Whoever calls counts it.
void Await(const Position& position);
void SynchronizeStream(Stream& stream);
void SynchronizeDevice(int device);
bool QueryStream(Stream& stream);

/// While it lives the calling thread counts as blocked in a synchronising call.
class Blocked {
 public:
  Blocked();   // with the lock held
  ~Blocked();  // with the lock held
  Blocked(const Blocked&) = delete;
  Blocked& operator=(const Blocked&) = delete;
};

/// Waits until at least `count` threads are blocked in synchronising calls, or as long as
/// `timeout_ms`. The number of them.
int UntilBlocked(int count, int64_t timeout_ms);

// ---- Steering -----------------------------------------------------------------------------------

/// Returns when nothing runs on the stream, and nothing will until Release().
void Hold(Stream& stream);
void Release(Stream& stream);
void ReleaseAll();

/// Has a held stream run one task. Its kind; nullptr if there is none, or it is not ready to run.
const char* Step(Stream& stream);

/// The kinds of the tasks that are queued, in order.
std::vector<const char*> Queued(Stream& stream);

/// Waits until all that is queued has been done, uncounted. False after `timeout_ms`.
bool Drain(Stream& stream, int64_t timeout_ms);

// ---- Capture ------------------------------------------------------------------------------------

void BeginCapture(Stream& stream, CaptureMode mode);
/// Whether the capture is intact.
bool EndCapture(Stream& stream);
void EndAllCaptures();

/// Throws, and spoils the capture, if `call` is one that a capture in progress forbids.
void CheckNoCaptureForbidsLocked(const char* call);

// ---- For the machine ----------------------------------------------------------------------------

/// The device does nothing any more until its error is reset: all that is queued on it ends.
/// What is dropped goes to `dropped`, to be destroyed without the lock.
void FailDeviceLocked(int device, const std::string& message, std::vector<Task>& dropped);

/// Has those streams look again that wait for something before their next task.
void WakeWaitingStreamsLocked();

void WaitUntilNothingRunsLocked(Locked& lock);

}  // namespace fake
