#include "dtorch/base/log.h"

#include "dtorch/base/fork.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <strings.h>
#include <unistd.h>
#include <utility>

namespace dtorch {

std::atomic<int> log_from{0};

namespace {

constexpr size_t kMost = 10'000;

struct Queue {
  std::mutex mutex;
  std::condition_variable pushed;
  std::vector<LogMessage> messages;
  size_t lost = 0;
  bool closed = false;
};

// Leaked on purpose: threads log at exit. A child's is new, since its parent's may be locked.
std::atomic<Queue*> queue{nullptr};
std::atomic<bool> queues{false};  // or writes to stderr

const bool registered [[maybe_unused]] = [] {
  OnFork({.child = [] { queue.store(new Queue); }});
  queue.store(new Queue);
  return true;
}();

struct Name {
  const char* text;
  LogLevel level;
};
constexpr std::array<Name, 4> kNames{{{"debug", LogLevel::kDebug},
                                      {"info", LogLevel::kInfo},
                                      {"warning", LogLevel::kWarning},
                                      {"error", LogLevel::kError}}};

// In one call, so that lines of several threads stay whole.
void WriteLine(const std::string& line) {
  (void)!write(STDERR_FILENO, (line + "\n").c_str(), line.size() + 1);
}

// Of a program without a host that has said what it wants.
void ReadEnvironment() {
  int level = static_cast<int>(LogLevel::kOff);
  const char* wanted = std::getenv("DTORCH_LOG");
  if (wanted && *wanted) {
    const auto* name = std::find_if(kNames.begin(), kNames.end(), [&](const Name& each) {
      return strcasecmp(each.text, wanted) == 0;
    });
    if (name != kNames.end()) level = static_cast<int>(name->level);
    if (name == kNames.end()) {
      WriteLine(
          std::string("dtorch_ops: DTORCH_LOG: expected debug, info, warning or error, got '") +
          wanted + "': nothing is logged");
    }
  }
  int unread = 0;
  log_from.compare_exchange_strong(unread, level);
}

}  // namespace

void WriteLog(LogLevel level, const char* component, std::string text) {
  if (log_from.load() == 0) {
    static std::once_flag once;
    std::call_once(once, ReadEnvironment);
    if (static_cast<int>(level) < log_from.load()) return;
  }
  if (!queues.load()) {
    const auto* name = std::find_if(kNames.begin(), kNames.end(),
                                    [&](const Name& each) { return each.level == level; });
    WriteLine("dtorch_ops." + std::string(component) + " " + name->text + " [" +
              std::to_string(gettid()) + "]: " + text);
    return;
  }
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  Queue& to = *queue.load();
  std::lock_guard<std::mutex> lock(to.mutex);
  if (to.messages.size() >= kMost) {
    ++to.lost;
    return;
  }
  to.messages.push_back({level, component, std::move(text), now.count(), gettid()});
  to.pushed.notify_one();
}

void QueueLog(LogLevel level) {
  queues.store(true);
  log_from.store(static_cast<int>(level));
}

std::vector<LogMessage> NextLogMessages() {
  Queue& from = *queue.load();
  std::unique_lock<std::mutex> lock(from.mutex);
  from.pushed.wait(lock, [&] { return from.closed || !from.messages.empty(); });
  if (const size_t lost = std::exchange(from.lost, 0)) {
    const LogMessage& last = from.messages.back();
    from.messages.push_back({LogLevel::kWarning, last.component,
                             std::to_string(lost) + " messages were lost: there were too many",
                             last.when, last.thread});
  }
  return std::exchange(from.messages, {});
}

void CloseLog() {
  Queue& all = *queue.load();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.closed = true;
  all.pushed.notify_all();
}

void OpenLog() {
  Queue& all = *queue.load();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.closed = false;
}

}  // namespace dtorch
