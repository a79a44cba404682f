#include "dtorch/promise/promise_state.h"

#include "dtorch/base/error.h"
#include "dtorch/base/fork.h"
#include "dtorch/future/complete.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <utility>

namespace dtorch {

PromiseState::PromiseState(c10::TypePtr value_type)
    : future_(c10::make_intrusive<c10::ivalue::Future>(std::move(value_type))),
      fork_generation_(ForkGeneration()) {
  PrepareForWaiters(future_);
}

PromiseState::~PromiseState() {
  if (fork_generation_ != ForkGeneration() || !TryLeavePending(Status::kSatisfied)) return;
  CompleteWithError(future_, std::make_exception_ptr(BrokenPromiseError(
                                 "the promise was dropped by its last holder without a value: "
                                 "set_value or set_exception must be called before that")));
}

bool PromiseState::TryLeavePending(Status to) {
  Status expected = Status::kPending;
  return status_.compare_exchange_strong(expected, to, std::memory_order_acq_rel);
}

void PromiseState::CheckProcess() const {
  if (fork_generation_ == ForkGeneration()) return;
  throw DTorchError(
      "expected a promise of this process, got one that was made before the process forked: a "
      "promise of the memory backend cannot leave its process. Use it in the parent.");
}

void PromiseState::Claim() {
  CheckProcess();
  if (TryLeavePending(Status::kSatisfied)) return;
  throw PromiseAlreadySatisfiedError(
      status_.load() == Status::kCancelled
          ? "the promise was cancelled by its owner: nobody waits for this value any more"
          : "the promise has been fulfilled before: it takes one value or one error");
}

void PromiseState::SetValue(c10::IValue value) {
  Claim();
  CompleteWithValue(future_, std::move(value));
}

void PromiseState::SetError(std::exception_ptr error) {
  Claim();
  CompleteWithError(future_, std::move(error));
}

bool PromiseState::Cancel() {
  CheckProcess();
  if (!TryLeavePending(Status::kCancelled)) return false;
  CompleteWithError(
      future_, std::make_exception_ptr(CancelledError("the promise was cancelled by its owner")));
  return true;
}

TensorPromiseState::TensorPromiseState() : PromiseState(c10::TensorType::get()) {}

void TensorPromiseState::Set(at::Tensor value) {
  TORCH_CHECK_VALUE(value.defined(),
                    "promise: expected a tensor, got an undefined one; use set_exception to say "
                    "that there is no value");
  SetValue(std::move(value));
}

VoidPromiseState::VoidPromiseState() : PromiseState(c10::NoneType::get()) {}

void VoidPromiseState::Set() { SetValue(c10::IValue()); }

}  // namespace dtorch
