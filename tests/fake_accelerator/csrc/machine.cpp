#include "machine.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <new>
#include <optional>
#include <pthread.h>

#include "errors.h"
#include "stream.h"

namespace fake {

namespace {

struct Machine {
  std::mutex lock;
  std::array<std::optional<std::string>, kDevices> errors;
  bool exiting = false;
};

Machine& machine() {
  static Machine* const leaked = new Machine;
  return *leaked;
}

std::array<std::atomic<bool>, kDevices> contexts;
std::atomic<bool> initialized = false;
std::atomic<bool> bad_fork = false;

// Runs before the destructors of torch's static objects, which were constructed earlier: what is
// running may still need them, and nothing may be started that does.
void OnExit() {
  if (InBadFork()) return;  // the workers are the parent's
  Locked lock(MachineLock());
  machine().exiting = true;
  WaitUntilNothingRunsLocked(lock);
}

// A lock that was held by a thread which the child has not is made anew. It is not taken before the
// fork: no driver does so, and code under test that takes its own locks there could hang by it.
void AfterForkInChild() {
  if (initialized) bad_fork = true;
  new (&MachineLock()) std::mutex;
}

[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, AfterForkInChild);

}  // namespace

std::mutex& MachineLock() { return machine().lock; }

void Use(int device) {
  if (InBadFork()) {
    ThrowAcceleratorError(
        "Cannot re-initialize fake accelerator in forked subprocess. To use it with "
        "multiprocessing, use the 'spawn' start method");
  }
  if (device < 0 || device >= kDevices) {
    ThrowAcceleratorError("invalid device ordinal " + std::to_string(device));
  }
  contexts[device] = true;
  if (!initialized.exchange(true)) std::atexit(OnExit);
}

bool IsInitialized() { return initialized && !bad_fork; }
bool HasContext(int device) { return contexts.at(device) && !bad_fork; }
bool InBadFork() { return bad_fork; }
bool ExitingLocked() { return machine().exiting; }

void ThrowIfFailedLocked(int device) {
  if (const auto& error = machine().errors[device]) ThrowAcceleratorError(*error);
}

bool HasFailedLocked(int device) { return machine().errors[device].has_value(); }

void SetErrorLocked(int device, std::string message) {
  // The first one stays: what follows is its consequence.
  if (!HasFailedLocked(device)) machine().errors[device] = std::move(message);
}

void ResetErrorsLocked() { machine().errors = {}; }

}  // namespace fake
