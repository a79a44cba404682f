#include "dtorch/ops/get_tensors.h"

#include "dtorch/device/async.h"
#include "dtorch/device/device.h"
#include "dtorch/device/places.h"
#include "dtorch/future/complete.h"
#include "dtorch/ops/get_tensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace dtorch {
namespace {

constexpr char kOp[] = "get_tensors_async";

using Tensors = std::vector<at::Tensor>;

void CheckAll(const Tensors& self, std::optional<c10::Device> device) {
  if (device) CheckDevice(*device, kOp);
  for (size_t i = 0; i < self.size(); ++i) {
    AtPlace(i, [&] {
      CheckSource(self[i], kOp);
      const Way way = WayOf(self[i], device);
      if (way == Way::kHere) CheckCanFetch(self[i], std::nullopt, kOp);
      if (way == Way::kMoved) CheckCanFetch(self[i], device, kOp);
    });
  }
}

// For each the place where it is there first.
std::vector<size_t> FirstPlaces(const Tensors& self) {
  std::unordered_map<const c10::TensorImpl*, size_t> places;
  places.reserve(self.size());
  std::vector<size_t> first;
  first.reserve(self.size());
  for (const at::Tensor& tensor : self) {
    first.push_back(places.try_emplace(tensor.unsafeGetTensorImpl(), first.size()).first->second);
  }
  return first;
}

// Those that one device has.
struct Group {
  Way way;
  Tensors tensors;
  std::vector<size_t> places;
};

FuturePtr FetchAll(const Tensors& self, std::optional<c10::Device> device, bool copy) {
  const std::vector<size_t> first = FirstPlaces(self);
  std::vector<std::pair<c10::Device, Group>> groups;  // few
  for (size_t i = 0; i < self.size(); ++i) {
    const Way way = WayOf(self[i], device);
    if (way == Way::kAtOnce || first[i] != i) continue;
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const auto& each) { return each.first == self[i].device(); });
    if (group == groups.end()) {
      group = groups.insert(groups.end(), {self[i].device(), Group{way, {}, {}}});
    }
    group->second.tensors.push_back(self[i]);
    group->second.places.push_back(i);
  }

  Tensors values(self.size());
  std::vector<TransferPart> parts;
  for (auto& [at, group] : groups) {
    Transfer transfer =
        Begin(group.way, {group.tensors, group.places}, device, copy, Snapshot::kCheapest, kOp);
    for (size_t i = 0; i < group.places.size(); ++i) values[group.places[i]] = transfer.values[i];
    parts.push_back({std::move(transfer), std::move(group.places)});
  }
  for (size_t i = 0; i < self.size(); ++i) {
    if (first[i] != i) {
      values[i] = values[first[i]];
    } else if (!values[i].defined()) {
      values[i] = AtPlace(i, [&] { return Fetched(self[i], device, copy); });
    }
  }
  if (!parts.empty()) return FutureOf(std::move(parts), std::move(values));
  return MakeCompletedFuture(c10::ListType::ofTensors(), std::move(values));
}

}  // namespace

FuturePtr GetTensorsAsyncKernel(const Tensors& self, std::optional<c10::Device> device, bool copy) {
  CheckAll(self, device);
  const bool as_they_are =
      !copy && std::all_of(self.begin(), self.end(), [&](const at::Tensor& tensor) {
        return !IsAccelerator(tensor.device()) && (!device || *device == tensor.device());
      });
  if (as_they_are) return MakeCompletedFuture(c10::ListType::ofTensors(), self);
  return FetchAll(self, device, copy);
}

void GetTensorsAsyncAutogradKernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                   torch::jit::Stack* stack) {
  using torch::jit::peek;
  const auto device = peek(*stack, 1, 3).toOptional<c10::Device>();
  const bool copy = peek(*stack, 2, 3).toBool();
  const Tensors self = peek(*stack, 0, 3).toTensorVector();
  if (!IsSeenBelow(keys)) {
    FuturePtr future = GetTensorsAsyncKernel(self, device, copy);
    torch::jit::drop(*stack, 3);
    torch::jit::push(*stack, std::move(future));
    return;
  }
  const bool records = at::GradMode::is_enabled() &&
                       std::any_of(self.begin(), self.end(), [](const at::Tensor& tensor) {
                         return tensor.defined() && tensor.requires_grad();
                       });
  if (records) {
    CheckAll(self, device);
    const std::vector<size_t> first = FirstPlaces(self);
    // Between devices this blocks: what is below shall see values that are there.
    Tensors values;
    for (size_t i = 0; i < self.size(); ++i) {
      values.push_back(first[i] != i ? values[first[i]] : Fetched(self[i], device, copy));
    }
    torch::jit::drop(*stack, 3);
    torch::jit::push(*stack, std::move(values), c10::IValue(), false);
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace dtorch
