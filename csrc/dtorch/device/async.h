#pragma once

#include "dtorch/base/api.h"
#include "dtorch/device/transfer.h"
#include "dtorch/future/waiter_list.h"
#include "dtorch/promise/promise_state.h"

#include <c10/core/Device.h>

#include <memory>
#include <vector>

// Futures of what accelerators do. The caller's thread only queues; see stream_watch.h for who
// waits.
namespace dtorch {

/// Fulfils `reservation` with the value of `transfer` when that is there, or with the error.
enum class Destination { kThisProcess, kOtherProcess };
void Start(Transfer transfer, std::unique_ptr<Reservation> reservation,
           Destination destination = Destination::kThisProcess);

/// Of the value of `transfer`, when it is there. It has the value's device: consumers on other
/// streams are ordered behind it, and behind nothing else.
FuturePtr FutureOf(Transfer transfer);

/// One of several transfers, and where its values are in the list of all.
struct TransferPart {
  Transfer transfer;
  std::vector<size_t> places;
};

/// Of the list of `values`, those of the parts and others that are there, when all are. Completes
/// once; the first error of a part completes it at once, and says where in the list. It has the
/// devices of all.
FuturePtr FutureOf(std::vector<TransferPart> parts, std::vector<at::Tensor> values);

/// Complete, with None, when all that the current stream of each of the accelerators `devices` has
/// been given so far is done; with the error of the first that fails. If `promise` is given it is
/// reserved, and fulfilled with that.
FuturePtr SyncAccelerators(const std::vector<c10::Device>& devices, const char* op);
void SyncAccelerators(const std::vector<c10::Device>& devices, const char* op,
                      VoidPromiseState& promise);

}  // namespace dtorch
