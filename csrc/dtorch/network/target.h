#pragma once

#include "dtorch/base/fork.h"
#include "dtorch/future/waiter_list.h"
#include "dtorch/network/message.h"

#include <cstdint>
#include <string>

namespace dtorch::network {

/// One promise of another process, as a producer reaches it: what is said of it.
struct Target {
  std::string peer, token;
  uint32_t generation = ForkGeneration();

  /// The reply's text, to come (rpc.h, Call). Throws in a forked child, and where RPC was shut
  /// down.
  FuturePtr Say(Request request, int64_t timeout_ms) const;
  /// Blocks until the owner has replied. Throws what it replies, if that is an error;
  /// BrokenPromiseError if there is no sign of it. Interruptible.
  Reply Await(const FuturePtr& replied) const;
  /// The same for what fulfils it: PromiseAlreadySatisfiedError, too.
  void AwaitFulfilled(const FuturePtr& replied) const;
};

}  // namespace dtorch::network
