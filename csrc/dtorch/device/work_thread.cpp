#include "dtorch/device/work_thread.h"

#include "dtorch/base/fork.h"
#include "dtorch/sys/thread.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <utility>

namespace dtorch {
namespace {

constexpr std::chrono::milliseconds kIdle{1000};

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

std::atomic<WorkThread*> current{nullptr};

WorkThread& Current() {
  // Leaked on purpose: at exit, and in a child, whose parent's may have been locked.
  static const bool once [[maybe_unused]] = [] {
    OnFork({.child = [] { current.store(new WorkThread); }});
    current.store(new WorkThread);
    return true;
  }();
  return *current.load();
}

}  // namespace

void RunInWorkThread(std::function<void()> work) { Current().Run(std::move(work)); }

}  // namespace dtorch
