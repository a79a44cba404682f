#include "dtorch/device/transfer.h"

#include "dtorch/device/device.h"
#include "dtorch/device/streams.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <utility>

namespace dtorch {
namespace {

// Up to here a clone costs the stream less than a wait for the copy may.
constexpr int64_t kCloneBytes = 1 << 20;

// Memory of the host for a tensor like `self`; not pinned where there is no such memory.
at::Tensor HostLike(const at::Tensor& self) {
  const auto options = self.options().device(c10::kCPU);
  try {
    return at::empty_like(self, options.pinned_memory(true), at::MemoryFormat::Preserve);
  } catch (const c10::Error&) {
    return at::empty_like(self, options.pinned_memory(false), at::MemoryFormat::Preserve);
  }
}

void CheckStrided(const at::Tensor& self, c10::Device device, const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      self.layout() == c10::kStrided && !self.is_nested() && !self.is_quantized(), op,
      ": device: expected a strided tensor to copy from ", self.device(), " to ", device,
      ", got one of layout ", self.layout(),
      ": send its parts, or t.to_dense(), or copy it first: t.to(device)");
}

template <typename... E>
std::vector<Event> Events(E... events) {
  std::vector<Event> all;
  (all.push_back(std::move(events)), ...);
  return all;
}

// Whether it is copied by its own stream first. A device may finish a copy of anything but plain
// bytes on the host, before they are there, or wait for it.
bool NeedsClone(const at::Tensor& self, Snapshot snapshot) {
  if (self.is_conj() || self.is_neg() || !self.is_non_overlapping_and_dense()) return true;
  if (snapshot != Snapshot::kCheapest) return snapshot == Snapshot::kClone;
  return self.numel() * static_cast<int64_t>(self.element_size()) <= kCloneBytes;
}

// Whether that stream's later work, which may write to it, waits for the copy.
bool NeedsWait(bool cloned, Snapshot snapshot) { return !cloned && snapshot != Snapshot::kCaller; }

at::Tensor Cloned(const at::Tensor& self) { return self.clone().resolve_conj().resolve_neg(); }

Transfer ToHost(const at::Tensor& self, const char* op, Snapshot snapshot) {
  const c10::Stream stream = CurrentStream(self.device(), op);
  at::Tensor value = HostLike(self);
  const bool can_queue = value.is_pinned();
  const bool clone = NeedsClone(self, snapshot) || (!can_queue && snapshot != Snapshot::kCaller);
  at::Tensor source = clone ? Cloned(self) : self;
  Event computed(stream);
  const c10::Stream side = SideStream(stream, stream.device());
  if (!can_queue) {
    // Such a copy blocks.
    auto finish = [source, value, side, state = at::ThreadLocalState()]() mutable {
      const at::ThreadLocalStateGuard as_the_caller(state);
      const c10::StreamGuard guard(side);
      value.copy_(source);
    };
    return {value, stream, Events(std::move(computed)), {}, std::move(finish)};
  }
  {
    const c10::StreamGuard guard(side);
    computed.Block(side);
    value.copy_(source, /*non_blocking=*/true);
  }
  Event copied(side);
  if (NeedsWait(clone, snapshot)) copied.Block(stream);
  return {std::move(value), side, Events(std::move(copied)), {std::move(source)}, {}};
}

Transfer FromHost(const at::Tensor& self, c10::Device device, const char* op, Snapshot snapshot) {
  (void)CurrentStream(device, op);  // refuses a capture
  const c10::Stream side = UploadStream(device);
  const bool as_it_is = snapshot == Snapshot::kCaller && self.is_pinned() && !self.is_conj() &&
                        !self.is_neg() && self.is_non_overlapping_and_dense();
  at::Tensor staging = as_it_is ? self : HostLike(self);
  if (!as_it_is) staging.copy_(self);
  at::Tensor value;
  {
    const c10::StreamGuard guard(side);
    value = at::empty_like(staging, staging.options().device(device).pinned_memory(false),
                           at::MemoryFormat::Preserve);
    value.copy_(staging, /*non_blocking=*/true);
  }
  Event copied(side);
  return {std::move(value), side, Events(std::move(copied)), {std::move(staging)}, {}};
}

Transfer BetweenDevices(const at::Tensor& self, c10::Device device, const char* op,
                        Snapshot snapshot) {
  const c10::Stream stream = CurrentStream(self.device(), op);
  (void)CurrentStream(device, op);  // refuses a capture
  const c10::Stream there = SideStream(stream, device);
  const bool clone = NeedsClone(self, snapshot);
  at::Tensor source = clone ? Cloned(self) : self;
  Event computed(stream);
  const c10::Stream side = SideStream(stream, stream.device());
  at::Tensor value;
  {
    const c10::MultiStreamGuard guard({side, there});
    computed.Block(side);
    value = at::empty_like(source, source.options().device(device), at::MemoryFormat::Preserve);
    value.copy_(source, /*non_blocking=*/true);
  }
  // Which of the two has done the copy is the device's choice.
  Event read(side);
  if (NeedsWait(clone, snapshot)) read.Block(stream);
  read.Block(there);
  Event copied(there);
  // Both are asked: neither device knows of the other one's errors.
  return {
      std::move(value), there, Events(std::move(read), std::move(copied)), {std::move(source)}, {}};
}

}  // namespace

Transfer FetchHere(const at::Tensor& self, bool copy, const char* op) {
  const c10::Stream stream = CurrentStream(self.device(), op);
  at::Tensor value = copy ? self.clone() : self;
  Event computed(stream);
  return {std::move(value), stream, Events(std::move(computed)), {}, {}};
}

void CheckCanFetch(const at::Tensor& self, c10::Device device, const char* op) {
  CheckStrided(self, device, op);
  if (!self.is_cpu()) (void)CurrentStream(self.device(), op);
  if (!device.is_cpu()) (void)CurrentStream(device, op);
}

Transfer CopyOut(const at::Tensor& given) {
  const c10::Stream side = UploadStream(given.device());
  const c10::StreamGuard guard(side);
  at::Tensor value = given.clone();
  Event copied(side);
  return {std::move(value), side, Events(std::move(copied)), {given}, {}};
}

Transfer FetchTo(const at::Tensor& self, c10::Device device, const char* op, Snapshot snapshot) {
  CheckStrided(self, device, op);
  if (!device.is_cpu() && !device.has_index()) {
    device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  }
  if (device.is_cpu()) return ToHost(self, op, snapshot);
  return self.is_cpu() ? FromHost(self, device, op, snapshot)
                       : BetweenDevices(self, device, op, snapshot);
}

}  // namespace dtorch
