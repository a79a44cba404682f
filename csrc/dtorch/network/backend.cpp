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
#include "dtorch/promise/token.h"
#include "dtorch/promise/unseen.h"
#include "dtorch/shm/address.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace dtorch::network {
namespace {

// One promise of another process, as a producer reaches it.
struct Target {
  std::string peer, token;
  uint32_t generation = ForkGeneration();

  FuturePtr Say(Request request, int64_t timeout_ms) const {
    if (generation != ForkGeneration()) {
      throw DTorchError(
          "expected a promise that this process has unpickled, got one of its parent's, inherited "
          "by a fork: RPC does not work in a forked child. Fulfil it in the parent");
    }
    request.sender = Self();
    request.token = token;
    if (request.sender.empty()) {
      throw BrokenPromiseError(
          "torch.distributed.rpc was shut down in this process: " + Called(peer) +
          ", which waits for the promise, is not to be reached");
    }
    return Call(peer, std::move(request), timeout_ms);
  }

  // Blocks until the owner has replied. Throws what it replies, if that is an error.
  Reply Await(const FuturePtr& replied) const {
    WaitFor(replied, peer);
    Reply reply = Reply::FromText(replied->value().toStringRef());
    switch (reply.status) {
      case Reply::Status::kElsewhere:
        throw BrokenPromiseError(Called(peer) +
                                 " is not the one that waits for the promise: " + reply.text);
      case Reply::Status::kRefused:
        throw DTorchError(Called(peer) + ", which waits for the promise, says: " + reply.text);
      default:
        return reply;
    }
  }
  Reply Ask(Request request) const { return Await(Say(std::move(request), /*timeout_ms=*/0)); }

  // The same for what fulfils it.
  Reply AskOnce(Request request) const { return Fulfilled(Ask(std::move(request))); }
  static Reply Fulfilled(Reply reply) {
    if (reply.status == Reply::Status::kSatisfied) {
      throw PromiseAlreadySatisfiedError(reply.text);
    }
    return reply;
  }
};

Request RequestOf(const std::exception_ptr& error) {
  return {.verb = Verb::kFail, .text = EncodeError(error).ToBytes()};
}

at::Tensor BytesOf(const at::Tensor& tensor) {
  const auto bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
  if (tensor.is_cpu()) {
    auto* const data = const_cast<void*>(tensor.const_data_ptr());  // it is only read
    return at::from_blob(data, {bytes}, [tensor](void*) {}, at::kByte);
  }
  // The very storage, whose allocator is told which streams use it.
  at::Tensor view = at::empty({0}, tensor.options().dtype(at::kByte));
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_storage_and_dtype(tensor.storage(), view.dtype());
  impl->set_storage_offset(tensor.storage_offset() * static_cast<int64_t>(tensor.element_size()));
  impl->set_sizes_contiguous({bytes});
  return view;
}

// Refers to the elements, if they can be sent as they lie. They are on the device `on`, that of the
// value or the CPU.
Request RequestOf(const c10::IValue& value, c10::Device from, c10::Device on = c10::kCPU) {
  Request request{.verb = Verb::kSet};
  if (!value.isTensor()) return request;
  const Unseen unseen;
  const at::Tensor tensor = Sendable(value.toTensor(), on).detach().contiguous();
  request.description = {static_cast<int64_t>(tensor.scalar_type()),
                         static_cast<int64_t>(from.type()), from.index()};
  for (const int64_t size : tensor.sizes()) request.description.push_back(size);
  request.bytes = BytesOf(tensor);
  return request;
}

// A promise that this process has claimed, and has to fulfil.
class Claim final : public Reservation {
 public:
  Claim(const Target& target, std::optional<c10::Device> device)
      : target_(target), device_(device.value_or(c10::kCPU)), number_(Reserve(target, {})) {}
  // Sends a value along. It counts behind SetValueSent(), by when it has arrived. Nothing can call
  // it back before that, and if the caller is interrupted it may write to the elements meanwhile.
  Claim(const Target& target, Request value)
      : target_(target), device_(c10::kCPU), number_(Reserve(target, std::move(value))) {}
  ~Claim() override {
    if (is_over_ || target_.generation != ForkGeneration()) return;
    Abandon(target_, number_);
  }

