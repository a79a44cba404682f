#include "dtorch/promise/reservation.h"

#include "dtorch/base/error.h"
#include "dtorch/future/complete.h"

#include <utility>

namespace dtorch {
namespace {
AcceleratorValues accelerator_values;

class ReservedFuture final : public Reservation {
 public:
  explicit ReservedFuture(FuturePtr future) : future_(std::move(future)) {}
  ~ReservedFuture() override {
    if (!future_->completed()) {
      CompleteWithError(future_, std::make_exception_ptr(BrokenPromiseError(
                                     "the value that the promise was given could not be had")));
    }
    ReleaseFuture(std::move(future_));
  }
  void SetValue(c10::IValue value) override { CompleteWithValue(future_, std::move(value)); }
  void SetError(std::exception_ptr error) override { CompleteWithError(future_, std::move(error)); }
  bool RunsCallbacks() const override { return dtorch::RunsCallbacks(future_); }

 private:
  FuturePtr future_;
};

}  // namespace

Reservation::~Reservation() = default;
RemoteMemory::~RemoteMemory() = default;

void SetErrorOf(Reservation& reservation, std::exception_ptr error) noexcept {
  try {
    reservation.SetError(std::move(error));
  } catch (const std::exception&) {
    try {
      reservation.SetError(std::make_exception_ptr(DTorchError("no memory for the value")));
    } catch (const std::exception&) {
    }
  }
}

std::unique_ptr<Reservation> ReserveFuture(FuturePtr future) {
  return std::make_unique<ReservedFuture>(std::move(future));
}

void SetAcceleratorValues(AcceleratorValues values) { accelerator_values = values; }
const AcceleratorValues& GetAcceleratorValues() { return accelerator_values; }

}  // namespace dtorch
