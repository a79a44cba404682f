#include "dtorch/promise/promise_state.h"

#include "dtorch/base/error.h"
#include "dtorch/base/fork.h"
#include "dtorch/base/host.h"
#include "dtorch/base/log.h"
#include "dtorch/future/complete.h"
#include "dtorch/future/span.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <utility>

namespace dtorch {
namespace {

constexpr char kComponent[] = "promise";  // of what is logged
constexpr char kSetValue[] = "dtorch::promise.set_value";

// The end of a promise that has left, or may have left, its process. Only of promises.
std::shared_ptr<OwnerEnd> EndOf(const FuturePtr& future) {
  return std::static_pointer_cast<OwnerEnd>(SourceOf(future));
}

// Whether the value may be still to come from a device. That of a fake tensor never comes: it has a
// device's name and meta memory.
bool MayBeQueued(const at::Tensor& value) {
  if (value.is_cpu() || value.is_meta()) return false;
  return !value.has_storage() || !value.unsafeGetTensorImpl()->unsafe_storage().device().is_meta();
}

template <typename Error>
bool FailedWith(const FuturePtr& future) {
  if (!future || !future->completed() || !future->hasError()) return false;
  try {
    std::rethrow_exception(future->exception_ptr());
  } catch (const Error&) {
    return true;
  } catch (...) {
    return false;
  }
}

std::vector<c10::Device> Devices() {
  const auto devices = GetAcceleratorValues().devices;
  return devices ? devices() : std::vector<c10::Device>();
}

}  // namespace

PromiseState::PromiseState(c10::TypePtr value_type, PromiseMode mode)
    : future_(c10::make_intrusive<c10::ivalue::Future>(std::move(value_type), Devices())),
      fork_generation_(ForkGeneration()),
      mode_(mode),
      of_token_(false) {
  PrepareForWaiters(future_, mode == PromiseMode::kMemory ? Origin::kPromised : Origin::kPromise);
  Log(LogLevel::kDebug, kComponent, "made, of future ", future_.get());
}

PromiseState::PromiseState(const PromiseToken& token, bool has_value)
    : PromiseState(token, token.Import(has_value)) {}

PromiseState::PromiseState(const PromiseToken& token, Backend::Imported imported)
    : future_(std::move(imported.future)),
      producer_(std::move(imported.producer_end)),
      fork_generation_(ForkGeneration()),
      mode_(token.network_only ? PromiseMode::kNetwork : PromiseMode::kAuto),
      of_token_(true),
      peer_(token.peer) {
  if (imported.owner_end) imported.owner_end->Hold();
  Log(LogLevel::kDebug, kComponent, "made of a token");
}

PromiseState::~PromiseState() {
  delete inherited_.load();
  // What another process's future stands for is that process's to give back.
  if (!future_ || fork_generation_ != ForkGeneration()) return;
  if (!of_token_) SetOrigin(future_, Origin::kPromised);
  if (const auto end = EndOf(future_)) {
    of_token_ ? end->Drop() : end->OwnerDropped();
    ReleaseFuture(std::move(future_));
    return;
  }
  if (!of_token_ && TryLeavePending(Status::kSatisfied)) {
    Log(LogLevel::kInfo, kComponent, "dropped without a value, of future ", future_.get());
    CompleteWithError(future_, std::make_exception_ptr(BrokenPromiseError(
                                   "the promise was dropped by its last holder without a value: "
                                   "set_value or set_exception must be called before that")));
  }
  ReleaseFuture(std::move(future_));
}

void PromiseState::SetMode(PromiseMode mode) {
  PromiseMode unset = PromiseMode::kUnset;
  if (!mode_.compare_exchange_strong(unset, mode)) {
    throw DTorchError("__init__ has been called on this promise before");
  }
  if (mode == PromiseMode::kMemory) SetOrigin(future_, Origin::kPromised);
}

void PromiseState::SetDevice(c10::Device device) {
  TORCH_CHECK_VALUE(!device.is_meta(), "device: expected one whose tensors have elements, got ",
                    device);
  SetWantedDevice(future(), device);
}

std::optional<c10::Device> PromiseState::wanted_device() const {
  return producer() ? std::nullopt : WantedDevice(future_);
}

bool PromiseState::TryLeavePending(Status to) {
  Status expected = Status::kPending;
  return status_.compare_exchange_strong(expected, to);
}

ProducerEnd* PromiseState::producer() const {
  if (producer_ || fork_generation_ == ForkGeneration()) return producer_.get();
  if (ProducerEnd* end = inherited_.load()) return end;
  if (status_.load() != Status::kPending) ThrowSatisfied();  // reserved, it may be, and pending
  std::unique_ptr<ProducerEnd> end;
  if (const auto parents = EndOf(future_)) {
    end = FileBackend().Inherit(*parents);
  } else if (future_->completed() || status_.load() != Status::kPending) {
    ThrowSatisfied();
  } else {
    throw DTorchError(
        "expected a promise that this process can fulfil, got one that it has inherited by a fork "
        "and that cannot leave its process, which is of mode 'memory', say: make it with mode "
        "'auto' or 'file', or use it in the parent");
  }
  // Another thread may have made one meanwhile: then that is the one, and ours is dropped.
  ProducerEnd* made = nullptr;
  return inherited_.compare_exchange_strong(made, end.get()) ? end.release() : made;
}

void PromiseState::Adopt() {
  if (fork_generation_ != ForkGeneration()) producer();
}

const FuturePtr& PromiseState::future() const {
  if (future_ && fork_generation_ == ForkGeneration()) return future_;
  throw DTorchError(
      "expected a promise of this process, got one that was unpickled, or inherited by a fork: its "
      "future stays with the process that made it; pass the future's value on, or make a promise "
      "here");
}

bool PromiseState::is_pending() const {
  // To look at an inherited promise does not make a forked child a producer of it.
  if (const ProducerEnd* end = inherited_.load()) return end->IsPending();
  if (producer_) return producer_->IsPending();
  if (status_.load() != Status::kPending || future_->completed()) return false;
  const auto end = EndOf(future_);
  return !end || end->IsPending();
}

std::string PromiseState::ToString() const {
  const std::string who = producer_ ? producer_->WhoKnows() : std::string();
  if (!who.empty()) return "of " + who;
  return is_pending() ? "pending" : "satisfied";
}

std::string PromiseState::Token() {
  const PromiseMode mode = mode_.load();
  const bool network_only = mode == PromiseMode::kNetwork;
  if (ProducerEnd* end = producer()) {
    return PromiseToken{end->Token(), peer_, network_only}.ToText();
  }
  if (mode == PromiseMode::kMemory) {
    throw DTorchError(
        "expected a promise that can leave its process, got one of mode 'memory', which cannot: "
        "make it with mode 'auto', 'file' or 'network'");
  }
  std::string peer;
  if (Network* network = mode == PromiseMode::kFile ? nullptr : NetworkIfAny()) {
    try {
      peer = network->Name();
    } catch (const std::exception& error) {
      if (network_only) throw;
      Log(LogLevel::kInfo, kComponent, "other machines cannot fulfil it: ", error.what());
    }
  }
  if (network_only && peer.empty()) {
    throw DTorchError(
        "expected a promise that can leave its process, got one of mode 'network' where "
        "torch.distributed.rpc is not initialised: call dtorch_ops.network.init() or "
        "rpc.init_rpc() first, or make it with mode 'auto'");
  }
  // What somebody has claimed may yet be given back.
  const auto is_over = [&] { return status_.load() != Status::kPending || future_->completed(); };
  if (is_over()) ThrowSatisfied();
  std::shared_ptr<OwnerEnd> end = EndOf(future_);
  if (!end) {
    end = FileBackend().Export(future_);
    // Fulfilled by another thread meanwhile, which may not have seen the end: nobody shall wait for
    // what was made too late.
    if (end && status_.load() != Status::kPending) end->Retract(OwnerEnd::Purpose::kFulfil);
  }
  if (!end || is_over()) ThrowSatisfied();
  Log(LogLevel::kDebug, kComponent, "may be fulfilled by other processes, of future ",
      future_.get());
  if (network_only) NetworkIfAny()->Rely(end);
  if (of_token_) end->HandOver();
  return PromiseToken{end->Token(), peer, network_only}.ToText();
}

void PromiseState::ThrowSatisfied() const {
  // One of a token learns of it from the future alone.
  if (status_.load() == Status::kCancelled || (of_token_ && FailedWith<CancelledError>(future_))) {
    throw PromiseAlreadySatisfiedError(
        "the promise was cancelled by its owner: nobody waits for this value any more");
  }
  if (status_.load() == Status::kPending && FailedWith<BrokenPromiseError>(future_)) {
    throw PromiseAlreadySatisfiedError(
        "the promise was broken before, and its future has failed: all who could fulfil it had "
        "gone. Once it was unpickled somewhere, this handle does not keep it");
  }
  throw PromiseAlreadySatisfiedError(
      "the promise has been fulfilled before: it takes one value or one error");
}

bool PromiseState::TryClaim(Status to) {
  const auto purpose =
      to == Status::kCancelled ? OwnerEnd::Purpose::kCancel : OwnerEnd::Purpose::kFulfil;
  const auto end = EndOf(future_);
  if (end && !end->Retract(purpose)) return false;
  if (future_->completed() || !TryLeavePending(to)) return false;
  if (!end) {
    if (const auto exported_just_now = EndOf(future_)) exported_just_now->Retract(purpose);
  }
  return true;
}

void PromiseState::SetValue(c10::IValue value) {
  if (ProducerEnd* end = producer()) {
    HostUnlocked unlocked;  // a copy takes time
    end->SetValue(value);
    return;
  }
  if (!TryClaim(Status::kSatisfied)) ThrowSatisfied();
  Log(LogLevel::kDebug, kComponent, "set, of future ", future_.get());
  CompleteWithValue(future_, std::move(value));
}

void PromiseState::SetError(std::exception_ptr error) {
  const Span span("dtorch::promise.set_exception");
  if (ProducerEnd* end = producer()) {
    HostUnlocked unlocked;
    end->SetError(error);
    return;
  }
  if (!TryClaim(Status::kSatisfied)) ThrowSatisfied();
  Log(LogLevel::kDebug, kComponent, "set to an error, of future ", future_.get());
  CompleteWithError(future_, std::move(error));
}

// What one of the producers in the promise's own process has reserved.
class PromiseState::Claim final : public Reservation {
 public:
  explicit Claim(PromiseState& promise)
      : promise_(c10::intrusive_ptr<PromiseState>::reclaim_copy(&promise)),
        end_(EndOf(promise.future_)) {
    if (!end_ || !end_->Claim()) promise.ThrowSatisfied();
    promise.status_ = Status::kSatisfied;
  }
  ~Claim() override {
    if (is_over_ || promise_->fork_generation_ != ForkGeneration()) return;
    promise_->status_ = Status::kPending;  // before another one can claim it
    end_->Abandon();
  }
  void SetValue(c10::IValue value) override {
    Fulfil();
    CompleteWithValue(promise_->future_, std::move(value));
  }
  void SetError(std::exception_ptr error) override {
    Fulfil();
    CompleteWithError(promise_->future_, std::move(error));
  }
  bool RunsCallbacks() const override { return dtorch::RunsCallbacks(promise_->future_); }

