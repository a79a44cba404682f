#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace dtorch {

/// In its scope operators are ours alone, as in a thread that has just begun: no dispatch mode,
/// transform, trace or autograd of the caller sees them, and what they make is no inference tensor.
/// No foreign code is called within.
class Unseen {
 public:
  Unseen() = default;

 private:
  static constexpr c10::DispatchKeySet kWatchers{
      c10::DispatchKey::Python,
      c10::DispatchKey::PythonTLSSnapshot,
      c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
      c10::DispatchKey::FuncTorchDynamicLayerBackMode,
      c10::DispatchKey::Functionalize,
  };
  const c10::InferenceMode normal_{false};
  const at::AutoDispatchBelowADInplaceOrView below_autograd_;
  const c10::impl::ExcludeDispatchKeyGuard untraced_{c10::DispatchKey::Tracer};
  const c10::impl::ExcludeDispatchKeyGuard unwatched_{kWatchers};
};

}  // namespace dtorch
