#include "dtorch/device/async.h"

#include "dtorch/device/stream_watch.h"
#include "dtorch/device/streams.h"
#include "dtorch/future/complete.h"

#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>

#include <atomic>
#include <optional>
#include <utility>

namespace dtorch {
namespace {

class ValueCompletion final : public Completion {
 public:
  ValueCompletion(FuturePtr future, Transfer&& transfer)
      : future_(std::move(future)),
        value_(std::move(transfer.value)),
        keep_(std::move(transfer.keep)),
        finish_(std::move(transfer.finish)) {}
  ~ValueCompletion() override {
    DropValue(std::move(value_));
    for (at::Tensor& tensor : keep_) DropValue(std::move(tensor));
    ReleaseFuture(std::move(future_));
  }

  bool RunsCallbacks() const override { return dtorch::RunsCallbacks(future_); }

  void Complete(std::exception_ptr error) noexcept override {
    try {
      if (error) std::rethrow_exception(error);
      if (finish_) finish_();
      std::optional<c10::StreamGuard> idle;
      // Torch records an event on the current stream, for which the consumers wait. That of this
      // thread would be the default one, behind all that the user has given it since.
      if (!future_->devices().empty()) idle.emplace(IdleStream(value_.device()));
      CompleteWithValue(future_, value_);
    } catch (...) {
      CompleteWithError(future_, std::current_exception());
    }
  }

 private:
  FuturePtr future_;
  at::Tensor value_;
  std::vector<at::Tensor> keep_;
  const std::function<void()> finish_;
};

// Of something that waits for several streams.
class PartCompletion final : public Completion {
 public:
  struct Whole {
    std::unique_ptr<Reservation> reservation;
    std::atomic<size_t> left;
    std::atomic<bool> failed{false};
  };
  explicit PartCompletion(std::shared_ptr<Whole> whole) : whole_(std::move(whole)) {}

  bool RunsCallbacks() const override { return whole_->reservation->RunsCallbacks(); }

  void Complete(std::exception_ptr error) noexcept override {
    try {
      const bool first_error = error && !whole_->failed.exchange(true);
      if (first_error) whole_->reservation->SetError(std::move(error));
      if (--whole_->left == 0 && !whole_->failed) whole_->reservation->SetValue(c10::IValue());
    } catch (const std::exception&) {
      // Nobody is left who waits.
    }
  }

 private:
  const std::shared_ptr<Whole> whole_;
};

}  // namespace

FuturePtr FutureOf(Transfer transfer) {
  std::vector<c10::Device> devices;
  if (!transfer.value.is_cpu()) devices.push_back(transfer.value.device());
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), std::move(devices));
  PrepareForWaiters(future, Origin::kPromised);
  CompleteFrom(future, std::move(transfer));
  return future;
}

void CompleteFrom(const FuturePtr& future, Transfer transfer) {
  const c10::Stream stream = transfer.stream;
  std::vector<Event> reached = std::move(transfer.reached);
  WhenReached(stream, std::move(reached),
              std::make_unique<ValueCompletion>(future, std::move(transfer)));
}

FuturePtr SyncAccelerators(const std::vector<c10::Device>& devices, const char* op) {
  VoidPromiseState promise(PromiseMode::kMemory);
  SyncAccelerators(devices, op, promise);
  return promise.future();
}

void SyncAccelerators(const std::vector<c10::Device>& devices, const char* op,
                      VoidPromiseState& promise) {
  std::vector<std::pair<c10::Stream, std::vector<Event>>> parts;
  for (const c10::Device device : devices) {
    const c10::Stream stream = CurrentStream(device, op);
    parts.emplace_back(stream, std::vector<Event>()).second.emplace_back(stream);
  }
  auto whole = std::make_shared<PartCompletion::Whole>(promise.Reserve(), parts.size());
  for (auto& [stream, reached] : parts) {
    WhenReached(stream, std::move(reached), std::make_unique<PartCompletion>(whole));
  }
}

}  // namespace dtorch
