#pragma once

#include "dtorch/base/api.h"

#include <atomic>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

// What the library says of its own doings, if it is asked to: by DTORCH_LOG in the environment of a
// C++ program, whose stderr it goes to, or by the host, which takes it from a queue. Nobody who
// logs waits for whoever reads: not for the host's lock, either. Thread-safe.
namespace dtorch {

/// With Python's numbers.
enum class LogLevel : int { kDebug = 10, kInfo = 20, kWarning = 30, kError = 40, kOff = 50 };

/// From which level on anything is said. 0: the environment was not looked at yet.
DTORCH_API extern std::atomic<int> log_from;

/// Writes, or queues. Not for calling: use Log().
DTORCH_API void WriteLog(LogLevel level, const char* component, std::string text);

/// Says `parts`, one after the other. `component`: what is behind dtorch_ops in the logger's name;
/// for ever. Costs one look at a variable if nothing is to be said. Never throws.
template <typename... Parts>
void Log(LogLevel level, const char* component, const Parts&... parts) noexcept {
  if (static_cast<int>(level) < log_from.load(std::memory_order_relaxed)) return;
  try {
    std::ostringstream text;
    (text << ... << parts);
    WriteLog(level, component, text.str());
  } catch (const std::exception&) {
    // No memory: what is logged is the last to need it.
  }
}

/// For the host: from now on `level` and above go to the queue. kOff: nothing does, and what is
/// in it stays for NextLogMessages().
DTORCH_API void QueueLog(LogLevel level);

struct LogMessage {
  LogLevel level;
  const char* component;
  std::string text;
  double when;  // seconds since the epoch
  int thread;   // as the kernel numbers it
};

/// Blocks until there are some, or until CloseLog(): then it returns what is left, and afterwards
/// none. Of more than 10,000 that wait, the newest are lost, and their number is told. To be called
/// with the host's lock dropped. A forked child's queue is its own, and empty.
DTORCH_API std::vector<LogMessage> NextLogMessages();
DTORCH_API void CloseLog();
DTORCH_API void OpenLog();

}  // namespace dtorch
