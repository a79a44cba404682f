#include "dtorch/sys/process.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <system_error>
#include <unistd.h>

namespace dtorch {
namespace {

std::string ReadSmallFile(const char* path) {
  char buffer[1024];
  const Fd fd(open(path, O_RDONLY | O_CLOEXEC));
  const ssize_t size = fd ? read(fd.get(), buffer, sizeof(buffer)) : -1;
  if (size == 0) errno = ENOENT;
  return size > 0 ? std::string(buffer, static_cast<size_t>(size)) : std::string();
}

}  // namespace

ProcessId ThisProcess() {
  // Not getpid(): in a PID namespace with the /proc of another one it would name somebody else.
  char link[32] = {};
  const ssize_t size = readlink("/proc/self", link, sizeof(link) - 1);
  const auto pid = size > 0 ? static_cast<uint32_t>(strtoul(link, nullptr, 10))
                            : static_cast<uint32_t>(getpid());
  // Half of it would name a process that has ended.
  const auto found = FindProcess(pid);
  if (!found) throw std::system_error(errno, std::generic_category(), "reading /proc/self/stat");
  return *found;
}

std::optional<ProcessId> FindProcess(uint32_t pid) {
  const std::string stat = ReadSmallFile(("/proc/" + std::to_string(pid) + "/stat").c_str());
  if (stat.empty()) return std::nullopt;
  errno = EPROTO;
  // The name, in parentheses, may hold anything. The start time is the 20th field behind it.
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  size_t at = name_end + 1;
  for (int field = 0; field < 20; ++field) {
    at = stat.find(' ', at + (field > 0));
    if (at == std::string::npos) return std::nullopt;
  }
  const auto start = strtoull(stat.c_str() + at + 1, nullptr, 10);
  return ProcessId{pid, static_cast<uint32_t>(start)};
}

Fd WatchProcess(ProcessId process) {
  Fd fd(static_cast<int>(syscall(SYS_pidfd_open, process.pid, 0)));
  if (!fd) {
    if (errno == EINVAL) errno = ESRCH;  // no number of a process
    return fd;
  }
  // Opened first, compared then: the descriptor stays with the process that it was opened for.
  const auto found = FindProcess(process.pid);
  if (found && *found == process) return fd;
  // No descriptor to be had for reading, say, is no word of its death.
  if (found || errno == ENOENT) errno = ESRCH;
  return Fd();
}

Fd WatchDescriptor(ProcessId process, int number, uint64_t inode) {
  const std::string path = "/proc/" + std::to_string(process.pid) + "/fd/" + std::to_string(number);
  // Looked at before it is opened: the number may be another file's by now, a device's, say.
  const Fd found(open(path.c_str(), O_PATH | O_CLOEXEC));
  struct stat info{};
  if (!found || fstat(found.get(), &info) != 0) {
    // Not there, if we may look.
    const std::string all = "/proc/" + std::to_string(process.pid) + "/fd";
    if (errno == ENOENT) errno = access(all.c_str(), R_OK | X_OK) == 0 ? ESRCH : EACCES;
    return Fd();
  }
  if (!S_ISFIFO(info.st_mode) || info.st_ino != inode) {
    errno = ESRCH;
    return Fd();
  }
  const std::string link = "/proc/self/fd/" + std::to_string(found.get());
  return Fd(open(link.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
}

bool ProcIsOurs() {
  char link[32] = {};
  const ssize_t size = readlink("/proc/self", link, sizeof(link) - 1);
  return size > 0 && strtol(link, nullptr, 10) == getpid();
}

uint64_t PidNamespace() {
  struct stat info{};
  return stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

}  // namespace dtorch
