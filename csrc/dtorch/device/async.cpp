#include "dtorch/device/async.h"

#include "dtorch/device/device.h"
#include "dtorch/device/leaving.h"
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

class TransferCompletion final : public Completion {
 public:
  TransferCompletion(Transfer&& transfer, std::unique_ptr<Reservation> reservation,
                     Destination destination)
      : leave_(destination == Destination::kOtherProcess),
        reservation_(std::move(reservation)),
        value_(std::move(transfer.value)),
        keep_(std::move(transfer.keep)),
        finish_(std::move(transfer.finish)) {}
  ~TransferCompletion() override {
    finish_ = nullptr;  // it has tensors too
    DropValue(std::move(value_));
    for (at::Tensor& tensor : keep_) DropValue(std::move(tensor));
  }

  bool RunsCallbacks() const override { return reservation_->RunsCallbacks(); }

  void Complete(std::exception_ptr error) noexcept override {
    try {
      if (error) std::rethrow_exception(error);
      if (finish_) std::exchange(finish_, nullptr)();
      std::optional<c10::StreamGuard> idle;
      if (IsAccelerator(value_.device())) {
        // Torch records an event on the current stream, for which the consumers wait. That of this
        // thread would be the default one, behind all that the user has given it since.
        const c10::Stream stream = IdleStream(value_.device());
        idle.emplace(stream);
        // It would do so with the future half complete: a device that refuses shall do so before.
        const Event tried(stream);
      }
      reservation_->SetValue(value_);
    } catch (...) {
      SetErrorOf(*reservation_, std::current_exception());
    }
  }

 private:
  const Leave leave_;  // goes last
  const std::unique_ptr<Reservation> reservation_;
  at::Tensor value_;
  std::vector<at::Tensor> keep_;
  std::function<void()> finish_;
};

// Of something that waits for several streams.
class PartCompletion final : public Completion {
 public:
  struct Whole {
    Whole(VoidPromiseState& promise, size_t parts)
        : leave(promise.LeavesProcess()), reservation(promise.Reserve()), left(parts) {}
    const Leave leave;  // goes last
    const std::unique_ptr<Reservation> reservation;
    std::atomic<size_t> left;
    std::atomic<bool> failed{false};
  };
  explicit PartCompletion(std::shared_ptr<Whole> whole) : whole_(std::move(whole)) {}

  bool RunsCallbacks() const override { return whole_->reservation->RunsCallbacks(); }

  void Complete(std::exception_ptr error) noexcept override {
    try {
      const bool first_error = error && !whole_->failed.exchange(true);
      if (first_error) SetErrorOf(*whole_->reservation, std::move(error));
      if (--whole_->left == 0 && !whole_->failed) whole_->reservation->SetValue(c10::IValue());
    } catch (...) {
      SetErrorOf(*whole_->reservation, std::current_exception());
    }
  }

 private:
  const std::shared_ptr<Whole> whole_;
};

}  // namespace

void Start(Transfer transfer, std::unique_ptr<Reservation> reservation, Destination destination) {
  const c10::Stream stream = transfer.stream;
  std::vector<Event> reached = std::move(transfer.reached);
  WhenReached(stream, std::move(reached),
              std::make_unique<TransferCompletion>(std::move(transfer), std::move(reservation),
                                                   destination));
}

FuturePtr FutureOf(Transfer transfer) {
  std::vector<c10::Device> devices;
  if (!transfer.value.is_cpu()) devices.push_back(transfer.value.device());
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), std::move(devices));
  PrepareForWaiters(future, Origin::kPromised);
  Start(std::move(transfer), ReserveFuture(future));
  return future;
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
  auto whole = std::make_shared<PartCompletion::Whole>(promise, parts.size());
  for (auto& [stream, reached] : parts) {
    WhenReached(stream, std::move(reached), std::make_unique<PartCompletion>(whole));
  }
}

}  // namespace dtorch
