// Says to the owner of promises what a producer far away may say, with mistakes in it: each is to
// be answered, and none to do harm. At last it fulfils a promise as it should be done.
//
//   network_stranger COUNT SEED
//
// Reads the address of the owner's agent, the token of that last promise, and those of others,
// which may come to any end. Prints how many messages were answered with each status.

#include "dtorch/network/message.h"

#define USE_TENSORPIPE
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/torch.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

namespace rpc = torch::distributed::rpc;
using dtorch::network::Request;
using dtorch::network::Verb;
using MessagePtr = c10::intrusive_ptr<rpc::Message>;
using Payload = std::vector<char>;

constexpr float kTimeout = 60;
constexpr size_t kUnderWay = 1024;

MessagePtr MessageOf(Payload payload, std::vector<at::Tensor> beside = {}) {
  return c10::make_intrusive<rpc::Message>(std::move(payload), std::move(beside),
                                           rpc::MessageType::SCRIPT_CALL);
}

// The owner watches whoever holds a promise: "there I am", says this one.
class Says : public rpc::RequestCallback {
  c10::intrusive_ptr<rpc::JitFuture> processMessage(rpc::Message&,
                                                    std::vector<c10::Stream>) const override {
    auto reply = c10::make_intrusive<rpc::JitFuture>(c10::AnyClassType::get());
    reply->markCompleted(c10::IValue(c10::make_intrusive<rpc::Message>(
        Payload{'d'}, std::vector<at::Tensor>(), rpc::MessageType::SCRIPT_RET)));
    return reply;
  }
};

class Stranger {
 public:
  explicit Stranger(const std::string& owner) {
    addresses_->set("owner", owner);
    rpc::TensorPipeRpcBackendOptions options(4, std::vector<std::string>{"uv"},
                                             std::vector<std::string>{"basic"}, kTimeout, "");
    agent_ = std::make_shared<rpc::TensorPipeAgent>(
        store_, "stranger", static_cast<rpc::worker_id_t>(0), std::nullopt, options,
        std::unordered_map<std::string, rpc::DeviceMap>(), std::vector<c10::Device>(),
        std::make_unique<Says>());
    agent_->start();
    agent_->updateGroupMembership(owner_, {}, {}, /*isJoin=*/true);
  }

  std::string name() const { return "stranger@" + addresses_->get_to_str("stranger"); }

  void Send(MessagePtr message) {
    replies_.push_back(agent_->send(owner_, std::move(message), kTimeout, {}));
    if (replies_.size() >= kUnderWay) Receive();
  }
  // Throws what RPC does if one was not answered.
  void ReceiveAll() {
    while (!replies_.empty()) Receive();
  }
  const std::map<char, int>& statuses() const { return statuses_; }
  void End() { agent_->shutdown(); }

 private:
  void Receive() {
    replies_.front()->waitAndThrow();
    const auto message = replies_.front()->value().toCustomClass<rpc::Message>();
    replies_.pop_front();
    ++statuses_[message->payload().empty() ? '-' : message->payload()[0]];
  }

  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  const c10::intrusive_ptr<c10d::Store> addresses_ =
      c10::make_intrusive<c10d::PrefixStore>("addrs", store_);
  const rpc::WorkerInfo owner_{"owner", static_cast<rpc::worker_id_t>(1)};
  std::shared_ptr<rpc::TensorPipeAgent> agent_;
  std::deque<c10::intrusive_ptr<rpc::JitFuture>> replies_;
  std::map<char, int> statuses_;
};

class Mistakes {
 public:
  Mistakes(std::string sender, std::vector<std::string> tokens, unsigned seed)
      : sender_(std::move(sender)), tokens_(std::move(tokens)), random_(seed) {}

