#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/waiter_list.h"
#include "dtorch/promise/device_memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <exception>
#include <memory>
#include <optional>
#include <vector>

namespace dtorch {

class PromiseState;

/// A promise whose value is still being computed: nobody else can fulfil it any more. Used once, by
/// any thread; if a value is refused, once more, for an error. Going away unused it breaks the
/// promise, or leaves it to the other producers if there are some.
class DTORCH_API Reservation {
 public:
  virtual ~Reservation();
  virtual void SetValue(c10::IValue value) = 0;
  virtual void SetError(std::exception_ptr error) = 0;
  /// Whether either may run callbacks of the user.
  virtual bool RunsCallbacks() const = 0;
  /// Of a promise of another process, if its backend can share memory of devices. Lives as long as
  /// this.
  virtual RemoteMemory* remote_memory() { return nullptr; }
  /// Whether SetValue() sends a tensor of `device` as it is. Of a promise of another process; else
  /// it has to be on the CPU.
  virtual bool SendsFrom(c10::Device) const { return false; }
};

/// Completes it with an error where it took no value; that, too, may find no memory, and then it is
/// given back as it goes.
DTORCH_API void SetErrorOf(Reservation& reservation, std::exception_ptr error) noexcept;

/// Of a pending future that nobody else completes.
std::unique_ptr<Reservation> ReserveFuture(FuturePtr future);

/// What promises leave to the layer above that knows when a tensor of an accelerator is there.
struct AcceleratorValues {
  /// Fulfils `promise` with `value`, of an accelerator, when that has been computed. Throws what
  /// setting a value does, and reserves the promise before it returns.
  void (*fulfil)(PromiseState& promise, const at::Tensor& value) = nullptr;
  /// Completes `reservation` with a copy of `value` on `wanted`, or else on `device`; where this
  /// process has no such device, with `value` itself. That is on the CPU, or in memory of `device`
  /// that was provided. Throws if what is wanted is not to be had: then it still is the caller's.
  void (*deliver)(std::unique_ptr<Reservation>& reservation, at::Tensor value, c10::Device device,
                  std::optional<c10::Device> wanted) = nullptr;
  /// The same for a value that another process has sent into memory of this one's, and which is
  /// there when what the current stream of its device was given is done.
  void (*deliver_here)(std::unique_ptr<Reservation>& reservation, at::Tensor value,
                       std::optional<c10::Device> wanted) = nullptr;
  /// Answers a request of another process. Does not block: a thread of its own may.
  void (*provide)(DeviceMemoryRequest request) = nullptr;
  /// Those that may be in use: what futures of promises are made with. Does not ask the driver.
  std::vector<c10::Device> (*devices)() = nullptr;
};
DTORCH_API void SetAcceleratorValues(AcceleratorValues values);
const AcceleratorValues& GetAcceleratorValues();

}  // namespace dtorch
