#include "dtorch/device/stream_watch.h"

#include "dtorch/base/fork.h"
#include "dtorch/base/log.h"
#include "dtorch/future/complete.h"
#include "dtorch/future/span.h"
#include "dtorch/sys/thread.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace dtorch {
namespace {

constexpr char kComponent[] = "device";  // of what is logged
constexpr std::chrono::milliseconds kIdle{1000};
// A callback that takes longer is taken for one that blocks.
constexpr std::chrono::milliseconds kPatience{20};

std::atomic<bool> exiting{false};

class StreamQueue : public std::enable_shared_from_this<StreamQueue> {
 public:
  explicit StreamQueue(c10::DeviceType type) : type_(type) {}

  void Push(std::vector<Event> events, std::unique_ptr<Completion> completion) {
    const Flow flow = Span("dtorch::fetch").flow();
    Log(LogLevel::kDebug, kComponent, "waiting for an event of ", type_);
    std::lock_guard<std::mutex> lock(mutex_);
    if (!serving_) NeedThread();  // first: without a thread nothing is left behind
    items_.push_back({std::move(events), std::move(completion), flow});
  }

 private:
  struct Item {
    std::vector<Event> events;
    std::unique_ptr<Completion> completion;
    Flow flow;
  };

  // With the lock.
  void NeedThread() {
    if (idle_ > 0) {
      ready_.notify_one();
      return;
    }
    StartThread([self = shared_from_this()] { self->Run(); });
    ++idle_;  // it counts as if it were waiting already
  }

  void Run() {
    if (auto prepare = EventFactoryOf(type_).prepare_thread) prepare();
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const bool needed =
          ready_.wait_for(lock, kIdle, [&] { return !serving_ && !items_.empty(); });
      --idle_;
      if (!needed) return;
      serving_ = true;
      Item item = std::move(items_.front());
      items_.pop_front();
      lock.unlock();
      Serve(std::move(item), lock);  // comes back with the lock
      ++idle_;
    }
  }

  void Serve(Item item, std::unique_lock<std::mutex>& lock) {
    std::exception_ptr error;
    try {
      const Span span("dtorch::wait_device");
      // The last first: one sleep for all.
      for (auto event = item.events.rbegin(); event != item.events.rend(); ++event) {
        event->Synchronize();
      }
    } catch (...) {
      error = std::current_exception();
    }
    // What the device says while it is taken down is nobody's business any more.
    if (exiting) SleepForEver();
    Log(error ? LogLevel::kError : LogLevel::kDebug, kComponent, "an event of ", type_,
        error ? " has failed" : " is reached");
    bool hands_over = item.completion->RunsCallbacks();
    std::shared_ptr<Callbacks> callbacks;
    if (hands_over) {
      lock.lock();
      if (callbacks_ && !callbacks_->blocks) {
        callbacks_->blocks =
            !ended_.wait_for(lock, kPatience, [before = callbacks_] { return before->ended; });
      }
      callbacks = callbacks_ = std::make_shared<Callbacks>();
      HandOver();
      lock.unlock();
    }
    {
      // A callback that is added in this moment is run by this thread, and may wait for what it
      // was to see to.
      std::optional<BeforeBlocking> before_blocking;
      if (!hands_over) {
        before_blocking.emplace([&] {
          std::lock_guard<std::mutex> unlocked(mutex_);
          if (!std::exchange(hands_over, true)) HandOver();
        });
      }
      const Span span("dtorch::arrive", item.flow);
      item.completion->Complete(std::move(error));
    }
    item.completion.reset();
    item.events.clear();
    lock.lock();
    if (!hands_over) {
      serving_ = false;
    } else if (callbacks) {
      callbacks->ended = true;
      ended_.notify_all();
    }
  }

  // With the lock: another thread is to go on.
  void HandOver() {
    serving_ = false;
    try {
      if (!items_.empty()) NeedThread();
    } catch (const std::exception&) {
      // This one comes back for them.
    }
  }

  // Those of one completion.
  struct Callbacks {
    bool ended = false;
    bool blocks = false;  // somebody has waited for their end for too long
  };

  const c10::DeviceType type_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable ready_;
  std::deque<Item> items_;
  bool serving_ = false;  // a thread waits for an event, or completes something that does not block
  std::shared_ptr<Callbacks> callbacks_;  // the last that were begun
  std::condition_variable ended_;
  int idle_ = 0;  // threads that wait for something to do, or are about to
};

struct Queues {
  std::mutex mutex;
  std::unordered_map<c10::Stream, std::shared_ptr<StreamQueue>> of_stream;
};

// Leaked on purpose: threads use it while static destructors run. A child has one of its own, since
// its parent's threads and locks are not there.
std::atomic<Queues*> queues{nullptr};

Queues& AllQueues() {
  static const bool once [[maybe_unused]] = [] {
    OnFork({.child = [] { queues.store(new Queues); }});
    std::atexit([] { exiting = true; });
    queues.store(new Queues);
    return true;
  }();
  return *queues.load();
}

}  // namespace

Completion::~Completion() = default;

void WhenReached(const c10::Stream& stream, std::vector<Event> events,
                 std::unique_ptr<Completion> completion) {
  Queues& all = AllQueues();
  std::shared_ptr<StreamQueue> queue;
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    auto& found = all.of_stream[stream];
    if (!found) found = std::make_shared<StreamQueue>(stream.device_type());
    queue = found;
  }
  queue->Push(std::move(events), std::move(completion));
}

}  // namespace dtorch
