#include "dtorch/device/async.h"

#include "dtorch/device/device.h"
#include "dtorch/device/leaving.h"
#include "dtorch/device/places.h"
#include "dtorch/device/stream_watch.h"
#include "dtorch/device/streams.h"
#include "dtorch/future/complete.h"

#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

namespace dtorch {
namespace {

// To the value, or the values, of `reservation`.
void SetValue(Reservation& reservation, c10::IValue value, at::TensorList tensors) {
  // Torch records an event on the current stream of each device, for which the consumers wait. That
  // of this thread would be the default one, behind all that the user has given it since.
  std::vector<c10::Stream> idle;
  for (const at::Tensor& tensor : tensors) {
    const c10::Device device = tensor.device();
    const bool known = std::any_of(idle.begin(), idle.end(), [&](const c10::Stream& stream) {
      return stream.device() == device;
    });
    if (IsAccelerator(device) && !known) idle.push_back(IdleStream(device));
  }
  const c10::MultiStreamGuard all(idle);
  std::optional<c10::StreamGuard> first;  // callbacks find that device current
  if (!idle.empty()) first.emplace(idle.front());
  // It would do so with the future half complete: a device that refuses shall do so before.
  for (const c10::Stream& stream : idle) {
    const Event tried(stream);
  }
  reservation.SetValue(std::move(value));
}

void DropValues(std::vector<at::Tensor>& values) {
  for (at::Tensor& value : values) DropValue(std::move(value));
}

class TransferCompletion final : public Completion {
 public:
  TransferCompletion(Transfer&& transfer, std::unique_ptr<Reservation> reservation,
                     Destination destination)
      : leave_(destination == Destination::kOtherProcess),
        reservation_(std::move(reservation)),
        values_(std::move(transfer.values)),
        keep_(std::move(transfer.keep)),
        finish_(std::move(transfer.finish)) {}
  ~TransferCompletion() override {
    finish_ = nullptr;  // it has tensors too
    DropValues(values_);
    DropValues(keep_);
  }

  bool RunsCallbacks() const override { return reservation_->RunsCallbacks(); }

  void Complete(std::exception_ptr error) noexcept override {
    try {
      if (error) std::rethrow_exception(error);
      if (finish_) std::exchange(finish_, nullptr)();
      SetValue(*reservation_, values_.front(), values_);
    } catch (...) {
      SetErrorOf(*reservation_, std::current_exception());
    }
  }

 private:
  const Leave leave_;  // goes last
  const std::unique_ptr<Reservation> reservation_;
  std::vector<at::Tensor> values_;
  std::vector<at::Tensor> keep_;
  std::function<void()> finish_;
};

// Of something that waits for several streams: what they fulfil together, when the last one is
// there, or with the first error.
class Whole {
 public:
  Whole(std::unique_ptr<Reservation> reservation, size_t parts, bool leaves = false)
      : leave_(leaves), reservation_(std::move(reservation)), left_(parts) {}
  virtual ~Whole() = default;

  bool RunsCallbacks() const { return reservation_->RunsCallbacks(); }

  // Once for each part, in any thread.
  void EndPart(std::exception_ptr error) noexcept {
    try {
      const bool first_error = error && !failed_.exchange(true);
      if (first_error) SetErrorOf(*reservation_, std::move(error));
      if (--left_ == 0 && !failed_) Set(*reservation_);
    } catch (...) {
      SetErrorOf(*reservation_, std::current_exception());
    }
  }

 protected:
  virtual void Set(Reservation& reservation) { reservation.SetValue(c10::IValue()); }

 private:
  const Leave leave_;  // goes last
  const std::unique_ptr<Reservation> reservation_;
  std::atomic<size_t> left_;
  std::atomic<bool> failed_{false};
};

class WholeList final : public Whole {
 public:
  WholeList(std::unique_ptr<Reservation> reservation, size_t parts, std::vector<at::Tensor> values)
      : Whole(std::move(reservation), parts), values_(std::move(values)) {}
  ~WholeList() override { DropValues(values_); }

 private:
  void Set(Reservation& reservation) override { SetValue(reservation, values_, values_); }

  std::vector<at::Tensor> values_;
};

class PartCompletion : public Completion {
 public:
  explicit PartCompletion(std::shared_ptr<Whole> whole) : whole_(std::move(whole)) {}

  bool RunsCallbacks() const override { return whole_->RunsCallbacks(); }
  void Complete(std::exception_ptr error) noexcept override { whole_->EndPart(std::move(error)); }

 private:
  const std::shared_ptr<Whole> whole_;
};

class TransferPartCompletion final : public PartCompletion {
 public:
  TransferPartCompletion(std::shared_ptr<Whole> whole, TransferPart&& part)
      : PartCompletion(std::move(whole)), part_(std::move(part)) {}
  ~TransferPartCompletion() override {
    part_.transfer.finish = nullptr;  // it has tensors too
    DropValues(part_.transfer.values);
    DropValues(part_.transfer.keep);
  }

  void Complete(std::exception_ptr error) noexcept override {
    try {
      if (error) {
        error = WithPlaces(std::move(error), part_.places);
      } else if (auto finish = std::exchange(part_.transfer.finish, nullptr)) {
        finish();
      }
    } catch (...) {
      error = std::current_exception();
    }
    PartCompletion::Complete(std::move(error));
  }

 private:
  TransferPart part_;
};

FuturePtr PendingFuture(c10::TypePtr type, at::TensorList values) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& value : values) {
    const c10::Device device = value.device();
    if (!IsAccelerator(device)) continue;
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  auto future = c10::make_intrusive<c10::ivalue::Future>(std::move(type), std::move(devices));
  PrepareForWaiters(future, Origin::kPromised);
  return future;
}

}  // namespace

void Start(Transfer transfer, std::unique_ptr<Reservation> reservation, Destination destination) {
  const c10::Stream stream = transfer.stream;
  std::vector<Event> reached = std::move(transfer.reached);
  WhenReached(stream, std::move(reached),
              std::make_unique<TransferCompletion>(std::move(transfer), std::move(reservation),
                                                   destination));
}

FuturePtr FutureOf(Transfer transfer) {
  FuturePtr future = PendingFuture(c10::TensorType::get(), transfer.values);
  Start(std::move(transfer), ReserveFuture(future));
  return future;
}

FuturePtr FutureOf(std::vector<TransferPart> parts, std::vector<at::Tensor> values) {
  FuturePtr future = PendingFuture(c10::ListType::ofTensors(), values);
  auto whole = std::make_shared<WholeList>(ReserveFuture(future), parts.size(), std::move(values));
  for (TransferPart& part : parts) {
    const c10::Stream stream = part.transfer.stream;
    std::vector<Event> reached = std::move(part.transfer.reached);
    WhenReached(stream, std::move(reached),
                std::make_unique<TransferPartCompletion>(whole, std::move(part)));
  }
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
  const bool leaves = promise.LeavesProcess();
  auto whole = std::make_shared<Whole>(promise.Reserve(), parts.size(), leaves);
  for (auto& [stream, reached] : parts) {
    WhenReached(stream, std::move(reached), std::make_unique<PartCompletion>(whole));
  }
}

}  // namespace dtorch
