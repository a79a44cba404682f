// The producer's side: ends of promises whose owner is reached through RPC. Registered as the
// network when the library is loaded.

#include "dtorch/promise/backend.h"

#include "dtorch/base/error.h"
#include "dtorch/base/fork.h"
#include "dtorch/base/log.h"
#include "dtorch/future/complete.h"
#include "dtorch/network/peers.h"
#include "dtorch/network/rpc.h"
#include "dtorch/network/stand_ins.h"
#include "dtorch/network/timer.h"
#include "dtorch/promise/error_record.h"
#include "dtorch/promise/sendable.h"
#include "dtorch/promise/unseen.h"
#include "dtorch/shm/address.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace dtorch::network {
namespace {

constexpr int64_t kSmallBytes = 64 << 10;

void LogRefusal(const c10::ivalue::Future& replied) {
  if (replied.hasError()) {
    Log(LogLevel::kInfo, "network", "a value was not taken: ", replied.tryRetrieveErrorMessage());
    return;
  }
  const Reply reply = Reply::FromText(replied.constValue().toStringRef());
  if (reply.status != Reply::Status::kDone) {
    Log(LogLevel::kInfo, "network", "a value was not taken: ", reply.text);
  }
}

// One promise of another process, as a producer reaches it.
struct Target {
  std::string worker, token;
  uint32_t generation = ForkGeneration();

  FuturePtr Say(Request request, int64_t timeout_ms) const {
    if (generation != ForkGeneration()) {
      throw DTorchError(
          "expected a promise that this process has unpickled, got one of its parent's, inherited "
          "by "
          "a fork: RPC does not work in a forked child. Fulfil it in the parent");
    }
    request.sender = SelfName();
    request.token = token;
    if (request.sender.empty()) {
      throw BrokenPromiseError("torch.distributed.rpc was shut down in this process: worker '" +
                               worker + "', which waits for the promise, is not to be reached");
    }
    return Call(worker, std::move(request), timeout_ms);
  }

  // Blocks until the owner has replied. Throws what it replies, if that is an error.
  Reply Ask(Request request) const {
    std::optional<ValueOnTheWay> on_the_way;
    if (request.bytes.defined()) on_the_way.emplace(worker);
    const MayBlock may_block;
    if (!may_block && (request.verb == Verb::kSet || request.verb == Verb::kFail)) {
      // The caller may write to it when this returns.
      if (request.bytes.defined()) request.bytes = request.bytes.clone();
      Say(std::move(request), /*timeout_ms=*/0)->addCallback([](c10::ivalue::Future& replied) {
        LogRefusal(replied);
      });
      return {};
    }
    const FuturePtr replied = Say(std::move(request), /*timeout_ms=*/0);
    WaitFor(replied, worker);
    Reply reply = Reply::FromText(replied->value().toStringRef());
    switch (reply.status) {
      case Reply::Status::kElsewhere:
        throw BrokenPromiseError("worker '" + worker +
                                 "' is not the one that waits for the promise: " + reply.text);
      case Reply::Status::kRefused:
        throw DTorchError("worker '" + worker +
                          "', which waits for the promise, says: " + reply.text);
      default:
        return reply;
    }
  }

  // The same for what fulfils it.
  Reply AskOnce(Request request) const {
    Reply reply = Ask(std::move(request));
    if (reply.status == Reply::Status::kSatisfied) {
      throw PromiseAlreadySatisfiedError(reply.text);
    }
    return reply;
  }
};

Request RequestOf(const std::exception_ptr& error) {
  return {.verb = Verb::kFail, .text = EncodeError(error).ToBytes()};
}

// Refers to the elements, if they are many and can be sent as they lie.
Request RequestOf(const c10::IValue& value, c10::Device from) {
  Request request{.verb = Verb::kSet};
  if (!value.isTensor()) return request;
  const Unseen unseen;
  const at::Tensor tensor = Sendable(value.toTensor()).detach().contiguous();
  request.description = {static_cast<int64_t>(tensor.scalar_type()),
                         static_cast<int64_t>(from.type()), from.index()};
  for (const int64_t size : tensor.sizes()) request.description.push_back(size);
  const auto bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
  if (bytes > kSmallBytes) {
    request.bytes = at::from_blob(tensor.data_ptr(), {bytes}, [tensor](void*) {}, at::kByte);
  } else if (bytes > 0) {
    request.text.assign(static_cast<const char*>(tensor.const_data_ptr()),
                        static_cast<size_t>(bytes));
  }
  return request;
}

// A promise that this process has claimed, and has to fulfil.
class Claim final : public Reservation {
 public:
  Claim(const Target& target, std::optional<c10::Device> device)
      : target_(target),
        device_(device.value_or(c10::kCPU)),
        number_(
            std::stoll(target.AskOnce({.verb = Verb::kReserve, .number = AnswersLater()}).text)) {}
  ~Claim() override {
    if (is_over_ || target_.generation != ForkGeneration()) return;
    try {
      target_.Say({.verb = Verb::kAbandon, .number = number_}, GetLostAfterMs());
    } catch (const std::exception&) {
      // The owner notices that nobody is here.
    }
  }

