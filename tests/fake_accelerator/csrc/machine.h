#pragma once

#include <mutex>
#include <string>

// The machine as a whole: its lock, which devices are initialised, fork and exit.
//
// One lock guards everything that is simulated: queues, events, memory, what a test has asked for.
// That makes a device slow and its order of events obvious, which is what tests want. No tensor is
// made or dropped, and nothing of torch but an exception is called, with the lock held.
//
// Nothing here is ever destroyed: threads may use it until the last instruction of the process.
namespace fake {

constexpr int kDevices = 4;

/// Guards the machine. Functions named ...Locked want it held by the caller.
std::mutex& MachineLock();
using Locked = std::unique_lock<std::mutex>;

/// Initialises `device` if it is not, which starts no thread yet. Throws in a forked child of a
/// process that had initialised one, as CUDA does, and for an index that there is not.
void Use(int device);

/// Asking initialises nothing. Both are false in a forked child of a process for which
/// one was true: it can use nothing of it.
bool IsInitialized();
bool HasContext(int device);

/// In a forked child of a process that had initialised a device: all use is an error.
bool InBadFork();

/// The process is leaving: no worker may start anything any more. With the lock held.
bool ExitingLocked();

// ---- A device's sticky error --------------------------------------------------------------------

/// Throws what has failed on `device`, if anything has. Every call does, as with CUDA, until
/// ResetErrors().
void ThrowIfFailedLocked(int device);
bool HasFailedLocked(int device);
void SetErrorLocked(int device, std::string message);
void ResetErrorsLocked();

}  // namespace fake
