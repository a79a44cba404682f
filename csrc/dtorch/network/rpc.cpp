#include "dtorch/network/rpc.h"

#include "dtorch/base/error.h"
#include "dtorch/base/fork.h"
#include "dtorch/future/complete.h"
#include "dtorch/network/agent.h"
#include "dtorch/promise/backend.h"
#include "dtorch/promise/token.h"
#include "dtorch/sys/thread.h"

#include <ATen/core/jit_type.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace dtorch::network {
namespace {

namespace rpc = torch::distributed::rpc;
using AgentPtr = std::shared_ptr<rpc::RpcAgent>;

// What this process knows of the RPC that is initialised now.
struct State {
  std::mutex starting;  // outside of the other one
  std::mutex mutex;
  std::weak_ptr<rpc::RpcAgent> joined;  // the user's
  std::shared_ptr<Agent> messages;      // ours, beside it
  std::string self;
  std::shared_ptr<Agent> freight;                                  // or none, so far
  std::unordered_map<std::string, std::string> freight_addresses;  // by peer
  std::weak_ptr<rpc::RpcAgent> left;
  int64_t unanswered = 0;  // but for beats
  std::condition_variable answered;
};
State* state = new State;  // leaked on purpose: the agent's threads may outlive everything
State& GetState() { return *state; }
Handler handler = nullptr;
constexpr char kShutDown[] = "torch.distributed.rpc has been shut down";
// Of the process that this one was forked from: its threads are not here. Kept, so that no other
// one is ever where it is.
AgentPtr* inherited = nullptr;

// Torch's own lock around it is left free by a fork that happens meanwhile.
std::mutex& AgentMutex() {
  static auto* mutex = [] {
    auto* made = new std::mutex;
    HoldAcrossFork(*made);
    return made;
  }();
  return *mutex;
}

AgentPtr AgentOfTorch() {
  std::lock_guard<std::mutex> lock(AgentMutex());
  if (!rpc::RpcAgent::isCurrentRpcAgentSet()) return nullptr;
  try {
    return rpc::RpcAgent::getCurrentRpcAgent();
  } catch (const std::exception&) {
    return nullptr;  // shut down in this very moment
  }
}

AgentPtr CurrentAgent() {
  AgentPtr agent = AgentOfTorch();
  return inherited && agent == *inherited ? nullptr : agent;
}

const bool registered [[maybe_unused]] = [] {
  // Of the thread that forks: several may at once. In the child it is leaked on purpose: to end the
  // agent there would wait for its threads.
  static thread_local AgentPtr* of_parent = nullptr;
  OnFork({.prepare = [] { of_parent = new AgentPtr(CurrentAgent()); },
          .parent =
              [] {
                delete of_parent;
                of_parent = nullptr;
              },
          .child =
              [] {
                state = new State;  // the lock of the other one may be held by a missing thread
                if (*of_parent) inherited = of_parent;
              }});
  return true;
}();

// What the user's agent sends tensors of its devices to.
rpc::DeviceMap DeviceMapTo(const std::string& worker) {
  const AgentPtr of_user = CurrentAgent();
  return of_user ? of_user->getDeviceMap(of_user->getWorkerInfo(worker)) : rpc::DeviceMap();
}

// It is to be answered as long as there is a copy of this.
std::shared_ptr<const void> CountUnanswered() {
  State& state = GetState();
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    ++state.unanswered;
  }
  return {&state, [](State* counting) {
            std::lock_guard<std::mutex> lock(counting->mutex);
            if (--counting->unanswered == 0) counting->answered.notify_all();
          }};
}

FuturePtr FailedFuture(std::exception_ptr error) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::StringType::get());
  future->setError(std::move(error));
  return future;
}

const rpc::TensorPipeAgent& TensorPipe(const AgentPtr& of_user) {
  const auto* tensor_pipe = dynamic_cast<const rpc::TensorPipeAgent*>(of_user.get());
  if (tensor_pipe) return *tensor_pipe;
  throw DTorchError(
      "expected torch.distributed.rpc to be initialised with its TensorPipe backend, got another "
      "one: promises cannot go through it");
}

// Ours, taken out.
std::vector<std::shared_ptr<Agent>> TakeAgents(State& state) {
  state.freight_addresses.clear();
  state.joined.reset();
  return {std::exchange(state.messages, nullptr), std::exchange(state.freight, nullptr)};
}

