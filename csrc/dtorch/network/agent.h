#pragma once

#include "dtorch/future/waiter_list.h"
#include "dtorch/network/message.h"

#define USE_TENSORPIPE  // as torch was built
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#undef USE_TENSORPIPE

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

// An RPC agent of our own, beside the one that the user has initialised and with the same options:
// connections and threads that nothing else holds up. A call waits for no thread of the user's
// pool, all of which may block, or wait for this very call; nor does RPC's shutdown wait for ours.
//
// It belongs to no group, and needs no store: who is to be reached says where it listens.
//
// There are two of them. Messages go through one that has a single connection to each peer. Freight
// goes through one that has the channels which the user's agent has, sixteen connections and as
// many threads with torch's own choice; it is started when there is some.
namespace dtorch::network {

/// What is asked of this process: the reply, a future of text (Reply::ToText()). Called in a thread
/// of the agent's; neither blocks nor throws.
using Handler = FuturePtr (*)(Request request);

/// Thread-safe. Not to be destroyed in one of its threads.
class Agent {
 public:
  enum class Carries { kMessages, kFreight };
  /// Listens from now on. Throws what RPC does if it cannot.
  Agent(const torch::distributed::rpc::TensorPipeAgent& of_user, Carries what, Handler handler);
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  /// Where others reach it.
  const std::string& address() const { return address_; }

  /// A future of the reply's text. It fails if the connection does, at once, or when the time is
  /// over (0: never). A connection that has failed is not used again: the next call makes another.
  /// Does not block.
  FuturePtr Send(const Peer& to, Request request, int64_t timeout_ms,
                 const torch::distributed::rpc::DeviceMap& device_map);

  /// How many calls are under way from here.
  size_t pending() const { return agent_->numPendingResponses(); }
  /// There are none, and will be none: that others close their connections is no longer worth a
  /// warning.
  void ExpectClosing();

  /// Fails what is under way, and waits for the agent's threads: not to be called in one of them.
  void Stop();

 private:
  struct Peers;
  struct Owed;
  class Incoming;
  const std::shared_ptr<Peers> peers_;
  const std::shared_ptr<Owed> owed_;
  const std::shared_ptr<torch::distributed::rpc::TensorPipeAgent> agent_;
  const std::string address_;
  std::once_flag expects_closing_;
};

}  // namespace dtorch::network
