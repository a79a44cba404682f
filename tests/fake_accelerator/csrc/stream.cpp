#include "stream.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <exception>
#include <map>
#include <pthread.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include "counters.h"
#include "errors.h"
#include "event.h"
#include "faults.h"

namespace fake {

namespace {

// Ids: 0 the default stream, then the two halves of the pool, then those made one by one.
constexpr int64_t kPoolSize = 32;
constexpr int64_t kFirstNew = 1 + 2 * kPoolSize;

struct Streams {
  std::map<std::pair<int, int64_t>, std::unique_ptr<Stream>> all;
  std::array<std::array<int64_t, 2>, kDevices> next_of_pool{};
  std::array<int64_t, kDevices> next_new{};
  int blocked = 0;
  std::condition_variable blocked_changed;
};

Streams& streams() {
  static Streams* const leaked = new Streams;
  return *leaked;
}

Stream& GetLocked(int device, int64_t id) {
  std::unique_ptr<Stream>& stream = streams().all[{device, id}];
  if (!stream) {
    stream = std::make_unique<Stream>();
    stream->device = device;
    stream->id = id;
  }
  return *stream;
}

bool MayRunLocked(const Stream& stream) {
  if (stream.queue.empty()) return false;
  const Task& task = stream.queue.front();
  if (task.ready && !task.ready()) return false;
  return task.kind == Kind::kInternal || !stream.held || stream.steps > 0;
}

std::optional<std::string> Run(Task& task) {
  if (task.failure) return task.failure;
  try {
    if (task.run) task.run();
  } catch (const std::exception& error) {
    return error.what();
  }
  return std::nullopt;
}

void Work(Stream& stream) {
  std::vector<Task> dropped;
  Locked lock(MachineLock());
  while (true) {
    stream.work.wait(lock, [&] { return !ExitingLocked() && MayRunLocked(stream); });
    Task task = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (stream.held && task.kind != Kind::kInternal) --stream.steps;
    stream.running = true;
    lock.unlock();
    std::optional<std::string> error = Run(task);
    task.run = nullptr;  // what it holds goes before it counts as done
    task.ready = nullptr;
    lock.lock();
    stream.running = false;
    // An error elsewhere on the device may have emptied the queue meanwhile.
    stream.finished = stream.queue.empty() ? stream.submitted : task.sequence;
    if (error) FailDeviceLocked(stream.device, *error, dropped);
    if (task.completion) {
      if (error) {
        FailedLocked(*task.completion, *error);
      } else {
        ReachedLocked(*task.completion);
      }
    }
    stream.progress.notify_all();
    WakeWaitingStreamsLocked();
    if (!dropped.empty()) {
      lock.unlock();
      dropped.clear();
      lock.lock();
    }
  }
}

void StartLocked(Stream& stream) {
  // A worker gets no signal: Python's handlers belong on other threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread([&stream] { Work(stream); });
  const std::string name =
      "fake:" + std::to_string(stream.device) + "/" + std::to_string(stream.id);
  pthread_setname_np(thread.native_handle(), name.c_str());
  thread.detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  stream.started = true;
}

}  // namespace

const char* Name(Kind kind) {
  switch (kind) {
    case Kind::kKernel:
      return "kernel";
    case Kind::kCopy:
      return "copy";
    case Kind::kEvent:
      return "event";
    case Kind::kWait:
      return "wait";
    case Kind::kInternal:
      return "internal";
  }
  return "?";
}

// ---- Finding ------------------------------------------------------------------------------------

Stream& FindStream(int device, int64_t id) {
  Locked lock(MachineLock());
  if (device < 0 || device >= kDevices) {
    ThrowAcceleratorError("invalid device ordinal " + std::to_string(device));
  }
  if (id < 0 || id >= kFirstNew + streams().next_new[device]) {
    ThrowAcceleratorError("no stream " + std::to_string(id) + " on device " +
                          std::to_string(device));
  }
  return GetLocked(device, id);
}

Stream& PoolStream(int device, bool high_priority) {
  Use(device);
  Locked lock(MachineLock());
  // A device that has failed does not keep it from that: as CUDA's, the pool is the host's.
  MayFailCallLocked("stream");
  int64_t& next = streams().next_of_pool[device][high_priority];
  const int64_t first = high_priority ? 1 + kPoolSize : 1;
  return GetLocked(device, first + next++ % kPoolSize);
}

Stream& NewStream(int device) {
  Use(device);
  Locked lock(MachineLock());
  ThrowIfFailedLocked(device);
  MayFailCallLocked("stream");
  return GetLocked(device, kFirstNew + streams().next_new[device]++);
}

std::vector<std::string> StreamsInUseLocked() {
  std::vector<std::string> names;
  for (const auto& [key, stream] : streams().all) {
    if (stream->submitted == 0) continue;
    names.push_back("fake:" + std::to_string(key.first) + "/" + std::to_string(key.second));
  }
  return names;
}

// ---- Queueing -----------------------------------------------------------------------------------

Position Submit(Stream& stream, Kind kind, std::function<void()> run) {
  Use(stream.device);
  if (kind == Kind::kKernel) Count(Call::kKernels);
  if (kind == Kind::kCopy) Count(Call::kCopies);
  Locked lock(MachineLock());
  ThrowIfFailedLocked(stream.device);
  MayFailCallLocked(Name(kind));
  if (stream.capture.active) {
    Count(Call::kCapturedTasks);
    return {&stream, 0};
  }
  Task task;
  task.kind = kind;
  task.run = std::move(run);
  task.failure = TakeTaskFaultLocked(Name(kind));
  return EnqueueLocked(stream, std::move(task));
}

Position EnqueueLocked(Stream& stream, Task task) {
  if (!stream.started) StartLocked(stream);
  task.sequence = ++stream.submitted;
  stream.queue.push_back(std::move(task));
  stream.work.notify_one();
  return {&stream, stream.submitted};
}

void WaitForPositionLocked(Stream& stream, Position position) {
  Task task;
  task.ready = [position] { return IsDoneLocked(position); };
  EnqueueLocked(stream, std::move(task));
}

Position LastLocked(Stream& stream) { return {&stream, stream.submitted}; }

bool IsDoneLocked(const Position& position) {
  return position.stream->finished >= position.sequence;
}

bool AllIdleLocked() {
  const auto& all = streams().all;
  return std::all_of(all.begin(), all.end(),
                     [](const auto& entry) { return IsDoneLocked(LastLocked(*entry.second)); });
}

// ---- Waiting ------------------------------------------------------------------------------------

void Await(const Position& position) {
  Use(position.stream->device);
  Locked lock(MachineLock());
  {
    const Blocked blocked;
    position.stream->progress.wait(lock, [&] { return IsDoneLocked(position); });
  }
  ThrowIfFailedLocked(position.stream->device);
}

void SynchronizeStream(Stream& stream) {
  CountSync(Sync::kStream);
  Use(stream.device);
  Locked lock(MachineLock());
  CheckNoCaptureForbidsLocked("synchronize_stream");
  ThrowIfFailedLocked(stream.device);
  MayFailCallLocked("synchronize_stream");
  const Position last = LastLocked(stream);
  lock.unlock();
  Await(last);
}

void SynchronizeDevice(int device) {
  CountSync(Sync::kDevice);
  Use(device);
  Locked lock(MachineLock());
  CheckNoCaptureForbidsLocked("synchronize_device");
  ThrowIfFailedLocked(device);
  MayFailCallLocked("synchronize_device");
  std::vector<Position> positions;
  for (const auto& [key, stream] : streams().all) {
    if (key.first == device) positions.push_back(LastLocked(*stream));
  }
  lock.unlock();
  for (const Position& position : positions) Await(position);
}

bool QueryStream(Stream& stream) {
  Count(Call::kStreamQueries);
  Use(stream.device);
  Locked lock(MachineLock());
  CheckNoCaptureForbidsLocked("query_stream");
  ThrowIfFailedLocked(stream.device);
  return IsDoneLocked(LastLocked(stream));
}

Blocked::Blocked() {
  ++streams().blocked;
  streams().blocked_changed.notify_all();
}

Blocked::~Blocked() { --streams().blocked; }

int UntilBlocked(int count, int64_t timeout_ms) {
  Locked lock(MachineLock());
  streams().blocked_changed.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                                     [&] { return streams().blocked >= count; });
  return streams().blocked;
}

