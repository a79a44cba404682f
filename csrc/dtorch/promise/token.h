#pragma once

#include "dtorch/promise/backend.h"

#include <string>

namespace dtorch {

/// What travels in place of a promise: text without spaces, under 300 characters.
///
///   LOCAL          for this machine alone
///   LOCAL@PEER     the same, or through RPC, to its owner (Network::Name())
///   LOCAL=PEER     through RPC alone
struct PromiseToken {
  std::string local;  // the file backend's
  std::string peer;
  bool network_only = false;

  std::string ToText() const;
  static PromiseToken FromText(const std::string& text);  // c10::ValueError if it is none

  /// By the first way that leads there. DTorchError if there is none: it says of each why not.
  Backend::Imported Import(bool has_value) const;
};

/// What errors call the owner of a token's `peer`: worker 'NAME'.
std::string Called(const std::string& peer);

}  // namespace dtorch
