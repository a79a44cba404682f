#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/waiter_list.h"

#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstdint>
#include <exception>

namespace dtorch {

/// What the handles of one promise share: the end of a future that is fulfilled once.
///
///      pending --SetValue, SetError, Break--> satisfied
///         `------------Cancel---------------> cancelled
///
/// The first to leave `pending` completes the future; every later attempt throws
/// PromiseAlreadySatisfiedError and changes nothing. The last handle that goes away while the
/// promise is pending breaks it: the future fails with BrokenPromiseError.
///
/// Thread-safe. Completing runs the future's callbacks in the calling thread. After a fork the
/// child's copy is inert: setting it is a DTorchError, dropping it does nothing.
class DTORCH_API PromiseState : public torch::CustomClassHolder {
 public:
  explicit PromiseState(c10::TypePtr value_type);
  ~PromiseState() override;

  void SetError(std::exception_ptr error);

  /// Fails the future with CancelledError. False if the promise was fulfilled before.
  bool Cancel();

  const FuturePtr& future() const { return future_; }
  bool is_pending() const { return status_.load(std::memory_order_acquire) == Status::kPending; }

 protected:
  void SetValue(c10::IValue value);

 private:
  enum class Status : uint8_t { kPending, kSatisfied, kCancelled };

  bool TryLeavePending(Status to);
  void CheckProcess() const;  // throws in a forked child
  void Claim();               // pending -> satisfied, or throws

  const FuturePtr future_;
  const uint32_t fork_generation_;
  std::atomic<Status> status_{Status::kPending};
};

/// Registered as torch.classes.dtorch.TensorPromise.
class DTORCH_API TensorPromiseState final : public PromiseState {
 public:
  TensorPromiseState();
  /// `value` is delivered as it is. c10::ValueError if it is undefined.
  void Set(at::Tensor value);
};

/// Registered as torch.classes.dtorch.VoidPromise.
class DTORCH_API VoidPromiseState final : public PromiseState {
 public:
  VoidPromiseState();
  void Set();
};

}  // namespace dtorch
