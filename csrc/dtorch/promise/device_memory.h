#pragma once

#include "dtorch/base/api.h"
#include "dtorch/base/deadline.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

// Memory of a device that the process which waits for a value gives the one which has it, to copy
// the value into: so a value that was set survives its producer. What is said between the two is
// text that the device's driver understands (device/sharing.h).
namespace dtorch {

/// A block of this process's memory. Its owner is whoever may read or write it now.
struct DeviceBlock {
  c10::Device device;
  void* data = nullptr;
  uint64_t bytes = 0;
};

/// What a reservation offers whose promise is another process's: at most one question, then either
/// SetValueThere(), or what any reservation does.
class DTORCH_API RemoteMemory {
 public:
  virtual ~RemoteMemory();
  /// Does not block.
  virtual void Ask(c10::Device device, uint64_t bytes) = 0;
  /// The answer; empty if there is no such memory, or no answer by then.
  virtual std::string WaitForAnswer(Deadline deadline) = 0;
  /// What the caller keeps for as long as the other process may be given values: made once.
  virtual std::shared_ptr<void> Keepsake(const std::function<std::shared_ptr<void>()>& make) = 0;
  /// The elements of a tensor like `value` are there, in order. Throws what setting a value does.
  virtual void SetValueThere(const at::Tensor& value) = 0;
};

/// The other side.
struct DeviceMemoryRequest {
  c10::Device device;
  uint64_t bytes = 0;
  /// What the callee keeps until that process ends: made once.
  std::function<std::shared_ptr<void>(const std::function<std::shared_ptr<void>()>& make)> keepsake;
  struct Grant {
    std::string text;  // empty: none
    std::shared_ptr<DeviceBlock> block;
  };
  std::function<void(Grant)> answer;  // to be called once, by any thread
};

}  // namespace dtorch
