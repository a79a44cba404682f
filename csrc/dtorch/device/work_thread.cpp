#include "dtorch/device/work_thread.h"

#include "dtorch/base/fork.h"
#include "dtorch/sys/thread.h"

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <mutex>
#include <utility>

namespace dtorch {
namespace {

constexpr std::chrono::milliseconds kIdle{1000};

std::atomic<bool> exiting{false};

class WorkThread {
 public:
  void Run(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!runs_) StartThread([this] { Serve(); });  // first: without a thread nothing is left behind
    runs_ = true;
    works_.push_back(std::move(work));
    pushed_.notify_one();
  }

 private:
  void Serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (pushed_.wait_for(lock, kIdle, [&] { return !works_.empty(); })) {
      std::function<void()> work = std::move(works_.front());
      works_.pop_front();
      lock.unlock();
      if (exiting) SleepForEver();  // a driver may be half gone
      try {
        work();
      } catch (const std::exception&) {
        // Whoever has to be told is told by the work.
      }
      work = nullptr;
      lock.lock();
    }
    runs_ = false;
  }

  std::mutex mutex_;
  std::condition_variable pushed_;
  std::deque<std::function<void()>> works_;
  bool runs_ = false;
};

// By kind. Leaked on purpose: at exit, and in a child, whose parent's may have been locked.
using Threads = std::array<WorkThread, 2>;
std::atomic<Threads*> current{nullptr};

// When the library is loaded: a fork beside the first use would find the handler half registered.
const bool registered [[maybe_unused]] = [] {
  OnFork({.child = [] { current.store(new Threads); }});
  current.store(new Threads);
  std::atexit([] { exiting = true; });
  return true;
}();

}  // namespace

void RunInWorkThread(Work kind, std::function<void()> work) {
  (*current.load())[static_cast<size_t>(kind)].Run(std::move(work));
}

}  // namespace dtorch
