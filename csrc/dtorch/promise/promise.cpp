#include "dtorch/promise/promise.h"

#include <ATen/core/ivalue_inl.h>

#include <stdexcept>

namespace dtorch {

void TensorPromise::SetException(const std::string& message) const {
  SetException(std::make_exception_ptr(std::runtime_error(message)));
}

c10::IValue TensorPromise::ToIValue() const { return c10::IValue(state_); }

void VoidPromise::SetException(const std::string& message) const {
  SetException(std::make_exception_ptr(std::runtime_error(message)));
}

c10::IValue VoidPromise::ToIValue() const { return c10::IValue(state_); }

}  // namespace dtorch
