#include "dtorch/future/outcome.h"

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace dtorch {
namespace {

ErrorInValueCheck error_in_value = nullptr;

std::exception_ptr ErrorInValue(const c10::IValue& value) {
  return error_in_value && value.isPyObject() ? error_in_value(value) : nullptr;
}

// A future that was made before the device was in use does not know it, and does not tell the
// allocator that the current stream uses the value. (It is there: it was waited for.)
void RecordUse(const at::Tensor& value) {
  if (!value.defined() || value.is_cpu() || value.is_meta() || !value.has_storage()) return;
  if (value.key_set().has(c10::DispatchKey::Python)) return;  // a fake one, say, of no device here
  const c10::impl::VirtualGuardImpl guard(value.device().type());
  guard.recordDataPtrOnStream(value.storage().data_ptr(), guard.getStream(value.device()));
}

}  // namespace

void SetErrorInValueCheck(ErrorInValueCheck check) { error_in_value = check; }

std::exception_ptr ErrorOf(const FuturePtr& future) {
  if (auto error = future->exception_ptr()) return error;
  return ErrorInValue(future->constValue());
}

bool KnowsDeviceOf(const c10::ivalue::Future& future, const at::Tensor& value) {
  const auto& devices = future.devices();
  return value.defined() &&
         std::find(devices.begin(), devices.end(), value.device()) != devices.end();
}

c10::IValue ValueOf(const FuturePtr& future) {
  future->wait();  // complete: only orders the current streams
  c10::IValue value = future->value();
  if (value.isTensor() && !KnowsDeviceOf(*future, value.toTensor())) RecordUse(value.toTensor());
  if (auto error = ErrorInValue(value)) std::rethrow_exception(error);
  return value;
}

}  // namespace dtorch