// ---- Steering -----------------------------------------------------------------------------------

void Hold(Stream& stream) {
  if (InBadFork()) return;
  Locked lock(MachineLock());
  stream.held = true;
  stream.steps = 0;
  stream.progress.wait(lock, [&] { return !stream.running; });
}

void Release(Stream& stream) {
  if (InBadFork()) return;  // nobody is there, and a condition variable may wait for who was
  Locked lock(MachineLock());
  stream.held = false;
  stream.work.notify_one();
}

void ReleaseAll() {
  if (InBadFork()) return;
  Locked lock(MachineLock());
  for (const auto& [key, stream] : streams().all) {
    stream->held = false;
    stream->work.notify_one();
  }
}

const char* Step(Stream& stream) {
  if (InBadFork()) return nullptr;
  Locked lock(MachineLock());
  if (!stream.held) return nullptr;
  // What the fake itself has queued comes first, and by itself.
  const auto internal_first = [&] {
    if (stream.queue.empty()) return false;
    const Task& task = stream.queue.front();
    return task.kind == Kind::kInternal && (!task.ready || task.ready());
  };
  stream.progress.wait(lock, [&] { return !stream.running && !internal_first(); });
  if (stream.queue.empty()) return nullptr;
  const Task& task = stream.queue.front();
  if (task.ready && !task.ready()) return nullptr;
  const char* const kind = Name(task.kind);
  const Position position{&stream, task.sequence};
  ++stream.steps;
  stream.work.notify_one();
  stream.progress.wait(lock, [&] { return IsDoneLocked(position); });
  return kind;
}

