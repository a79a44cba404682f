#include "dtorch/promise/value_check.h"

namespace dtorch {
namespace {
SubclassCheck subclass_check = nullptr;
}

void SetSubclassCheck(SubclassCheck check) { subclass_check = check; }

std::string SubclassReason(const at::Tensor& tensor) {
  const bool is_one = tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python);
  return is_one ? AnySubclassReason(tensor) : std::string();
}

std::string AnySubclassReason(const at::Tensor& tensor) {
  return subclass_check ? subclass_check(tensor) : std::string();
}

}  // namespace dtorch
