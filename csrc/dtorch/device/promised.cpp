// Tensors of accelerators in promises: what promise/reservation.h leaves to this layer.

#include "dtorch/device/promised.h"

#include "dtorch/base/error.h"
#include "dtorch/base/fork.h"
#include "dtorch/device/async.h"
#include "dtorch/device/device.h"
#include "dtorch/device/stream_watch.h"
#include "dtorch/device/streams.h"
#include "dtorch/future/complete.h"
#include "dtorch/promise/promise_state.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <utility>

namespace dtorch {
namespace {

// Values that are on their way to other processes. Of this process: a child has none.
struct Leaving {
  std::mutex mutex;
  std::condition_variable arrived;
  size_t count = 0;
};

std::atomic<Leaving*> leaving{nullptr};

Leaving& AllLeaving() {
  static const bool once [[maybe_unused]] = [] {
    // Leaked on purpose: threads use it at exit, or have had its lock when the process was forked.
    OnFork({.child = [] { leaving.store(new Leaving); }});
    leaving.store(new Leaving);
    return true;
  }();
  return *leaving.load();
}

class Leave {
 public:
  explicit Leave(bool leaves) : all_(leaves ? &AllLeaving() : nullptr) {
    if (!all_) return;
    std::lock_guard<std::mutex> lock(all_->mutex);
    ++all_->count;
  }
  ~Leave() {
    if (!all_) return;
    std::lock_guard<std::mutex> lock(all_->mutex);
    if (--all_->count == 0) all_->arrived.notify_all();
  }
  Leave(const Leave&) = delete;
  Leave& operator=(const Leave&) = delete;

 private:
  Leaving* const all_;
};

class PromisedValue final : public Completion {
 public:
  PromisedValue(std::unique_ptr<Reservation> reservation, Transfer&& transfer, bool leaves)
      : leave_(leaves),
        reservation_(std::move(reservation)),
        value_(std::move(transfer.value)),
        keep_(std::move(transfer.keep)),
        finish_(std::move(transfer.finish)) {}

  ~PromisedValue() override {
    DropValue(std::move(value_));
    for (at::Tensor& tensor : keep_) DropValue(std::move(tensor));
  }

  bool RunsCallbacks() const override { return reservation_->RunsCallbacks(); }

  void Complete(std::exception_ptr error) noexcept override {
    try {
      if (!error && finish_) finish_();
    } catch (...) {
      error = std::current_exception();
    }
    try {
      error ? reservation_->SetError(std::move(error)) : reservation_->SetValue(value_);
    } catch (const std::exception&) {
      // Nobody is left who waits, or could be told.
    }
  }

 private:
  const Leave leave_;  // goes last
  const std::unique_ptr<Reservation> reservation_;
  at::Tensor value_;
  std::vector<at::Tensor> keep_;
  const std::function<void()> finish_;
};

void Fulfil(PromiseState& promise, const at::Tensor& value) {
  constexpr char kOp[] = "promise";
  CheckHasEvents(value.device(), kOp);
  const bool leaves = promise.LeavesProcess(value);
  (void)CurrentStream(value.device(), kOp);  // what would refuse it does so before it is reserved
  auto reservation = promise.Reserve(value.device());
  try {
    Transfer transfer =
        leaves ? FetchTo(value.detach(), c10::kCPU, kOp) : FetchHere(value, /*copy=*/false, kOp);
    const c10::Stream stream = transfer.stream;
    std::vector<Event> reached = std::move(transfer.reached);
    WhenReached(
        stream, std::move(reached),
        std::make_unique<PromisedValue>(std::move(reservation), std::move(transfer), leaves));
  } catch (...) {
    // Who waits is told as well.
    if (reservation) reservation->SetError(std::current_exception());
    throw;
  }
}

void Deliver(const FuturePtr& future, at::Tensor value, c10::Device device) {
  if (!HasDevice(device)) {
    CompleteWithValue(future, std::move(value));
  } else {
    CompleteFrom(future, FetchTo(value, device, "promise"));
  }
}

const bool registered [[maybe_unused]] = [] {
  SetAcceleratorValues({Fulfil, Deliver});
  return true;
}();

}  // namespace

bool FlushPromises(Deadline deadline) {
  Leaving& all = AllLeaving();
  std::unique_lock<std::mutex> lock(all.mutex);
  return all.arrived.wait_until(lock, deadline.when(), [&] { return all.count == 0; });
}

}  // namespace dtorch
