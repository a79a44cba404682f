#include "dtorch/device/event.h"

#include <c10/core/Event.h>
#include <c10/util/Exception.h>

#include <array>
#include <dlfcn.h>
#include <mutex>
#include <string>
#include <unistd.h>
#include <utility>

namespace dtorch {
namespace {

class AnyEvent final : public Event::Impl {
 public:
  explicit AnyEvent(const c10::Stream& stream) : event_(stream.device_type()) {
    event_.record(stream);
  }
  void Synchronize() const override { event_.synchronize(); }
  void Block(const c10::Stream& stream) const override { event_.block(stream); }

 private:
  c10::Event event_;
};

auto& Factories() {
  static std::array<EventFactory, static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)> all{};
  return all;
}

// The library that installs CUDA's factory lies beside this one, if torch has CUDA. It is not
// linked: where no accelerator is used, nothing of CUDA is loaded by us.
void LoadCuda() {
  Dl_info self{};
  if (!dladdr(reinterpret_cast<const void*>(&SetEventFactory), &self) || !self.dli_fname) return;
  const std::string path(self.dli_fname);
  const std::string library = path.substr(0, path.rfind('/') + 1) + "libdtorch_ops_cuda.so";
  if (access(library.c_str(), F_OK) != 0) return;
  if (!dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    TORCH_WARN("dtorch_ops: threads will spin while they wait for the GPU: ", dlerror());
  }
}

}  // namespace

Event::Impl::~Impl() = default;

Event::Event(const c10::Stream& stream) {
  const EventFactory& factory = EventFactoryOf(stream.device_type());
  impl_ = factory.record ? factory.record(stream) : std::make_unique<AnyEvent>(stream);
}
Event::~Event() = default;
Event::Event(Event&&) noexcept = default;

void Event::Synchronize() const { impl_->Synchronize(); }
void Event::Block(const c10::Stream& stream) const { impl_->Block(stream); }

void SetEventFactory(c10::DeviceType type, EventFactory factory) {
  Factories()[static_cast<size_t>(type)] = factory;
}
const EventFactory& EventFactoryOf(c10::DeviceType type) {
  if (type == c10::DeviceType::CUDA) {
    static std::once_flag loaded;
    std::call_once(loaded, LoadCuda);
  }
  return Factories()[static_cast<size_t>(type)];
}

}  // namespace dtorch
