#include "dtorch/network/agent.h"

#include "dtorch/base/error.h"
#include "dtorch/future/complete.h"

#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace dtorch::network {

namespace rpc = torch::distributed::rpc;

namespace {

// What comes in needs one for some microseconds.
constexpr int kThreads = 4;

using MessagePtr = c10::intrusive_ptr<rpc::Message>;

MessagePtr ReplyMessage(const std::string& text) {
  return c10::make_intrusive<rpc::Message>(std::vector<char>(text.begin(), text.end()),
                                           std::vector<at::Tensor>(), rpc::MessageType::SCRIPT_RET);
}

std::string TextOf(const rpc::Message& message) {
  return {message.payload().begin(), message.payload().end()};
}

rpc::TensorPipeRpcBackendOptions OptionsOf(const rpc::TensorPipeAgent& of_user,
                                           Agent::Carries what) {
  const auto options = of_user.getBackendOptions();
  std::vector<std::string> transports =
      options.transports ? *options.transports : rpc::TensorPipeTransportRegistry()->Keys();
  // It keeps a core busy while nothing happens, and what is on one machine has no need of us.
  std::erase(transports, "shm");
  // The last one is where all connections begin, and which every machine has.
  std::erase(transports, "uv");
  transports.emplace_back("uv");
  auto channels = options.channels;
  if (what == Agent::Carries::kMessages) channels = {"basic"};
  return {kThreads, std::move(transports), std::move(channels), options.rpcTimeoutSeconds,
          options.initMethod};
}

// Torch's agent is told by its store who is where, under this prefix. Ours has a store to itself.
c10::intrusive_ptr<c10d::Store> AddressesIn(const c10::intrusive_ptr<c10d::Store>& store) {
  return c10::make_intrusive<c10d::PrefixStore>("addrs", store);
}

}  // namespace

// Those that were reached, by address: how the agent knows them.
struct Agent::Peers {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex;  // also of what torch's agent knows of them: it locks in static groups alone
  std::unordered_map<std::string, rpc::worker_id_t> ids;
  rpc::worker_id_t last_id = 0;

  // A connection that has failed stays with its id.
  void Forget(const std::string& address, rpc::worker_id_t id) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = ids.find(address);
    if (it != ids.end() && it->second == id) ids.erase(it);
  }
};

// Replies that are still to come. They are given through the agent, which has to be there.
struct Agent::Owed {
  std::mutex mutex;
  std::condition_variable none;
  int64_t count = 0;

  void Add(int64_t more) {
    std::lock_guard<std::mutex> lock(mutex);
    count += more;
    if (count == 0) none.notify_all();
  }
  bool AwaitNone(std::chrono::seconds limit) {
    std::unique_lock<std::mutex> lock(mutex);
    return none.wait_for(lock, limit, [&] { return count == 0; });
  }
};

// What the agent gives its incoming messages to.
class Agent::Incoming final : public rpc::RequestCallback {
 public:
  Incoming(Handler handler, std::shared_ptr<Owed> owed)
      : handler_(handler), owed_(std::move(owed)) {}

 protected:
  c10::intrusive_ptr<rpc::JitFuture> processMessage(
      rpc::Message& message, std::vector<c10::Stream> streams) const override {
    // Those that tensors of devices were received on.
    const c10::MultiStreamGuard guard(streams);
    auto replied = c10::make_intrusive<rpc::JitFuture>(c10::AnyClassType::get());
    const FuturePtr answer = Answer(message);
    owed_->Add(1);
    answer->addCallback([replied, owed = owed_](c10::ivalue::Future& answered) {
      if (answered.hasError()) {
        replied->setError(answered.exception_ptr());
      } else {
        replied->markCompleted(c10::IValue(ReplyMessage(answered.value().toStringRef())));
      }
      owed->Add(-1);
    });
    return replied;
  }

 private:
  FuturePtr Answer(rpc::Message& message) const {
    Request request;
    const auto& payload = message.payload();
    if (!Request::Unpack({payload.data(), payload.size()}, request)) {
      const Reply refused{Reply::Status::kRefused,
                          "expected a request of this version of dtorch_ops, got another one"};
      return MakeCompletedFuture(c10::StringType::get(), refused.ToText());
    }
    if (!message.tensors().empty()) request.bytes = std::move(message.tensors()[0]);
    return handler_(std::move(request));
  }

