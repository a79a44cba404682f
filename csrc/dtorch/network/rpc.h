#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/waiter_list.h"
#include "dtorch/network/message.h"

#include <cstdint>
#include <string>

// The one place that knows torch.distributed.rpc, which does all that is said on the network. A
// call runs in a thread of the RPC's pool over there, and never wants Python's lock.
namespace dtorch::network {

/// This process's name; empty if RPC is not initialised, or Leave() was called since it was.
/// Before the first name that differs, the host is told: Host::join_network.
std::string SelfName();
/// Whether the host has said that others may ask this process to answer later.
bool AnswersLater();
/// For the RPC that is initialised now: it is about to be shut down.
void Leave();

/// How many threads answer what comes in, replies included. 0 if RPC is not initialised.
int64_t PoolSize();

/// UnreachableError if RPC knows no such worker, or is not initialised.
void CheckWorker(const std::string& worker);

/// What `worker` replies to `request`: a future of text, Reply::ToText(). It fails if the
/// connection does, at once, or when the time is over (0: never). Does not block, and throws
/// nothing.
FuturePtr Call(const std::string& worker, Request request, int64_t timeout_ms);

/// Has `worker` answer, with nothing, when that time has passed or it leaves: peers.h.
FuturePtr AskLater(const std::string& worker, int64_t after_ms, int64_t timeout_ms);

/// Of what has failed: no answer in time, and no more.
bool IsTimeout(const FuturePtr& failed);

/// Scope in which a value is on its way to a worker: whatever else is said to it has to wait.
class ValueOnTheWay {
 public:
  explicit ValueOnTheWay(std::string worker);
  ~ValueOnTheWay();
  ValueOnTheWay(const ValueOnTheWay&) = delete;
  ValueOnTheWay& operator=(const ValueOnTheWay&) = delete;

 private:
  const std::string worker_;
};
int64_t ValuesOnTheWayTo(const std::string& worker);

// What is called over there: an operator, and a scripted function of the host's, since only these
// may reply with a future.
inline constexpr char kCallOperator[] = "aten::_dtorch_call";
inline constexpr char kAnswerLaterFunction[] = "_dtorch_answer_later";

}  // namespace dtorch::network
