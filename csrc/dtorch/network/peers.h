#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/waiter_list.h"

#include <cstdint>
#include <functional>
#include <string>

// Who is there. A process watches each peer that it has to do with, be it as the owner of promises
// or as a producer of the peer's:
//
//     one --beat--> the other, which answers when a quarter of the limit has passed
//         <---------'              or when it leaves
//
// over and over, so that one question is always out: if the peer dies its connection does, and
// the question fails at once (a connection that nobody says anything on would not notice). If it is
// stopped, or the network loses what is said, no answer comes in time. An answer takes no thread
// and not Python's lock, so that a peer that is merely slow is there.
namespace dtorch::network {

/// After how long without a sign a peer is given up. For this process alone. 30 s at first.
DTORCH_API void SetLostAfterMs(int64_t ms);
DTORCH_API int64_t GetLostAfterMs();

/// From now on, until it is lost or this process leaves; does nothing if it is watched already.
void Watch(const std::string& peer);
/// Told once of each that is lost, and what has happened. In a thread of the agent's: does not
/// block. Set once, when the library is loaded.
void SetOnLost(void (*on_lost)(const std::string& peer, const std::string& why));

/// Another process asks. The reply's text: complete when the time has passed, or at
/// StopAnswering().
FuturePtr AnswerLater(int64_t after_ms);
/// It has said something.
void HeardFrom(const std::string& sender);

/// Blocks until `reply` of `peer` is there, however long that takes as long as there are signs of
/// the peer. BrokenPromiseError if there were none for too long. Interruptible.
void WaitFor(const FuturePtr& reply, const std::string& peer);

/// RPC is about to be shut down: answers everybody, and asks nobody any more.
void StopAnswering();

}  // namespace dtorch::network
