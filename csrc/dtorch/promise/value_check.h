#pragma once

#include "dtorch/base/api.h"

#include <ATen/core/Tensor.h>

#include <string>

namespace dtorch {

/// Why a tensor of a Python subclass has no value to take; empty if it has. The binding that knows
/// Python types installs the check.
using SubclassCheck = std::string (*)(const at::Tensor& tensor);
DTORCH_API void SetSubclassCheck(SubclassCheck check);

/// What the check says of `tensor`; empty if it has no Python class that sees operators.
std::string SubclassReason(const at::Tensor& tensor);
/// The same, whatever the class.
std::string AnySubclassReason(const at::Tensor& tensor);

}  // namespace dtorch
