#include "dtorch/network/timer.h"

#include "dtorch/base/fork.h"
#include "dtorch/sys/thread.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

namespace dtorch::network {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kSpare{2};  // how long the thread stays when it has nothing to do

struct Timer {
  std::mutex mutex;
  std::condition_variable changed;
  std::multimap<Clock::time_point, std::function<void()>> planned;
  bool running = false;
  bool stopped = false;

  void Run() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      if (stopped) SleepWithout(lock);
      const auto now = Clock::now();
      if (!planned.empty() && planned.begin()->first <= now) {
        const auto work = std::move(planned.begin()->second);
        planned.erase(planned.begin());
        lock.unlock();
        try {
          work();
        } catch (const std::exception&) {
        }
        lock.lock();
        continue;
      }
      if (!planned.empty()) {
        changed.wait_until(lock, planned.begin()->first);
      } else if (changed.wait_for(lock, kSpare) == std::cv_status::timeout && planned.empty()) {
        running = false;
        return;
      }
    }
  }

  static void SleepWithout(std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    SleepForEver();
  }
};

Timer* timer = new Timer;  // leaked on purpose

const bool registered [[maybe_unused]] = [] {
  OnFork({.child = [] { timer = new Timer; }});  // what the other one would do is the parent's
  return true;
}();

void StopAtExit() {
  static const bool once [[maybe_unused]] = [] {
    std::atexit([] {
      std::lock_guard<std::mutex> lock(timer->mutex);
      timer->stopped = true;
    });
    return true;
  }();
}

}  // namespace

void RunAfter(int64_t ms, std::function<void()> work) {
  StopAtExit();
  std::lock_guard<std::mutex> lock(timer->mutex);
  timer->planned.emplace(Clock::now() + std::chrono::milliseconds(ms), std::move(work));
  timer->changed.notify_one();
  if (timer->running) return;
  try {
    StartThread([of = timer] { of->Run(); }, "dtorch_network");
    timer->running = true;
  } catch (const std::exception&) {
  }
}

}  // namespace dtorch::network