  void SetValue(c10::IValue value) override {
    c10::Device on = value.isTensor() ? value.toTensor().device() : c10::kCPU;
    // Of no elements there is no address either, by which the device would be told.
    if (SendsFrom(on) && value.toTensor().numel() > 0) {
      Log(LogLevel::kDebug, "network", "a value on ", on, " is sent from there");
    } else {
      on = c10::kCPU;
    }
    Ask(RequestOf(value, device_, on));
  }
  void SetValueSent() { Ask({.verb = Verb::kSet}); }
  void SetError(std::exception_ptr error) override { Ask(RequestOf(error)); }
  bool RunsCallbacks() const override { return false; }
  bool SendsFrom(c10::Device device) const override {
    return !device.is_cpu() && network::SendsFrom(device, target_.peer);
  }

 private:
  static int64_t Reserve(const Target& target, Request request) {
    request.verb = Verb::kReserve;
    const FuturePtr replied = target.Say(std::move(request), /*timeout_ms=*/0);
    try {
      return std::stoll(Target::Fulfilled(target.Await(replied)).text);
    } catch (...) {
      // It was interrupted, and may be reserved nonetheless.
      replied->addCallback([target](c10::ivalue::Future& late) {
        if (late.hasError()) return;
        const Reply reply = Reply::FromText(late.value().toStringRef());
        if (reply.status == Reply::Status::kDone) Abandon(target, std::stoll(reply.text));
      });
      throw;
    }
  }

  static void Abandon(const Target& target, int64_t number) {
    try {
      target.Say({.verb = Verb::kAbandon, .number = number}, GetLostAfterMs());
    } catch (const std::exception&) {
      // The owner notices that nobody is here.
    }
  }

  void Ask(Request request) {
    if (is_over_) {
      throw DTorchError("expected a promise that is still to be fulfilled, got one for which " +
                        Called(target_.peer) + " was sent a value before");
    }
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
      : target_(std::move(target)), last_(target_.Say({.verb = Verb::kHold}, /*timeout_ms=*/0)) {
    try {
      WaitFor(last_, target_.peer);
      Watch(target_.peer);
    } catch (...) {
      Drop();
      throw;
    }
  }
  ~End() override { Drop(); }

  std::string Token() override {
    target_.AskOnce({.verb = Verb::kHandOver});
    return target_.token;
  }

  void Drop() {
    if (target_.generation != ForkGeneration()) return;
    // Not before what was said and not waited for, which may go another way. In a thread of its
    // own: this one may hold any lock.
    try {
      RunAfter(0, [target = target_, last = last_] {
        last->addCallback([target](c10::ivalue::Future&) {
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
        Fulfil(RequestOf(std::current_exception()));
        throw;
      }
    }
    Request request = RequestOf(value, c10::kCPU);
    if (request.HasFreight()) {
      Claim(target_, std::move(request)).SetValueSent();
    } else {
      Fulfil(std::move(request));
    }
  }
  void SetError(const std::exception_ptr& error) override { Fulfil(RequestOf(error)); }

  std::unique_ptr<Reservation> Reserve(std::optional<c10::Device> device) override {
    return std::make_unique<Claim>(target_, device);
  }
  void CheckValue(const at::Tensor& value) const override { CheckSendable(value); }
  bool IsPending() const override {
    return target_.Ask({.verb = Verb::kLook}).status == Reply::Status::kDone;
  }
  std::string WhoKnows() const override { return Called(target_.peer); }
  at::Tensor Lend(at::IntArrayRef size, c10::ScalarType dtype) override {
    return at::empty(size, at::TensorOptions().dtype(dtype));
  }

 private:
  void Fulfil(Request request) {
    FuturePtr replied = target_.Say(std::move(request), /*timeout_ms=*/0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      last_ = replied;
    }
    (void)Target::Fulfilled(target_.Await(replied));
  }

  const Target target_;
  std::mutex mutex_;
  FuturePtr last_;  // what was said last, that had better come before the word that it was dropped
};

class RpcNetwork final : public Network {
 public:
  std::string Name() override { return Self(); }

  std::unique_ptr<ProducerEnd> Reach(const std::string& peer, const std::string& token,
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
    CheckPeer(peer);
    Log(LogLevel::kDebug, "network", "a promise of ", Called(peer), " is held");
    return std::make_unique<End>(Target{peer, token});
  }

  void Rely(std::weak_ptr<OwnerEnd> end) override { network::Rely(std::move(end)); }
};

const bool registered [[maybe_unused]] = [] {
  SetHandler(&Serve);
  SetNetwork(new RpcNetwork);
  return true;
}();

}  // namespace
}  // namespace dtorch::network
