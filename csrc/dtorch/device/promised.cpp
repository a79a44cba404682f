// Tensors of accelerators in promises: what promise/reservation.h leaves to this layer.

#include "dtorch/device/async.h"
#include "dtorch/device/device.h"
#include "dtorch/device/sharing.h"
#include "dtorch/device/streams.h"
#include "dtorch/promise/promise_state.h"

#include <utility>

namespace dtorch {
namespace {

constexpr char kOp[] = "promise";

void Fulfil(PromiseState& promise, const at::Tensor& value) {
  CheckHasEvents(value.device(), kOp);
  promise.CheckValue(value);
  (void)CurrentStream(value.device(), kOp);  // what would refuse it does so before it is reserved
  const bool leaves = promise.LeavesProcess();
  auto reservation = promise.Reserve(value.device());
  try {
    if (leaves && reservation->remote_memory() && CanShare(value)) {
      StartSharing(value.detach(), reservation, kOp);
      return;
    }
    Transfer transfer =
        leaves ? FetchTo(value.detach(), c10::kCPU, kOp) : FetchHere(value, /*copy=*/false, kOp);
    Start(std::move(transfer), std::move(reservation),
          leaves ? Destination::kOtherProcess : Destination::kThisProcess);
  } catch (...) {
    // Who waits is told as well.
    if (reservation) reservation->SetError(std::current_exception());
    throw;
  }
}

void Deliver(const FuturePtr& future, at::Tensor value, c10::Device device) {
  auto reservation = ReserveFuture(future);
  if (HasDevice(device)) {
    Start(value.is_cpu() ? FetchTo(value, device, kOp) : CopyOut(value), std::move(reservation));
  } else {
    reservation->SetValue(std::move(value));
  }
}

const bool registered [[maybe_unused]] = [] {
  SetAcceleratorValues({Fulfil, Deliver, ProvideMemory, InitializedDevices});
  return true;
}();

}  // namespace
}  // namespace dtorch
