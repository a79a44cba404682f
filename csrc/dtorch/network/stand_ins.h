#pragma once

#include "dtorch/base/api.h"
#include "dtorch/network/message.h"
#include "dtorch/promise/backend.h"

#include <memory>

// The owner's side. Whoever has a promise far away is stood in for by a producer in this process,
// made of the same token: what holds for producers on this machine holds for it. It goes when the
// one far away drops the promise, or is lost.
namespace dtorch::network {

/// What another process asks of this one; the reply's text. Called in a thread of the agent's;
/// neither blocks, nor runs callbacks of the user, nor throws.
FuturePtr Serve(Request request) noexcept;

/// Nobody can fulfil it but through stand-ins: it fails at StopServing().
void Rely(std::weak_ptr<OwnerEnd> end);

/// RPC is about to be shut down: all stand-ins go.
void StopServing();

}  // namespace dtorch::network
