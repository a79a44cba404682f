#include "dtorch/future/callback.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <vector>

namespace dtorch {

struct CallbackStreams::Guards {
  std::optional<c10::DeviceGuard> device;
  std::optional<c10::MultiStreamGuard> streams;
};

CallbackStreams::CallbackStreams(c10::ivalue::Future& future) {
  if (future.devices().empty()) return;
  guards_ = std::make_unique<Guards>();
  try {
    const c10::impl::VirtualGuardImpl impl(future.devices().front().type());
    std::vector<c10::Stream> streams;
    for (const c10::Device device : future.devices()) {
      streams.push_back(impl.getStreamFromGlobalPool(device));
    }
    guards_->device.emplace(future.devices().front());
    guards_->streams.emplace(streams);
    if (!future.hasError()) future.wait();  // complete: orders the streams
  } catch (const std::exception&) {
    // The callback meets the same error if it uses the device.
  }
}

CallbackStreams::~CallbackStreams() = default;

}  // namespace dtorch
