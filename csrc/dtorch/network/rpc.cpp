#include "dtorch/network/rpc.h"

#include "dtorch/base/fork.h"
#include "dtorch/base/host.h"
#include "dtorch/promise/backend.h"

#include <ATen/core/jit_type.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#define USE_TENSORPIPE  // as torch was built
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#undef USE_TENSORPIPE
#include <torch/csrc/distributed/rpc/utils.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace dtorch::network {
namespace {

namespace rpc = torch::distributed::rpc;
using AgentPtr = std::shared_ptr<rpc::RpcAgent>;

// What this process knows of the RPC that is initialised now.
struct State {
  std::mutex mutex;
  std::weak_ptr<rpc::RpcAgent> joined;
  std::weak_ptr<rpc::RpcAgent> left;
  std::unordered_map<std::string, int64_t> on_the_way;  // values, by worker
};
State* state = new State;  // leaked on purpose: RPC's threads may outlive everything
State& GetState() { return *state; }
std::atomic<bool> answers_later{false};
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
  static AgentPtr* of_parent = nullptr;  // leaked on purpose: to end it here would wait for threads
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

FuturePtr FailedFuture(c10::TypePtr type, std::exception_ptr error) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(std::move(type));
  future->setError(std::move(error));
  return future;
}

FuturePtr Send(const std::string& worker, rpc::ScriptCall call, int64_t timeout_ms,
               const c10::TypePtr& type) {
  try {
    const AgentPtr agent = CurrentAgent();
    if (!agent) throw DTorchError("torch.distributed.rpc has been shut down");
    const rpc::WorkerInfo to = agent->getWorkerInfo(worker);  // a copy: that one may leave
    const auto sent =
        agent->send(to, std::move(call).toMessage(), static_cast<float>(timeout_ms) / 1000.f);
    return sent->then(
        [](c10::ivalue::Future& answered) {
          const auto message = answered.value().toCustomClass<rpc::Message>();
          return rpc::deserializeRespToIValue(*message);
        },
        type);
  } catch (const std::exception&) {
    return FailedFuture(type, std::current_exception());
  }
}

std::shared_ptr<torch::jit::Operator> CallOperator() {
  static const auto op =
      torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(kCallOperator)).at(0);
  return op;
}

}  // namespace

std::string SelfName() {
  const AgentPtr agent = CurrentAgent();
  if (!agent) return {};
  State& state = GetState();
  bool joins = false;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    if (state.left.lock() == agent) return {};
    joins = state.joined.lock() != agent;
  }
  if (joins) {
    // Without a lock: the host may want one of its own, whose holder waits for ours.
    const auto join = GetHost().join_network;
    answers_later = join && join();
    std::lock_guard<std::mutex> lock(state.mutex);
    state.joined = agent;
  }
  return agent->getWorkerInfo().name_;
}

bool AnswersLater() { return answers_later; }

void Leave() {
  const AgentPtr agent = CurrentAgent();
  State& state = GetState();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.left = agent;
}

int64_t PoolSize() {
  const AgentPtr agent = CurrentAgent();
  if (!agent) return 0;
  const auto* tensor_pipe = dynamic_cast<const rpc::TensorPipeAgent*>(agent.get());
  return tensor_pipe ? tensor_pipe->getBackendOptions().numWorkerThreads
                     : rpc::kDefaultNumWorkerThreads;
}

void CheckWorker(const std::string& worker) {
  const AgentPtr agent = CurrentAgent();
  if (!agent) throw UnreachableError("torch.distributed.rpc is not initialised here");
  try {
    (void)agent->getWorkerInfo(worker);
  } catch (const std::exception&) {
    throw UnreachableError("torch.distributed.rpc knows no worker '" + worker +
                           "' here: both processes must have initialised the same group");
  }
}

FuturePtr Call(const std::string& worker, Request request, int64_t timeout_ms) {
  const bool has_bytes = request.bytes.defined();
  std::vector<c10::IValue> arguments{
      static_cast<int64_t>(request.verb),
      std::move(request.sender),
      std::move(request.token),
      request.number,
      std::move(request.text),
      std::move(request.description),
      has_bytes ? c10::IValue(std::move(request.bytes)) : c10::IValue()};
  return Send(worker, rpc::ScriptCall(CallOperator(), std::move(arguments)), timeout_ms,
              c10::StringType::get());
}

ValueOnTheWay::ValueOnTheWay(std::string worker) : worker_(std::move(worker)) {
  State& state = GetState();
  std::lock_guard<std::mutex> lock(state.mutex);
  ++state.on_the_way[worker_];
}

ValueOnTheWay::~ValueOnTheWay() {
  State& state = GetState();
  std::lock_guard<std::mutex> lock(state.mutex);
  const auto it = state.on_the_way.find(worker_);
  if (it != state.on_the_way.end() && --it->second == 0) state.on_the_way.erase(it);
}

FuturePtr AskLater(const std::string& worker, int64_t after_ms, int64_t timeout_ms) {
  std::vector<c10::IValue> arguments{SelfName(), after_ms};
  return Send(worker,
              rpc::ScriptCall(c10::QualifiedName(kAnswerLaterFunction), std::move(arguments),
                              /*isAsyncExecution=*/true),
              timeout_ms, c10::NoneType::get());
}

bool IsTimeout(const FuturePtr& failed) {
  return failed->hasError() && rpc::getRPCErrorType(*failed) == rpc::RPCErrorType::TIMEOUT;
}

int64_t ValuesOnTheWayTo(const std::string& worker) {
  State& state = GetState();
  std::lock_guard<std::mutex> lock(state.mutex);
  const auto it = state.on_the_way.find(worker);
  return it == state.on_the_way.end() ? 0 : it->second;
}

}  // namespace dtorch::network