 private:
  void Fulfil() {
    if (!std::exchange(is_over_, true)) end_->Fulfil();
  }

  const c10::intrusive_ptr<PromiseState> promise_;  // holds it, too
  const std::shared_ptr<OwnerEnd> end_;
  bool is_over_ = false;
};

std::unique_ptr<Reservation> PromiseState::Reserve(std::optional<c10::Device> device) {
  if (ProducerEnd* end = producer()) return end->Reserve(device);
  if (of_token_) return std::make_unique<Claim>(*this);
  if (!TryClaim(Status::kSatisfied)) ThrowSatisfied();
  // A fork shall not hand it to a child, nor has one done so in this very moment.
  SetOrigin(future_, Origin::kPromised);
  if (const auto end = EndOf(future_)) end->Retract(OwnerEnd::Purpose::kFulfil);
  return ReserveFuture(future_);
}

bool PromiseState::LeavesProcess() const { return producer() != nullptr; }

void PromiseState::CheckValue(const at::Tensor& value) const {
  if (const ProducerEnd* end = producer()) end->CheckValue(value);
}

bool PromiseState::Cancel() {
  future();  // throws where it is not
  if (!TryClaim(Status::kCancelled)) return false;
  Log(LogLevel::kInfo, kComponent, "cancelled, of future ", future_.get());
  CompleteWithError(
      future_, std::make_exception_ptr(CancelledError("the promise was cancelled by its owner")));
  return true;
}

void PromiseState::Explain(std::string why) const {
  if (const auto end = EndOf(future())) end->Explain(std::move(why));
}

TensorPromiseState::TensorPromiseState(PromiseMode mode)
    : PromiseState(c10::TensorType::get(), mode) {}

c10::intrusive_ptr<TensorPromiseState> TensorPromiseState::FromToken(const std::string& token) {
  return c10::make_intrusive<TensorPromiseState>(PromiseToken::FromText(token));
}

void TensorPromiseState::Set(at::Tensor value) {
  TORCH_CHECK_VALUE(value.defined(),
                    "promise: expected a tensor, got an undefined one; use set_exception to say "
                    "that there is no value");
  const Span span(kSetValue);
  const auto wanted = wanted_device();
  const bool moves = wanted && wanted->type() != value.device().type();
  if ((moves || MayBeQueued(value)) && GetAcceleratorValues().fulfil) {
    GetAcceleratorValues().fulfil(*this, value);
    return;
  }
  SetValue(std::move(value));
}

at::Tensor TensorPromiseState::Empty(at::IntArrayRef size, c10::ScalarType dtype) {
  TORCH_CHECK_VALUE(!c10::isQIntType(dtype) && dtype != c10::ScalarType::Undefined,
                    "empty: dtype: expected that of a plain tensor, got ", dtype);
  if (ProducerEnd* end = producer()) return end->Lend(size, dtype);
  return at::empty(size, at::TensorOptions().dtype(dtype));
}

VoidPromiseState::VoidPromiseState(PromiseMode mode) : PromiseState(c10::NoneType::get(), mode) {}

c10::intrusive_ptr<VoidPromiseState> VoidPromiseState::FromToken(const std::string& token) {
  return c10::make_intrusive<VoidPromiseState>(PromiseToken::FromText(token));
}

void VoidPromiseState::Set() {
  const Span span(kSetValue);
  SetValue(c10::IValue());
}

}  // namespace dtorch
