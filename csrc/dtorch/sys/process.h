#pragma once

#include "dtorch/base/api.h"
#include "dtorch/sys/fd.h"

#include <cstdint>
#include <optional>
#include <string>

namespace dtorch {

/// One process, told apart from a later one with the same pid by when it was started.
struct ProcessId {
  uint32_t pid = 0;
  uint32_t start = 0;  // low bits of the start time, in clock ticks since boot

  bool operator==(const ProcessId&) const = default;
  uint64_t ToWord() const { return uint64_t{pid} << 32 | start; }
  static ProcessId FromWord(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word)};
  }
};

/// This process, asked anew at each call: a fork changes it. std::system_error if /proc does not
/// tell, for want of a descriptor, say.
DTORCH_API ProcessId ThisProcess();

/// The process that has `pid` now; nullopt if none (errno is then ENOENT or ESRCH), or if /proc
/// does not tell.
DTORCH_API std::optional<ProcessId> FindProcess(uint32_t pid);

/// What becomes readable when the process ends. Empty if it has ended already, or if the pid is
/// another's by now; errno is then ESRCH. Empty with another errno: it cannot be watched.
DTORCH_API Fd WatchProcess(ProcessId process);

/// What hangs up when a pipe's last writer closes it, or goes: the pipe that is open as descriptor
/// `number` in another process of this user, if its inode is `inode`. Unlike WatchProcess() it
/// tells of exec, too, if the descriptor closes then. Empty, and errno set, as there; EACCES if
/// that process does not show its descriptors to this one, or has ended.
DTORCH_API Fd WatchDescriptor(ProcessId process, int number, uint64_t inode);

/// The inode of this process's PID namespace: a pid means something only inside of one.
DTORCH_API uint64_t PidNamespace();

/// Whether /proc shows this process's own PID namespace: it names others otherwise.
DTORCH_API bool ProcIsOurs();

}  // namespace dtorch
