#include "dtorch/promise/promise_state.h"

#include "dtorch/base/error.h"
#include "dtorch/base/fork.h"
#include "dtorch/future/complete.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <utility>

namespace dtorch {
namespace {

// Serialises the making of first tokens, which is rare.
std::mutex& ExportMutex() {
  static auto* mutex = [] {
    auto* made = new std::mutex;
    HoldAcrossFork(*made);
    return made;
  }();
  return *mutex;
}

constexpr char kSatisfied[] =
    "the promise has been fulfilled before: it takes one value or one error";

template <typename State>
c10::intrusive_ptr<State> Import(const std::string& token, bool has_value) {
  Backend::Imported imported = FileBackend().Import(token, has_value);
  if (!imported.promise) return c10::make_intrusive<State>(std::move(imported.end));
  return c10::static_intrusive_pointer_cast<State>(std::move(imported.promise));
}

}  // namespace

PromiseState::PromiseState(c10::TypePtr value_type, PromiseMode mode)
    : future_(c10::make_intrusive<c10::ivalue::Future>(std::move(value_type))),
      fork_generation_(ForkGeneration()),
      mode_(mode) {
  PrepareForWaiters(future_);
}

PromiseState::PromiseState(std::unique_ptr<ProducerEnd> producer)
    : producer_(std::move(producer)),
      fork_generation_(ForkGeneration()),
      mode_(PromiseMode::kFile) {}

PromiseState::~PromiseState() {
  if (fork_generation_ != ForkGeneration()) {
    // What another process's ends stand for is that process's to give back.
    (void)const_cast<std::unique_ptr<ProducerEnd>&>(producer_).release();
    return;
  }
  delete owner_end_.load();
  if (!future_ || !TryLeavePending(Status::kSatisfied)) return;
  CompleteWithError(future_, std::make_exception_ptr(BrokenPromiseError(
                                 "the promise was dropped by its last holder without a value: "
                                 "set_value or set_exception must be called before that")));
}

bool PromiseState::has_value() const {
  return dynamic_cast<const TensorPromiseState*>(this) != nullptr;
}

bool PromiseState::TryLeavePending(Status to) {
  Status expected = Status::kPending;
  return status_.compare_exchange_strong(expected, to);
}

void PromiseState::CheckProcess() const {
  if (fork_generation_ == ForkGeneration()) return;
  throw DTorchError(
      "expected a promise of this process, got one that was made or unpickled before the process "
      "forked: use it in the parent, or pickle it and unpickle it here.");
}

const FuturePtr& PromiseState::future() const {
  if (future_) return future_;
  throw DTorchError(
      "expected a promise of this process, got one that was unpickled: its future stays with the "
      "process that made it; pass the future's value on, or make a promise here");
}

bool PromiseState::is_pending() const {
  return producer_ ? producer_->IsPending()
                   : status_.load() == Status::kPending && !future_->completed();
}

std::string PromiseState::Token() {
  CheckProcess();
  if (producer_) return producer_->Token();
  if (mode_ == PromiseMode::kMemory) {
    throw DTorchError(
        "expected a promise that can leave its process, got one of mode 'memory', which cannot: "
        "make it with mode 'auto' or 'file'");
  }
  if (status_.load() != Status::kPending) throw PromiseAlreadySatisfiedError(kSatisfied);
  std::lock_guard<std::mutex> lock(ExportMutex());
  OwnerEnd* end = owner_end_.load();
  if (!end) {
    end = FileBackend().Export(c10::intrusive_ptr<PromiseState>::reclaim_copy(this)).release();
    owner_end_.store(end);
    // Fulfilled by another thread meanwhile, which did not see the end: nobody shall wait for it.
    if (status_.load() != Status::kPending) {
      end->Retract();
      throw PromiseAlreadySatisfiedError(kSatisfied);
    }
  }
  return end->Token();
}

void PromiseState::Claim() {
  CheckProcess();
  OwnerEnd* end = owner_end_.load();
  const bool ours = (!end || end->Retract()) && !future_->completed();
  if (ours && TryLeavePending(Status::kSatisfied)) {
    if (!end && (end = owner_end_.load())) end->Retract();  // exported in this very moment
    return;
  }
  throw PromiseAlreadySatisfiedError(
      status_.load() == Status::kCancelled
          ? "the promise was cancelled by its owner: nobody waits for this value any more"
          : kSatisfied);
}

void PromiseState::SetValue(c10::IValue value) {
  if (producer_) {
    CheckProcess();
    producer_->SetValue(value);
    return;
  }
  Claim();
  CompleteWithValue(future_, std::move(value));
}

void PromiseState::SetError(std::exception_ptr error) {
  if (producer_) {
    CheckProcess();
    producer_->SetError(error);
    return;
  }
  Claim();
  CompleteWithError(future_, std::move(error));
}

bool PromiseState::Cancel() {
  CheckProcess();
  future();  // throws where it is not
  OwnerEnd* end = owner_end_.load();
  if (end && !end->Retract()) return false;
  if (!TryLeavePending(Status::kCancelled)) return false;
  CompleteWithError(
      future_, std::make_exception_ptr(CancelledError("the promise was cancelled by its owner")));
  return true;
}

void PromiseState::Deliver(c10::IValue value) {
  if (TryLeavePending(Status::kSatisfied)) CompleteWithValue(future_, std::move(value));
}

void PromiseState::DeliverError(std::exception_ptr error) {
  if (TryLeavePending(Status::kSatisfied)) CompleteWithError(future_, std::move(error));
}

TensorPromiseState::TensorPromiseState(PromiseMode mode)
    : PromiseState(c10::TensorType::get(), mode) {}

TensorPromiseState::TensorPromiseState(std::unique_ptr<ProducerEnd> producer)
    : PromiseState(std::move(producer)) {}

c10::intrusive_ptr<TensorPromiseState> TensorPromiseState::FromToken(const std::string& token) {
  return Import<TensorPromiseState>(token, /*has_value=*/true);
}

void TensorPromiseState::Set(at::Tensor value) {
  TORCH_CHECK_VALUE(value.defined(),
                    "promise: expected a tensor, got an undefined one; use set_exception to say "
                    "that there is no value");
  SetValue(std::move(value));
}

VoidPromiseState::VoidPromiseState(PromiseMode mode) : PromiseState(c10::NoneType::get(), mode) {}

VoidPromiseState::VoidPromiseState(std::unique_ptr<ProducerEnd> producer)
    : PromiseState(std::move(producer)) {}

c10::intrusive_ptr<VoidPromiseState> VoidPromiseState::FromToken(const std::string& token) {
  return Import<VoidPromiseState>(token, /*has_value=*/false);
}

void VoidPromiseState::Set() { SetValue(c10::IValue()); }

}  // namespace dtorch
