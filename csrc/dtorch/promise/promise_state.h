#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/waiter_list.h"
#include "dtorch/promise/backend.h"

#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

namespace dtorch {

/// Where a promise may be fulfilled.
enum class PromiseMode : uint8_t {
  kAuto,    // in this process, and wherever it travels
  kMemory,  // in this process alone
  kFile,    // in any process of this machine
};

/// What the handles of one promise share: the end of a future that is fulfilled once.
///
///      pending --SetValue, SetError, Break--> satisfied
///         `------------Cancel---------------> cancelled
///
/// The first to leave `pending` completes the future; every later attempt throws
/// PromiseAlreadySatisfiedError and changes nothing. The last handle that goes away while the
/// promise is pending breaks it: the future fails with BrokenPromiseError.
///
/// A promise is at home in the process that made it. Making its token lets other processes fulfil
/// it, through a backend; the backend then keeps this object until the promise is fulfilled, broken
/// or cancelled. In a process that has unpickled the token the object has no future: it hands what
/// is set to the backend.
///
/// Thread-safe. Completing runs the future's callbacks in the calling thread. After a fork the
/// child's copy is inert: setting it is a DTorchError, dropping it does nothing.
class DTORCH_API PromiseState : public torch::CustomClassHolder {
 public:
  PromiseState(c10::TypePtr value_type, PromiseMode mode);
  explicit PromiseState(std::unique_ptr<ProducerEnd> producer);
  ~PromiseState() override;

  void SetError(std::exception_ptr error);

  /// Fails the future with CancelledError. False if the promise was fulfilled before. DTorchError
  /// where the future is not.
  bool Cancel();

  /// DTorchError where the future is not.
  const FuturePtr& future() const;
  bool is_pending() const;

  /// Text that makes the promise in another process of this machine: FromToken(). DTorchError if
  /// its mode forbids that, PromiseAlreadySatisfiedError if there is nothing left to fulfil.
  std::string Token();

  /// For a backend: completes the future with what arrived, unless the owner was faster.
  void Deliver(c10::IValue value);
  void DeliverError(std::exception_ptr error);

  bool has_value() const;  // a TensorPromise

 protected:
  void SetValue(c10::IValue value);

 private:
  enum class Status : uint8_t { kPending, kSatisfied, kCancelled };

  bool TryLeavePending(Status to);
  void CheckProcess() const;  // throws in a forked child
  void Claim();               // pending -> satisfied, or throws

  const FuturePtr future_;                       // null where the promise was unpickled
  const std::unique_ptr<ProducerEnd> producer_;  // null at home
  std::atomic<OwnerEnd*> owner_end_{nullptr};    // owned; set once, when the first token is made
  const uint32_t fork_generation_;
  const PromiseMode mode_;
  std::atomic<Status> status_{Status::kPending};
};

/// Registered as torch.classes.dtorch.TensorPromise.
class DTORCH_API TensorPromiseState final : public PromiseState {
 public:
  explicit TensorPromiseState(PromiseMode mode = PromiseMode::kAuto);
  explicit TensorPromiseState(std::unique_ptr<ProducerEnd> producer);
  static c10::intrusive_ptr<TensorPromiseState> FromToken(const std::string& token);

  /// In its own process `value` is delivered as it is. c10::ValueError if it is undefined.
  void Set(at::Tensor value);
};

/// Registered as torch.classes.dtorch.VoidPromise.
class DTORCH_API VoidPromiseState final : public PromiseState {
 public:
  explicit VoidPromiseState(PromiseMode mode = PromiseMode::kAuto);
  explicit VoidPromiseState(std::unique_ptr<ProducerEnd> producer);
  static c10::intrusive_ptr<VoidPromiseState> FromToken(const std::string& token);

  void Set();
};

}  // namespace dtorch
