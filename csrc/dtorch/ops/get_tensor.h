#pragma once

#include "dtorch/device/device.h"
#include "dtorch/device/transfer.h"
#include "dtorch/future/waiter_list.h"
#include "dtorch/promise/promise_state.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <optional>

// Kernels of the operators that fetch a tensor's value. Callers go through the dispatcher.
namespace dtorch {

/// How a tensor is fetched.
enum class Way {
  kAtOnce,  // it is there on return
  kHere,    // an accelerator computes it, and it stays there
  kMoved,   // to, from or between accelerators
};
Way WayTo(const at::Tensor& self, c10::Device device);
inline Way WayOf(const at::Tensor& self, std::optional<c10::Device> device) {
  if (device) return WayTo(self, *device);
  return IsAccelerator(self.device()) ? Way::kHere : Way::kAtOnce;
}

/// Begins to fetch what an accelerator has or is to have, which all goes the same way.
Transfer Begin(Way way, const Sources& sources, std::optional<c10::Device> device, bool copy,
               Snapshot snapshot, const char* op);

/// What can be said against fetching `self` from where it is.
void CheckSource(const at::Tensor& self, const char* op);

/// `self`, or a copy, which autograd records where it does. It is there on return.
at::Tensor Fetched(const at::Tensor& self, std::optional<c10::Device> device, bool copy);

/// Whether somebody below the kernels for autograd wants to see a call with these keys.
inline bool IsSeenBelow(c10::DispatchKeySet keys) {
  return keys.has_any(c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::Functionalize, c10::DispatchKey::PreDispatch}));
}

/// What GetTensorAsyncKernel does, for the operator `op`.
FuturePtr Fetch(const at::Tensor& self, std::optional<c10::Device> device, bool copy,
                Snapshot snapshot, const char* op);

/// A future of the value of `self`, computed, on `device`. Without a copy it is `self` itself;
/// `copy` makes it a snapshot, recorded by autograd. Never blocks.
FuturePtr GetTensorAsyncKernel(const at::Tensor& self, std::optional<c10::Device> device,
                               bool copy);

/// The same where autograd records. Boxed.
void GetTensorAsyncAutogradKernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                  torch::jit::Stack* stack);

/// Refuses to run inside of a torch.func transform. Boxed.
void RefuseTransformKernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Fulfils `promise` with the value of `self`, once computed.
void GetTensorKernel(const at::Tensor& self, const c10::IValue& promise);

/// The same; `copy` makes it a snapshot, recorded by autograd. Graphs want that, whose compiler may
/// give the memory of `self` to something else after the call.
void GetTensorCopyKernel(const at::Tensor& self, const c10::IValue& promise, bool copy);

/// Of either class, whichever overload was chosen.
FuturePtr GetFutureKernel(const c10::IValue& promise);

}  // namespace dtorch