void Stop(const std::vector<std::shared_ptr<Agent>>& agents) {
  for (const auto& agent : agents) {
    if (agent) agent->Stop();
  }
}

// In a thread of its own: this one may be one of the agents', which they wait for.
void StopElsewhere(std::vector<std::shared_ptr<Agent>> agents) {
  auto* kept = new std::vector<std::shared_ptr<Agent>>(std::move(agents));
  try {
    StartThread([kept] {
      Stop(*kept);
      delete kept;
    });
  } catch (const std::exception&) {
    // No thread to be had: they stay.
  }
}

// Their threads must not meet what static destructors have taken down.
void StopAtExit() {
  static const bool once [[maybe_unused]] = [] {
    std::atexit([] {
      if (LeaveAtExit()) Close();
    });
    return true;
  }();
}

void StartBeside(const AgentPtr& of_user) {
  StopAtExit();
  State& state = GetState();
  auto agent = std::make_shared<Agent>(TensorPipe(of_user), Agent::Carries::kMessages, handler);
  std::vector<std::shared_ptr<Agent>> needless;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    if (state.left.lock() == of_user) {
      needless = {std::move(agent)};  // it was left meanwhile
    } else {
      needless = TakeAgents(state);  // which nobody has closed
      state.self = Peer{of_user->getWorkerInfo().name_, agent->address()}.ToText();
      state.messages = std::move(agent);
      state.joined = of_user;
    }
  }
  if (needless[0]) StopElsewhere(std::move(needless));
}

std::shared_ptr<Agent> Freight() {
  State& state = GetState();
  const auto look = [&] {
    std::lock_guard<std::mutex> lock(state.mutex);
    return state.freight;
  };
  if (auto agent = look()) return agent;
  std::lock_guard<std::mutex> starting(state.starting);
  if (auto agent = look()) return agent;
  const AgentPtr of_user = CurrentAgent();
  if (!of_user) throw DTorchError(kShutDown);
  auto agent = std::make_shared<Agent>(TensorPipe(of_user), Agent::Carries::kFreight, handler);
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    if (state.joined.lock() == of_user && state.left.lock() != of_user) {
      state.freight = agent;
      return agent;
    }
  }
  StopElsewhere({std::move(agent)});
  throw DTorchError(kShutDown);
}

FuturePtr SendFreight(const Peer& to, Request request, int64_t timeout_ms) {
  const auto device_map = request.bytes.is_cpu() ? rpc::DeviceMap() : DeviceMapTo(to.name);
  return Freight()->Send(to, std::move(request), timeout_ms, device_map);
}

// It has `said` where.
FuturePtr SendFreight(const std::string& peer, c10::ivalue::Future& said, Request request,
                      int64_t timeout_ms) {
  const Reply reply = Reply::FromText(said.value().toStringRef());
  if (reply.status != Reply::Status::kDone) {
    return MakeCompletedFuture(c10::StringType::get(), reply.ToText());
  }
  State& state = GetState();
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    state.freight_addresses[peer] = reply.text;
  }
  return SendFreight({Peer::FromText(peer).name, reply.text}, std::move(request), timeout_ms);
}

// Whether nothing is to be started for it; and how others reach this process, unless it has left.
bool Look(const AgentPtr& of_user, std::string& self) {
  State& state = GetState();
  std::lock_guard<std::mutex> lock(state.mutex);
  if (!of_user || state.left.lock() == of_user) return true;
  if (state.joined.lock() != of_user) return false;
  self = state.self;
  return true;
}

}  // namespace

std::string Self() {
  const AgentPtr of_user = CurrentAgent();
  std::string self;
  if (Look(of_user, self)) return self;
  std::lock_guard<std::mutex> lock(GetState().starting);
  if (Look(of_user, self)) return self;
  StartBeside(of_user);
  Look(of_user, self);
  return self;
}

std::string Present() {
  std::string self;
  (void)Look(CurrentAgent(), self);
  return self;
}

std::string FreightAddress() { return Freight()->address(); }

bool LeaveAtExit() {
  State& state = GetState();
  std::lock_guard<std::mutex> lock(state.mutex);
  if (!state.messages) return false;
  state.left = state.joined;
  return true;
}

void Leave() {
  const AgentPtr of_user = CurrentAgent();
  State& state = GetState();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.left = of_user;
}

