#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/waiter_list.h"
#include "dtorch/network/message.h"

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

// The one place that knows the torch.distributed.rpc which the user has initialised: it says who is
// who. What is said goes through agents of our own (agent.h), which live as long.
namespace dtorch::network {

/// This process, as a Peer; empty if RPC is not initialised, or Leave() was called since it was.
/// Before the first one that differs, our agent is started: DTorchError if it cannot be.
std::string Self();
/// As Self(), but starts nothing: what answers others has no business with another initialisation.
std::string Present();
/// Where this process takes large values. DTorchError if it cannot.
std::string FreightAddress();
/// For the RPC that is initialised now: it is about to be shut down. Self() is empty from now on;
/// what is under way may still be answered, until Close().
void Leave();
/// The same as the process exits, without a word to torch, whose locks a forked child may find
/// taken. False if no agent of ours runs: in such a child, say.
bool LeaveAtExit();
/// Behind Leave(). Blocks until what was said has been answered, or the time is over: a time for
/// beats, and one for what somebody waits for. Peers may close their connections from now on.
void AwaitReplies(int64_t beats_ms, int64_t others_ms);
/// It has gone: what there is of connections to it.
void Forget(const std::string& peer);
/// Ends our agents, and what is still under way. Not in a thread of theirs.
void Close();

/// What is asked of this process is given to `handler`. Set once, when the library is loaded.
void SetHandler(FuturePtr (*handler)(Request request));

/// UnreachableError if RPC knows no worker of the peer's name, or is not initialised.
void CheckPeer(const std::string& peer);

/// What `peer` replies to `request`: a future of text, Reply::ToText(). It fails if the
/// connection does, at once, or when the time is over (0: never). Does not block, and throws
/// nothing.
FuturePtr Call(const std::string& peer, Request request, int64_t timeout_ms);

/// Whether RPC's device maps name one of the peer's for `device`: bytes there need not go through
/// the host.
bool SendsFrom(c10::Device device, const std::string& peer);

/// Of what has failed: no answer in time, and no more.
bool IsTimeout(const FuturePtr& failed);

}  // namespace dtorch::network
