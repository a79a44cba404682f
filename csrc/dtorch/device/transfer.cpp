#include "dtorch/device/transfer.h"

#include "dtorch/base/log.h"
#include "dtorch/device/device.h"
#include "dtorch/device/places.h"
#include "dtorch/device/streams.h"
#include "dtorch/future/span.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
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
    Log(LogLevel::kInfo, "device", "no pinned memory: the copy blocks a thread of ours");
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

// What `make` makes of each, in order.
template <typename Make>
std::vector<at::Tensor> OfEach(const Sources& sources, const Make& make) {
  std::vector<at::Tensor> made;
  made.reserve(sources.tensors.size());
  for (size_t i = 0; i < sources.tensors.size(); ++i) {
    const auto make_this = [&] { return make(sources.tensors[i]); };
    made.push_back(sources.places.empty() ? make_this() : AtPlace(sources.places[i], make_this));
  }
  return made;
}

// Each to the one of `to` in its place.
void CopyEach(const Sources& from, const std::vector<at::Tensor>& to, bool non_blocking) {
  auto next = to.begin();
  OfEach(from, [&](const at::Tensor& source) { return next++->copy_(source, non_blocking); });
}

// What is copied: clones, or the sources themselves, for whose copies their stream is to wait then.
struct Taken {
  std::vector<at::Tensor> sources;
  bool needs_wait = false;
};
Taken Take(const Sources& sources, Snapshot snapshot, bool always = false) {
  Taken taken;
  taken.sources = OfEach(sources, [&](const at::Tensor& self) {
    const bool clone = always || NeedsClone(self, snapshot);
    taken.needs_wait |= NeedsWait(clone, snapshot);
    return clone ? Cloned(self) : self;
  });
  return taken;
}

Transfer ToHost(const Sources& sources, const char* op, Snapshot snapshot) {
  const c10::Stream stream = CurrentStream(sources.tensors.front().device(), op);
  std::vector<at::Tensor> values = OfEach(sources, HostLike);
  const bool can_queue = std::all_of(values.begin(), values.end(), [](const at::Tensor& value) {
    return value.is_pinned() || value.numel() == 0;
  });
  Taken taken = Take(sources, snapshot, !can_queue && snapshot != Snapshot::kCaller);
  Event computed(stream);
  const c10::Stream side = SideStream(stream, stream.device());
  if (!can_queue) {
    // Such a copy blocks.
    auto finish = [from = std::move(taken.sources), places = sources.places.vec(), values, side,
                   state = at::ThreadLocalState()] {
      const at::ThreadLocalStateGuard as_the_caller(state);
      const c10::StreamGuard guard(side);
      const Span span("dtorch::copy");
      CopyEach({from, places}, values, /*non_blocking=*/false);
    };
    return {std::move(values), stream, Events(std::move(computed)), {}, std::move(finish)};
  }
  {
    const c10::StreamGuard guard(side);
    computed.Block(side);
    CopyEach({taken.sources, sources.places}, values, /*non_blocking=*/true);
  }
  Event copied(side);
  if (taken.needs_wait) copied.Block(stream);
  return {std::move(values), side, Events(std::move(copied)), std::move(taken.sources), {}};
}

Transfer FromHost(const Sources& sources, c10::Device device, const char* op, Snapshot snapshot) {
  (void)CurrentStream(device, op);  // refuses a capture
  const c10::Stream side = UploadStream(device);
  std::vector<at::Tensor> staged;
  std::vector<at::Tensor> values = OfEach(sources, [&](const at::Tensor& self) {
    const bool as_it_is = snapshot == Snapshot::kCaller && self.is_pinned() && !self.is_conj() &&
                          !self.is_neg() && self.is_non_overlapping_and_dense();
    at::Tensor& staging = staged.emplace_back(as_it_is ? self : HostLike(self));
    if (!as_it_is) staging.copy_(self);
    const c10::StreamGuard guard(side);
    at::Tensor value = at::empty_like(
        staging, staging.options().device(device).pinned_memory(false), at::MemoryFormat::Preserve);
    return value.copy_(staging, /*non_blocking=*/true);
  });
  Event copied(side);
  return {std::move(values), side, Events(std::move(copied)), std::move(staged), {}};
}

Transfer BetweenDevices(const Sources& sources, c10::Device device, const char* op,
                        Snapshot snapshot) {
  const c10::Stream stream = CurrentStream(sources.tensors.front().device(), op);
  (void)CurrentStream(device, op);  // refuses a capture
  const c10::Stream there = SideStream(stream, device);
  Taken taken = Take(sources, snapshot);
  Event computed(stream);
  const c10::Stream side = SideStream(stream, stream.device());
  std::vector<at::Tensor> values;
  {
    const c10::MultiStreamGuard guard({side, there});
    computed.Block(side);
    values = OfEach({taken.sources, sources.places}, [&](const at::Tensor& source) {
      at::Tensor value =
          at::empty_like(source, source.options().device(device), at::MemoryFormat::Preserve);
      return value.copy_(source, /*non_blocking=*/true);
    });
  }
  // Which of the two has done the copy is the device's choice.
  Event read(side);
  if (taken.needs_wait) read.Block(stream);
  read.Block(there);
  Event copied(there);
  // Both are asked: neither device knows of the other one's errors.
  return {std::move(values),
          there,
          Events(std::move(read), std::move(copied)),
          std::move(taken.sources),
          {}};
}

}  // namespace

Transfer FetchHere(const Sources& sources, bool copy, const char* op) {
  const c10::Stream stream = CurrentStream(sources.tensors.front().device(), op);
  auto values = OfEach(sources, [&](const at::Tensor& self) { return copy ? self.clone() : self; });
  Event computed(stream);
  return {std::move(values), stream, Events(std::move(computed)), {}, {}};
}

void CheckCanFetch(const at::Tensor& self, std::optional<c10::Device> device, const char* op) {
  if (device) CheckStrided(self, *device, op);
  if (!self.is_cpu()) (void)CurrentStream(self.device(), op);
  if (device && !device->is_cpu()) (void)CurrentStream(*device, op);
}

Transfer CopyOut(const at::Tensor& given) {
  const Span span("dtorch::copy");
  const c10::Stream side = UploadStream(given.device());
  const c10::StreamGuard guard(side);
  at::Tensor value = given.clone();
  Event copied(side);
  return {{std::move(value)}, side, Events(std::move(copied)), {given}, {}};
}

Transfer FetchTo(const Sources& sources, c10::Device device, const char* op, Snapshot snapshot) {
  for (const at::Tensor& self : sources.tensors) CheckStrided(self, device, op);
  const Span span("dtorch::copy");
  if (!device.is_cpu() && !device.has_index()) {
    device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  }
  if (device.is_cpu()) return ToHost(sources, op, snapshot);
  return sources.tensors.front().is_cpu() ? FromHost(sources, device, op, snapshot)
                                          : BetweenDevices(sources, device, op, snapshot);
}

}  // namespace dtorch
