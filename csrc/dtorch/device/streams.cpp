#include "dtorch/device/streams.h"

#include "dtorch/device/event.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <tuple>

namespace dtorch {
namespace {

// New in torch 2.12.
template <typename Guard>
bool AsksGuard(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  } else {
    return false;
  }
}

enum class Use : int8_t { kSide, kUpload, kIdle };

c10::Stream OfOurs(Use use, c10::StreamId beside, c10::DeviceIndex beside_index,
                   c10::Device device) {
  using Key = std::tuple<Use, c10::StreamId, c10::DeviceIndex, c10::DeviceType, c10::DeviceIndex>;
  struct Table {
    std::mutex mutex;
    std::map<Key, c10::Stream> streams;
  };
  static auto* const table = new Table;  // leaked on purpose: used at exit
  const Key key{use, beside, beside_index, device.type(), device.index()};
  std::lock_guard<std::mutex> lock(table->mutex);
  const auto found = table->streams.find(key);
  if (found != table->streams.end()) return found->second;
  const c10::impl::VirtualGuardImpl guard(device.type());
  const Key idle{Use::kIdle, 0, 0, device.type(), device.index()};
  c10::Stream stream = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  // The pool goes round: the idle one stays idle.
  const auto taken = table->streams.find(idle);
  if (taken != table->streams.end() && stream == taken->second) {
    stream = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
  table->streams.emplace(key, stream);
  return stream;
}

}  // namespace

c10::Stream CurrentStream(c10::Device device, const char* op) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream stream = guard.getStream(device);
  const auto is_capturing = EventFactoryOf(device.type()).is_capturing;
  TORCH_CHECK(!(is_capturing ? is_capturing(stream) : AsksGuard(guard, stream)), op,
              ": expected a call outside of graph capture, got one while the current stream of ",
              device,
              " records a graph: its work is done when the graph is replayed; fetch the tensor "
              "after that");
  return stream;
}

c10::Stream SideStream(const c10::Stream& stream, c10::Device device) {
  (void)IdleStream(device);
  return OfOurs(Use::kSide, stream.id(), stream.device_index(), device);
}
c10::Stream UploadStream(c10::Device device) {
  (void)IdleStream(device);
  return OfOurs(Use::kUpload, 0, 0, device);
}
c10::Stream IdleStream(c10::Device device) { return OfOurs(Use::kIdle, 0, 0, device); }

}  // namespace dtorch
