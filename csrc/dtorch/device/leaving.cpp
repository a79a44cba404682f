#include "dtorch/device/leaving.h"

#include "dtorch/base/fork.h"

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace dtorch {

struct AllLeaving {
  std::mutex mutex;
  std::condition_variable arrived;
  size_t count = 0;
};

namespace {

// Of this process: a child has none.
std::atomic<AllLeaving*> all_leaving{nullptr};

// When the library is loaded: a fork beside the first use would find the handler half registered.
// Leaked on purpose: threads use it at exit, or have had its lock when the process was forked.
const bool registered [[maybe_unused]] = [] {
  OnFork({.child = [] { all_leaving.store(new AllLeaving); }});
  all_leaving.store(new AllLeaving);
  return true;
}();

AllLeaving& All() { return *all_leaving.load(); }

}  // namespace

Leave::Leave(bool leaves) : all_(leaves ? &All() : nullptr) {
  if (!all_) return;
  std::lock_guard<std::mutex> lock(all_->mutex);
  ++all_->count;
}

Leave::~Leave() {
  if (!all_) return;
  std::lock_guard<std::mutex> lock(all_->mutex);
  if (--all_->count == 0) all_->arrived.notify_all();
}

bool FlushPromises(Deadline deadline) {
  AllLeaving& all = All();
  std::unique_lock<std::mutex> lock(all.mutex);
  return all.arrived.wait_until(lock, deadline.when(), [&] { return all.count == 0; });
}

}  // namespace dtorch
