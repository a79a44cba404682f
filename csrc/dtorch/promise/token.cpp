#include "dtorch/promise/token.h"

#include "dtorch/base/error.h"

#include <c10/util/Exception.h>

#include <utility>

namespace dtorch {

std::string Called(const std::string& peer) {
  return "worker '" + peer.substr(0, peer.find('@')) + "'";
}

std::string PromiseToken::ToText() const {
  if (peer.empty()) return local;
  return local + (network_only ? '=' : '@') + peer;
}

PromiseToken PromiseToken::FromText(const std::string& text) {
  const size_t end = text.find_first_of("@=");
  if (end == std::string::npos) return {text, {}, false};
  TORCH_CHECK_VALUE(end > 0 && end + 1 < text.size(),
                    "token: expected what token() has given, got '", text, "': was it cut off?");
  return {text.substr(0, end), text.substr(end + 1), text[end] == '='};
}

Backend::Imported PromiseToken::Import(bool has_value) const {
  std::string reason = "its mode is 'network'";
  if (!network_only || FileBackend().IsHome(local)) {
    try {
      return FileBackend().Import(local, has_value);
    } catch (const UnreachableError& error) {
      reason = error.what();
    }
  }
  const std::string failed =
      "expected a promise that can be fulfilled from here, got one that cannot: through shared "
      "memory not, since " +
      reason + "; and through the network not, since ";
  if (peer.empty()) {
    throw UnreachableError(failed +
                           "torch.distributed.rpc was not initialised where it was pickled: call "
                           "dtorch_ops.network.init() or rpc.init_rpc() there first");
  }
  Network* network = NetworkIfAny();
  if (!network || network->Name().empty()) {
    throw UnreachableError(failed +
                           "torch.distributed.rpc is not initialised here: call "
                           "dtorch_ops.network.init() or rpc.init_rpc(), so as to reach " +
                           Called(peer));
  }
  try {
    return {{}, nullptr, network->Reach(peer, local, has_value)};
  } catch (const UnreachableError& error) {
    throw UnreachableError(failed + error.what());
  }
}

}  // namespace dtorch