void AwaitReplies(int64_t beats_ms, int64_t others_ms) {
  using std::chrono::milliseconds;
  State& state = GetState();
  std::vector<std::shared_ptr<Agent>> agents;
  {
    std::unique_lock<std::mutex> lock(state.mutex);
    state.answered.wait_for(lock, milliseconds(others_ms), [&] { return state.unanswered == 0; });
    for (const auto& agent : {state.messages, state.freight}) {
      if (agent) agents.push_back(agent);
    }
  }
  // Torch has no event for it.
  const auto limit = std::chrono::steady_clock::now() + milliseconds(beats_ms);
  const auto is_quiet = [](const auto& agent) { return agent->pending() == 0; };
  while (!std::all_of(agents.begin(), agents.end(), is_quiet)) {
    if (std::chrono::steady_clock::now() > limit) return;
    std::this_thread::sleep_for(milliseconds(1));
  }
  for (const auto& agent : agents) agent->ExpectClosing();
}

void Forget(const std::string& peer) {
  State& state = GetState();
  std::shared_ptr<Agent> freight;
  std::string address;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    freight = state.freight;
    auto node = state.freight_addresses.extract(peer);
    if (!node || !freight) return;
    address = std::move(node.mapped());
  }
  try {
    // A connection that has nothing to say does not notice that it was closed.
    freight->Send({Peer::FromText(peer).name, address}, {.verb = Verb::kBeat},
                  /*timeout_ms=*/1000, {});
  } catch (const std::exception&) {
    // It stays until this process leaves.
  }
}

void Close() {
  State& state = GetState();
  std::vector<std::shared_ptr<Agent>> agents;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    agents = TakeAgents(state);
  }
  Stop(agents);
}

void SetHandler(FuturePtr (*value)(Request request)) { handler = value; }

void CheckPeer(const std::string& peer) {
  const AgentPtr of_user = CurrentAgent();
  if (!of_user) throw UnreachableError("torch.distributed.rpc is not initialised here");
  try {
    (void)of_user->getWorkerInfo(Peer::FromText(peer).name);
  } catch (const c10::ValueError&) {
    throw;
  } catch (const std::exception&) {
    throw UnreachableError("torch.distributed.rpc knows no " + Called(peer) +
                           " here: both processes must have initialised the same group");
  }
}

FuturePtr Call(const std::string& peer, Request request, int64_t timeout_ms) {
  State& state = GetState();
  try {
    const auto unanswered = request.verb == Verb::kBeat ? nullptr : CountUnanswered();
    const Peer to = Peer::FromText(peer);
    const bool has_freight = request.HasFreight();
    std::shared_ptr<Agent> messages;
    std::string freight_address;
    {
      std::lock_guard<std::mutex> lock(state.mutex);
      if (state.left.lock() != state.joined.lock()) messages = state.messages;
      const auto it = state.freight_addresses.find(peer);
      if (it != state.freight_addresses.end()) freight_address = it->second;
    }
    if (!messages) throw DTorchError(kShutDown);
    FuturePtr replied;
    if (!has_freight) {
      replied = messages->Send(to, std::move(request), timeout_ms, {});
    } else if (!freight_address.empty()) {
      replied = SendFreight({to.name, freight_address}, std::move(request), timeout_ms);
    } else {
      Request where{.verb = Verb::kFreight, .sender = request.sender};
      const auto shared = std::make_shared<Request>(std::move(request));
      replied = messages->Send(to, std::move(where), timeout_ms, {})
                    ->thenAsync(
                        [peer, shared, timeout_ms](c10::ivalue::Future& said) {
                          return SendFreight(peer, said, std::move(*shared), timeout_ms);
                        },
                        c10::StringType::get());
    }
    if (unanswered) replied->addCallback([unanswered](c10::ivalue::Future&) {});
    return replied;
  } catch (const std::exception&) {
    return FailedFuture(std::current_exception());
  }
}

bool SendsFrom(c10::Device device, const std::string& peer) {
  try {
    return DeviceMapTo(Peer::FromText(peer).name).count(device) > 0;
  } catch (const std::exception&) {
    return false;  // who is sent to will say so
  }
}

bool IsTimeout(const FuturePtr& failed) {
  return failed->hasError() && rpc::getRPCErrorType(*failed) == rpc::RPCErrorType::TIMEOUT;
}

}  // namespace dtorch::network
