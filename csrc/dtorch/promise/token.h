#pragma once

#include "dtorch/promise/backend.h"

#include <string>

namespace dtorch {

/// What travels in place of a promise: text without spaces, under 300 characters.
///
///   LOCAL          for this machine alone
///   LOCAL@WORKER   the same, or through RPC, to its owner, which is called WORKER there
///   LOCAL=WORKER   through RPC alone
struct PromiseToken {
  std::string local;  // the file backend's
  std::string worker;
  bool network_only = false;

  std::string ToText() const;
  static PromiseToken FromText(const std::string& text);

  /// By the first way that leads there. DTorchError if there is none: it says of each why not.
  Backend::Imported Import(bool has_value) const;
};

}  // namespace dtorch