  MessagePtr Next() {
    Request request = Any();
    std::vector<at::Tensor> beside;
    if (Below(8) == 0) {  // as a large value travels
      request.bytes = at::Tensor();
      beside.push_back(AnyTensor());
      if (Below(4) == 0) beside.push_back(AnyTensor());
    }
    Payload payload = request.Pack();
    switch (Below(6)) {
      case 0:
        payload.resize(Below(payload.size()));
        break;
      case 1:
        payload.resize(payload.size() + 1 + Below(64), static_cast<char>(random_()));
        break;
      case 2:
        PutNumber(payload);
        break;
      case 3:  // in what is said of the value
        break;
      default:
        for (size_t flips = 1 + Below(4); flips > 0; --flips) {
          payload[Below(payload.size())] ^= static_cast<char>(1u << Below(8));
        }
    }
    return MessageOf(std::move(payload), std::move(beside));
  }

 private:
  size_t Below(size_t limit) {
    return std::uniform_int_distribution<size_t>(0, limit - 1)(random_);
  }

  int64_t AnyNumber() {
    constexpr std::array<int64_t, 12> numbers{
        0, 1, -1, 3, 7, 255, 1 << 20, int64_t{1} << 32, 1l << 62, INT64_MAX, INT64_MIN, -12345};
    return Below(3) == 0 ? static_cast<int64_t>(random_()) : numbers[Below(numbers.size())];
  }

  // Of a length, a version, a verb.
  void PutNumber(Payload& payload) {
    const int64_t number = AnyNumber();
    const size_t at = Below(payload.size() / sizeof(number)) * sizeof(number);
    std::memcpy(payload.data() + at, &number, sizeof(number));
  }

  at::Tensor AnyTensor() {
    switch (Below(5)) {
      case 0:
        return at::empty({0}, at::kByte);
      case 1:
        return at::zeros({3, 5}, at::kByte).t();
      case 2:
        return at::zeros({16}, at::kByte).narrow(0, 4, 8);
      case 3:
        return at::zeros({4}, at::kDouble);
      default:
        return at::zeros({static_cast<int64_t>(Below(100))}, at::kByte);
    }
  }

  // Of any verb, all of whose fields may be right.
  Request Any() {
    Request request;
    request.verb = static_cast<Verb>(Below(static_cast<size_t>(Verb::kAbandon) + 1));
    request.sender = sender_;
    if (Below(20) == 0) request.sender = sender_.substr(0, Below(sender_.size()));
    request.token = tokens_[Below(tokens_.size())];
    request.number = Below(2) == 0 ? 0 : AnyNumber();
    request.text.resize(Below(40), static_cast<char>(random_()));
    request.description = {AnyNumber(), AnyNumber(), AnyNumber()};
    request.description.resize(Below(80), AnyNumber());
    if (Below(2) == 0) request.bytes = at::zeros({static_cast<int64_t>(Below(64))}, at::kByte);
    return request;
  }

  const std::string sender_;
  const std::vector<std::string> tokens_;
  std::mt19937_64 random_;
};

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  if (argc != 3) {
    std::cerr << "usage: network_stranger COUNT SEED\n";
    return 2;
  }
  std::string address, last, token;
  std::cin >> address >> last;
  std::vector<std::string> tokens;
  while (std::cin >> token) tokens.push_back(token);
  Stranger stranger(address);
  Mistakes mistakes(stranger.name(), tokens, static_cast<unsigned>(std::atoi(argv[2])));
  for (int count = std::atoi(argv[1]); count > 0; --count) stranger.Send(mistakes.Next());
  stranger.ReceiveAll();
  for (const auto& [status, count] : stranger.statuses()) {
    std::cout << status << " " << count << "\n";
  }
  stranger.Send(MessageOf(Request{.verb = Verb::kSet,
                                  .sender = stranger.name(),
                                  .token = last,
                                  .description = {static_cast<int64_t>(at::kFloat), 0, -1, 3},
                                  .bytes = at::full({3}, 4.0f).view(at::kByte)}
                              .Pack()));
  stranger.ReceiveAll();
  stranger.End();
}
