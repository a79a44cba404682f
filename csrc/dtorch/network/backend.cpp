// The producer's side: ends of promises whose owner is reached through RPC. Registered as the
// network when the library is loaded.

#include "dtorch/promise/backend.h"

#include "dtorch/base/log.h"
#include "dtorch/network/claim.h"
#include "dtorch/network/peers.h"
#include "dtorch/network/rpc.h"
#include "dtorch/network/stand_ins.h"
#include "dtorch/network/target.h"
#include "dtorch/network/timer.h"
#include "dtorch/promise/sendable.h"
#include "dtorch/promise/token.h"
#include "dtorch/shm/address.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace dtorch::network {
namespace {

class End final : public ProducerEnd {
 public:
  // Only when the owner has heard of it will it notice that this process ends.
  explicit End(Target target) : target_(std::move(target)) {
    const FuturePtr held = target_.Say({.verb = Verb::kHold}, /*timeout_ms=*/0);
    said_->last = held;
    try {
      WaitFor(held, target_.peer);
      Watch(target_.peer);
    } catch (...) {
      Drop();
      throw;
    }
  }
  ~End() override { Drop(); }

  std::string Token() override {
    target_.AwaitFulfilled(target_.Say({.verb = Verb::kHandOver}, /*timeout_ms=*/0));
    return target_.token;
  }

  void Drop() {
    if (target_.generation != ForkGeneration()) return;
    // Not before what was said and not waited for, which may go another way. In a thread of its
    // own: this one may hold any lock.
    try {
      RunAfter(0, [target = target_, said = said_] {
        Behind(said->Get(&Said::last), [target, said] {
          Behind(said->Get(&Said::given_back), [target] {
            try {
              target.Say({.verb = Verb::kDrop}, /*timeout_ms=*/0);
            } catch (const std::exception&) {
              // RPC was shut down: the owner knows.
            }
          });
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
      AwaitGivenBack();
      Claim(target_, said_, std::move(request)).SetValueSent();
    } else {
      Fulfil(std::move(request));
    }
  }
  void SetError(const std::exception_ptr& error) override { Fulfil(RequestOf(error)); }

  std::unique_ptr<Reservation> Reserve(std::optional<c10::Device> device) override {
    AwaitGivenBack();
    return std::make_unique<Claim>(target_, said_, device);
  }
  void CheckValue(const at::Tensor& value) const override { CheckSendable(value); }
  bool IsPending() const override {
    const FuturePtr looked = target_.Say({.verb = Verb::kLook}, /*timeout_ms=*/0);
    return target_.Await(looked).status == Reply::Status::kDone;
  }
  std::string WhoKnows() const override { return Called(target_.peer); }
  at::Tensor Lend(at::IntArrayRef size, c10::ScalarType dtype) override {
    return at::empty(size, at::TensorOptions().dtype(dtype));
  }

 private:
  void Fulfil(Request request) {
    AwaitGivenBack();
    const FuturePtr replied = target_.Say(std::move(request), /*timeout_ms=*/0);
    said_->Set(&Said::last, replied);
    target_.AwaitFulfilled(replied);
  }

  // Of a set of this process's that was interrupted: the owner would take it for another one's.
  void AwaitGivenBack() {
    if (const FuturePtr given_back = said_->Get(&Said::given_back)) {
      WaitFor(given_back, target_.peer);
    }
  }

  template <typename Next>
  static void Behind(const FuturePtr& what, const Next& next) {
    if (!what) return next();
    what->addCallback([next](c10::ivalue::Future&) { next(); });
  }

  const Target target_;
  const std::shared_ptr<Said> said_ = std::make_shared<Said>();
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
