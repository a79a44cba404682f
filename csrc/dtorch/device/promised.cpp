// Tensors of accelerators in promises: what promise/reservation.h leaves to this layer.

#include "dtorch/base/log.h"
#include "dtorch/device/async.h"
#include "dtorch/device/device.h"
#include "dtorch/device/sharing.h"
#include "dtorch/device/streams.h"
#include "dtorch/promise/promise_state.h"
#include "dtorch/promise/unseen.h"

#include <c10/core/StreamGuard.h>

#include <optional>
#include <utility>

namespace dtorch {
namespace {

constexpr char kOp[] = "promise";

// Of this process, for a value that is elsewhere than it is wanted.
void FulfilOn(c10::Device device, PromiseState& promise, const at::Tensor& value) {
  CheckDevice(device, kOp);
  TORCH_CHECK_VALUE(!value.is_meta(), kOp, ": expected a tensor whose elements can be put on ",
                    device, ", got one on the device meta, which has none");
  CheckCanFetch(value, device, kOp);
  auto reservation = promise.Reserve(device);
  try {
    Transfer transfer = FetchTo(value, device, kOp);
    Start(std::move(transfer), std::move(reservation));
  } catch (...) {
    if (reservation) reservation->SetError(std::current_exception());
    throw;
  }
}

// False if there is no memory for the snapshot: the way through the host may do without.
bool TryStartSharing(const at::Tensor& value, std::unique_ptr<Reservation>& reservation) {
  try {
    StartSharing(value.detach(), reservation, kOp);
    return true;
  } catch (const std::exception&) {
    if (!reservation) throw;
    Log(LogLevel::kInfo, "device", "no memory for a snapshot to share: through the host");
    return false;
  }
}

// Of what may be written to before it is sent: in order, so that nothing is left to compute then.
Transfer CopyToSend(const at::Tensor& value) {
  const Unseen unseen;
  const at::Tensor plain = value.detach().resolve_conj().resolve_neg().contiguous();
  return FetchHere(plain, /*copy=*/plain.is_alias_of(value), kOp);
}

void Fulfil(PromiseState& promise, const at::Tensor& value) {
  const auto wanted = promise.wanted_device();
  if (wanted && !IsSameDevice(*wanted, value.device())) return FulfilOn(*wanted, promise, value);
  // Refused by what the caller is about, not for the value: the promise stays pending.
  CheckHasEvents(value.device(), kOp);
  (void)CurrentStream(value.device(), kOp);
  const bool leaves = promise.LeavesProcess();
  auto reservation = promise.Reserve(value.device());
  try {
    promise.CheckValue(value);
    if (leaves && reservation->remote_memory() && CanShare(value) &&
        TryStartSharing(value, reservation)) {
      return;
    }
    Transfer transfer = !leaves ? FetchHere(value, /*copy=*/false, kOp)
                        : reservation->SendsFrom(value.device())
                            ? CopyToSend(value)
                            : FetchTo(value.detach(), c10::kCPU, kOp);
    Start(std::move(transfer), std::move(reservation),
          leaves ? Destination::kOtherProcess : Destination::kThisProcess);
  } catch (...) {
    // Who waits is told as well.
    if (reservation) reservation->SetError(std::current_exception());
    throw;
  }
}

void Deliver(std::unique_ptr<Reservation>& reservation, at::Tensor value, c10::Device device,
             std::optional<c10::Device> wanted) {
  if (wanted) {
    device = *wanted;
    CheckDevice(device, kOp);
  }
  std::optional<Transfer> transfer;
  {
    const Unseen unseen;  // the thread is one of ours, or happens to wait
    if (!value.is_cpu() && IsSameDevice(device, value.device())) {
      transfer = CopyOut(value);
    } else if (!value.is_cpu()) {
      const c10::StreamGuard guard(UploadStream(value.device()));
      transfer = FetchTo(value, device, kOp);
      transfer->keep.push_back(value);  // its memory is another process's to write to
    } else if (!device.is_cpu() && HasDevice(device)) {
      transfer = FetchTo(value, device, kOp);
    }
  }
  if (transfer) {
    Start(*std::move(transfer), std::move(reservation));
  } else {
    reservation->SetValue(std::move(value));
  }
}

void DeliverHere(std::unique_ptr<Reservation>& reservation, at::Tensor value,
                 std::optional<c10::Device> wanted) {
  if (wanted) CheckDevice(*wanted, kOp);
  const Unseen unseen;  // the thread is one of ours
  const bool stays = !wanted || IsSameDevice(*wanted, value.device());
  Transfer transfer = stays ? FetchHere(value, /*copy=*/false, kOp) : FetchTo(value, *wanted, kOp);
  Start(std::move(transfer), std::move(reservation));
}

const bool registered [[maybe_unused]] = [] {
  SetAcceleratorValues({.fulfil = Fulfil,
                        .deliver = Deliver,
                        .deliver_here = DeliverHere,
                        .provide = ProvideMemory,
                        .devices = InitializedDevices});
  return true;
}();

}  // namespace
}  // namespace dtorch
