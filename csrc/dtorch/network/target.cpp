#include "dtorch/network/target.h"

#include "dtorch/base/error.h"
#include "dtorch/network/peers.h"
#include "dtorch/network/rpc.h"
#include "dtorch/promise/token.h"

#include <utility>

namespace dtorch::network {

FuturePtr Target::Say(Request request, int64_t timeout_ms) const {
  if (generation != ForkGeneration()) {
    throw DTorchError(
        "expected a promise that this process has unpickled, got one of its parent's, inherited "
        "by a fork: RPC does not work in a forked child. Fulfil it in the parent");
  }
  request.sender = Self();
  request.token = token;
  if (request.sender.empty()) {
    throw BrokenPromiseError("torch.distributed.rpc was shut down in this process: " +
                             Called(peer) + ", which waits for the promise, is not to be reached");
  }
  return Call(peer, std::move(request), timeout_ms);
}

Reply Target::Await(const FuturePtr& replied) const {
  WaitFor(replied, peer);
  Reply reply = Reply::FromText(replied->value().toStringRef());
  switch (reply.status) {
    case Reply::Status::kElsewhere:
      throw BrokenPromiseError(Called(peer) +
                               " is not the one that waits for the promise: " + reply.text);
    case Reply::Status::kRefused:
      throw DTorchError(Called(peer) + ", which waits for the promise, says: " + reply.text);
    default:
      return reply;
  }
}

void Target::AwaitFulfilled(const FuturePtr& replied) const {
  const Reply reply = Await(replied);
  if (reply.status == Reply::Status::kSatisfied) throw PromiseAlreadySatisfiedError(reply.text);
}

}  // namespace dtorch::network