  void SetValue(c10::IValue value) override { Ask(RequestOf(value, device_)); }
  void SetError(std::exception_ptr error) override { Ask(RequestOf(error)); }
  bool RunsCallbacks() const override { return false; }

 private:
  void Ask(Request request) {
    request.number = number_;
    is_over_ = true;
    target_.AskOnce(std::move(request));
  }

  const Target target_;
  const c10::Device device_;
  const int64_t number_;
  bool is_over_ = false;
};

class End final : public ProducerEnd {
 public:
  // Only when the owner has heard of it will it notice that this process ends.
  explicit End(Target target)
      : target_(std::move(target)),
        held_(target_.Say({.verb = Verb::kHold, .number = AnswersLater()}, /*timeout_ms=*/0)) {
    const MayBlock may_block;
    if (!may_block) return;
    try {
      WaitFor(held_, target_.worker);
    } catch (...) {
      Drop();
      throw;
    }
  }
  ~End() override { Drop(); }

  std::string Token() override {
    WaitFor(held_, target_.worker);
    target_.AskOnce({.verb = Verb::kHandOver});
    return target_.token;
  }

  void Drop() {
    if (target_.generation != ForkGeneration()) return;
    // The word that it is held must not come after it. In a thread of its own: this one may hold
    // any lock.
    try {
      RunAfter(0, [target = target_, held = held_] {
        held->addCallback([target](c10::ivalue::Future&) {
          try {
            target.Say({.verb = Verb::kDrop}, /*timeout_ms=*/0);
          } catch (const std::exception&) {
            // RPC was shut down: the owner knows.
          }
        });
      });
    } catch (const std::exception&) {
      // No memory: it counts as held until this process ends.
    }
  }

  void SetValue(const c10::IValue& value) override {
    if (value.isTensor()) {
      try {
        CheckSendable(value.toTensor());
      } catch (...) {
        // Who waits is told as well: no other value may ever come.
        target_.AskOnce(RequestOf(std::current_exception()));
        throw;
      }
    }
    target_.AskOnce(RequestOf(value, c10::kCPU));
  }
  void SetError(const std::exception_ptr& error) override { target_.AskOnce(RequestOf(error)); }

  std::unique_ptr<Reservation> Reserve(std::optional<c10::Device> device) override {
    return std::make_unique<Claim>(target_, device);
  }
  void CheckValue(const at::Tensor& value) const override { CheckSendable(value); }
  bool IsPending() const override {
    WaitFor(held_, target_.worker);
    return target_.Ask({.verb = Verb::kLook}).status == Reply::Status::kDone;
  }
  at::Tensor Lend(at::IntArrayRef size, c10::ScalarType dtype) override {
    return at::empty(size, at::TensorOptions().dtype(dtype));
  }

 private:
  const Target target_;
  const FuturePtr held_;
};

class RpcNetwork final : public Network {
 public:
  std::string Name() override { return SelfName(); }

  std::unique_ptr<ProducerEnd> Reach(const std::string& worker, const std::string& token,
                                     bool has_value) override {
    bool is_of_tensor = false;
    try {
      is_of_tensor = shm::Token::FromText(token).has_value;
    } catch (const std::invalid_argument& error) {
      TORCH_CHECK_VALUE(false, error.what());
    }
    TORCH_CHECK_VALUE(is_of_tensor == has_value, "token: expected one of a ",
                      has_value ? "TensorPromise" : "VoidPromise", ", got one of a ",
                      is_of_tensor ? "TensorPromise" : "VoidPromise");
    CheckWorker(worker);
    Log(LogLevel::kDebug, "network", "a promise of worker '", worker, "' is held");
    return std::make_unique<End>(Target{worker, token});
  }

  void Rely(std::weak_ptr<OwnerEnd> end) override { network::Rely(std::move(end)); }
};

const bool registered [[maybe_unused]] = [] {
  SetNetwork(new RpcNetwork);
  return true;
}();

}  // namespace
}  // namespace dtorch::network
