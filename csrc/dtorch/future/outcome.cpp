#include "dtorch/future/outcome.h"

namespace dtorch {
namespace {

ErrorInValueCheck error_in_value = nullptr;

std::exception_ptr ErrorInValue(const c10::IValue& value) {
  return error_in_value && value.isPyObject() ? error_in_value(value) : nullptr;
}

}  // namespace

void SetErrorInValueCheck(ErrorInValueCheck check) { error_in_value = check; }

std::exception_ptr ErrorOf(const FuturePtr& future) {
  if (auto error = future->exception_ptr()) return error;
  return ErrorInValue(future->constValue());
}

c10::IValue ValueOf(const FuturePtr& future) {
  future->wait();  // complete: only orders the current streams
  c10::IValue value = future->value();
  if (auto error = ErrorInValue(value)) std::rethrow_exception(error);
  return value;
}

}  // namespace dtorch
