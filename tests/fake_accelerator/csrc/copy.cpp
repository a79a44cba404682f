#include "copy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "counters.h"
#include "current.h"
#include "memory.h"
#include "operand.h"

namespace fake {

namespace {

thread_local int cpu_fallbacks = 0;

bool IsPinned(const at::Tensor& tensor) {
  return pinned_memory().IsPinned(tensor.storage().data());
}

// What torch does for CUDA: the block is not used again before the copy is done.
void RecordPinned(const at::Tensor& tensor, Stream& stream) {
  pinned_memory().RecordUse(tensor.storage().data(), stream);
}

Position SubmitCopy(Stream& stream, Operand source, Operand destination) {
  return Submit(stream, Kind::kCopy,
                [source = std::move(source), destination = std::move(destination)] {
                  const at::AutoDispatchBelowADInplaceOrView guard;
                  destination.OnCpu().copy_(source.OnCpu());
                });
}

void AwaitCopy(const Position& position) {
  if (cpu_fallbacks == 0) CountSync(Sync::kBlockingCopy);
  Await(position);
}

void ToDevice(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  Stream& stream = CurrentStream(destination.device().index());
  if (IsPinned(source)) {
    const Position position = SubmitCopy(stream, Operand(source), Operand(destination));
    RecordPinned(source, stream);
    if (!non_blocking) AwaitCopy(position);
    return;
  }
  // The driver takes pageable bytes into memory of its own before it returns.
  const Position position =
      SubmitCopy(stream, Operand::Keep(at::clone(source)), Operand(destination));
  if (!non_blocking) AwaitCopy(position);
}

void ToHost(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  Stream& stream = CurrentStream(source.device().index());
  const Position position = SubmitCopy(stream, Operand(source), Operand(destination));
  if (IsPinned(destination)) {
    RecordPinned(destination, stream);
    if (non_blocking) return;
  }
  AwaitCopy(position);
}

// As between CUDA devices: on the source's stream, between what is queued on the destination's
// before and what comes after.
void BetweenDevices(const at::Tensor& source, const at::Tensor& destination) {
  Stream& from = CurrentStream(source.device().index());
  Stream& to = CurrentStream(destination.device().index());
  {
    const Locked lock(MachineLock());
    if (&from != &to) WaitForPositionLocked(from, LastLocked(to));
  }
  const Position copied = SubmitCopy(from, Operand(source), Operand(destination));
  const Locked lock(MachineLock());
  if (&from != &to) WaitForPositionLocked(to, copied);
}

}  // namespace

at::Tensor CopyFrom(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  for (const at::Tensor* tensor : {&source, &destination}) {
    TORCH_CHECK(
        tensor->layout() == at::kStrided && (tensor->is_cpu() || tensor->device().type() == kType),
        "fake accelerator: expected strided tensors of the CPU and of its own to copy, got ",
        tensor->layout(), " on ", tensor->device());
  }
  if (destination.numel() == 0) return destination;
  const at::Tensor expanded = source.expand(destination.sizes());
  const at::AutoDispatchBelowADInplaceOrView guard;
  if (source.is_cpu()) {
    ToDevice(expanded, destination, non_blocking);
  } else if (destination.is_cpu()) {
    ToHost(expanded, destination, non_blocking);
  } else {
    BetweenDevices(expanded, destination);
  }
  return destination;
}

void ResizeStorage(c10::StorageImpl& storage, size_t size) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr fresh = storage.allocator()->allocate(size);
  const size_t kept = std::min(size, storage.nbytes());
  if (kept != 0) {
    Submit(CurrentStream(storage.device().index()), Kind::kCopy,
           [to = fresh.get(), from = storage.data(), kept] { std::memcpy(to, from, kept); });
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(size);
}

CpuFallback::CpuFallback() {
  if (cpu_fallbacks++ == 0) CountSync(Sync::kFallback);
}

CpuFallback::~CpuFallback() { --cpu_fallbacks; }

}  // namespace fake