  const Handler handler_;
  const std::shared_ptr<Owed> owed_;
};

namespace {

// What torch's warnings call it: the worker, and which of its connections. Torch limits the length.
std::string NameOf(const std::string& worker, const std::string& which) {
  return worker.substr(0, 100) + ":dtorch_ops:" + which;
}

// A group of its own, of those that come and go. In a static one torch would count the calls of
// join() together with those of the user's agent, and both would wait for ever.
std::shared_ptr<rpc::TensorPipeAgent> Start(const rpc::TensorPipeAgent& of_user,
                                            Agent::Carries what,
                                            std::unique_ptr<rpc::RequestCallback> incoming,
                                            const c10::intrusive_ptr<c10d::Store>& store) {
  auto agent = std::make_shared<rpc::TensorPipeAgent>(
      store, NameOf(of_user.RpcAgent::getWorkerInfo().name_, "self"),
      static_cast<rpc::worker_id_t>(0), /*worldSize=*/std::nullopt, OptionsOf(of_user, what),
      std::unordered_map<std::string, rpc::DeviceMap>(), of_user.getDevices(), std::move(incoming));
  agent->start();
  return agent;
}

}  // namespace

Agent::Agent(const rpc::TensorPipeAgent& of_user, Carries what, Handler handler)
    : peers_(std::make_shared<Peers>()),
      owed_(std::make_shared<Owed>()),
      agent_(Start(of_user, what, std::make_unique<Incoming>(handler, owed_), peers_->store)),
      address_(AddressesIn(peers_->store)->get_to_str(agent_->RpcAgent::getWorkerInfo().name_)) {}

FuturePtr Agent::Send(const Peer& to, Request request, int64_t timeout_ms,
                      const rpc::DeviceMap& device_map) {
  auto payload = request.Pack();
  std::vector<at::Tensor> beside;
  if (request.bytes.defined()) beside.push_back(std::move(request.bytes));
  // Nothing looks at the type.
  auto message = c10::make_intrusive<rpc::Message>(std::move(payload), std::move(beside),
                                                   rpc::MessageType::SCRIPT_CALL);
  rpc::worker_id_t id = 0;
  FuturePtr sent;
  {
    std::lock_guard<std::mutex> lock(peers_->mutex);
    const auto found = peers_->ids.find(to.address);
    const bool first = found == peers_->ids.end();
    if (first && peers_->last_id == std::numeric_limits<rpc::worker_id_t>::max()) {
      throw DTorchError("expected at most " + std::to_string(peers_->last_id) +
                        " connections, one more is needed: initialise torch.distributed.rpc anew");
    }
    id = first ? ++peers_->last_id : found->second;
    const rpc::WorkerInfo info(NameOf(to.name, std::to_string(id)), id);
    if (first) {
      AddressesIn(peers_->store)->set(info.name_, to.address);
      agent_->updateGroupMembership(info, {}, {}, /*isJoin=*/true);
      peers_->ids.emplace(to.address, id);
    }
    try {
      sent = agent_->send(info, std::move(message), static_cast<float>(timeout_ms) / 1000.f,
                          device_map);
    } catch (...) {
      if (first) peers_->ids.erase(to.address);
      throw;
    }
  }
  return sent->then(
      [peers = peers_, address = to.address, id](c10::ivalue::Future& answered) {
        if (answered.hasError() && rpc::getRPCErrorType(answered) != rpc::RPCErrorType::TIMEOUT) {
          peers->Forget(address, id);
        }
        return c10::IValue(TextOf(*answered.value().toCustomClass<rpc::Message>()));
      },
      c10::StringType::get());
}

void Agent::ExpectClosing() {
  std::call_once(expects_closing_, [&] { agent_->join(/*shutdown=*/true); });
}

void Agent::Stop() {
  agent_->shutdown();
  // The late ones go nowhere, but through the agent. One that nobody gives keeps it for ever.
  if (!owed_->AwaitNone(std::chrono::seconds(10))) {
    new std::shared_ptr<rpc::TensorPipeAgent>(agent_);  // leaked on purpose
  }
}

}  // namespace dtorch::network
