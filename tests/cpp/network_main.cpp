// Two processes of one RPC group, both without Python: an owner of promises, and a worker that
// fulfils them.
//
//   network_main owner|worker PORT

#include "dtorch/dtorch.h"

#define USE_TENSORPIPE
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/rpc/request_callback_no_python.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/torch.h>

#include <csignal>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <unistd.h>
#include <unordered_map>
#include <vector>

namespace {

namespace rpc = torch::distributed::rpc;
using StorePtr = c10::intrusive_ptr<c10d::TCPStore>;

std::shared_ptr<rpc::TensorPipeAgent> Join(const StorePtr& store, const std::string& name,
                                           int rank) {
  rpc::TensorPipeRpcBackendOptions options(/*numWorkerThreads=*/4, std::vector<std::string>{"uv"},
                                           std::nullopt, /*rpc_timeout=*/60, /*init_method=*/"");
  auto agent = std::make_shared<rpc::TensorPipeAgent>(
      store, name, static_cast<rpc::worker_id_t>(rank), /*worldSize=*/2, options,
      std::unordered_map<std::string, rpc::DeviceMap>(), std::vector<c10::Device>(),
      std::make_unique<rpc::RequestCallbackNoPython>());
  rpc::RpcAgent::setCurrentRpcAgent(agent);
  agent->start();
  return agent;
}

void Send(const StorePtr& store, const std::string& key, const std::string& text) {
  store->set(key, std::vector<uint8_t>(text.begin(), text.end()));
}
std::string Receive(const StorePtr& store, const std::string& key) {
  const auto bytes = store->get(key);
  return {bytes.begin(), bytes.end()};
}

dtorch::TensorPromise MakePromise() {
  return dtorch::TensorPromise(
      c10::make_intrusive<dtorch::TensorPromiseState>(dtorch::PromiseMode::kNetwork));
}

std::string Outcome(dtorch::TensorFuture future) {
  try {
    future.Wait(20000);
    return std::to_string(static_cast<int>(future.Get().sum().item<float>()));
  } catch (const dtorch::BrokenPromiseError& error) {
    return std::string("broken: ") + error.what();
  } catch (const std::exception& error) {
    return error.what();
  }
}

int Own(const StorePtr& store) {
  const auto agent = Join(store, "owner", 0);
  for (const char* what : {"value", "error", "drop", "die"}) {
    const dtorch::TensorPromise promise = MakePromise();
    const dtorch::TensorFuture future = promise.GetFuture();
    Send(store, what, promise.Token());
    std::cout << what << ": " << Outcome(future) << std::endl;
  }
  dtorch::network::LeaveNetwork();
  agent->shutdown();
  dtorch::network::CloseNetwork();
  return 0;
}

int Work(const StorePtr& store) {
  const auto agent = Join(store, "worker", 1);
  dtorch::TensorPromise::FromToken(Receive(store, "value")).SetValue(torch::full({3}, 2.0f));
  dtorch::TensorPromise::FromToken(Receive(store, "error")).SetException("of the worker");
  {
    const auto dropped = dtorch::TensorPromise::FromToken(Receive(store, "drop"));
  }
  const auto held = dtorch::TensorPromiseState::FromToken(Receive(store, "die"));
  if (!held->is_pending()) return 1;  // when it has said so the owner knows that it is held
  _exit(0);
}

}  // namespace

int main(int argc, char** argv) {
  // TensorPipe writes to connections whose other end has gone. (Python ignores it anyway.)
  std::signal(SIGPIPE, SIG_IGN);
  const std::string role = argc == 3 ? argv[1] : "";
  if (role != "owner" && role != "worker") {
    std::cerr << "usage: network_main owner|worker PORT\n";
    return 2;
  }
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::atoi(argv[2]));
  options.isServer = role == "owner";
  options.numWorkers = 2;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  return role == "owner" ? Own(store) : Work(store);
}