std::vector<const char*> Queued(Stream& stream) {
  Locked lock(MachineLock());
  std::vector<const char*> kinds;
  for (const Task& task : stream.queue) {
    if (task.kind != Kind::kInternal) kinds.push_back(Name(task.kind));
  }
  return kinds;
}

bool Drain(Stream& stream, int64_t timeout_ms) {
  if (InBadFork()) return false;
  Locked lock(MachineLock());
  const Position last = LastLocked(stream);
  return stream.progress.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                                  [&] { return IsDoneLocked(last); });
}

// ---- Capture ------------------------------------------------------------------------------------

void BeginCapture(Stream& stream, CaptureMode mode) {
  Locked lock(MachineLock());
  stream.capture = {true, false, mode, syscall(SYS_gettid)};
}

bool EndCapture(Stream& stream) {
  Locked lock(MachineLock());
  const bool intact = !stream.capture.invalidated;
  stream.capture = {};
  return intact;
}

void EndAllCaptures() {
  Locked lock(MachineLock());
  for (const auto& [key, stream] : streams().all) stream->capture = {};
}

void CheckNoCaptureForbidsLocked(const char* call) {
  for (const auto& [key, stream] : streams().all) {
    Capture& capture = stream->capture;
    if (!capture.active || capture.mode == CaptureMode::kRelaxed) continue;
    if (capture.mode == CaptureMode::kThreadLocal && capture.thread != syscall(SYS_gettid)) {
      continue;
    }
    if (!capture.invalidated) Count(Call::kCapturesInvalidated);
    capture.invalidated = true;
    ThrowAcceleratorError(std::string(call) + " is not permitted while a stream is capturing");
  }
}

// ---- For the machine ----------------------------------------------------------------------------

void FailDeviceLocked(int device, const std::string& message, std::vector<Task>& dropped) {
  SetErrorLocked(device, message);
  for (const auto& [key, stream] : streams().all) {
    if (key.first != device) continue;
    for (Task& task : stream->queue) {
      if (task.completion) FailedLocked(*task.completion, message);
      dropped.push_back(std::move(task));
    }
    stream->queue.clear();
    // What runs still uses the memory that its caller waits with.
    if (!stream->running) stream->finished = stream->submitted;
    stream->progress.notify_all();
  }
  FailHeldBackLocked(device, message);
}

void WakeWaitingStreamsLocked() {
  for (const auto& [key, stream] : streams().all) {
    if (!stream->queue.empty() && stream->queue.front().ready) stream->work.notify_one();
  }
}

void WaitUntilNothingRunsLocked(Locked& lock) {
  for (const auto& [key, stream] : streams().all) {
    stream->progress.wait(lock, [&running = stream->running] { return !running; });
  }
}

}  // namespace fake
