#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/waiter_list.h"
#include "dtorch/promise/backend.h"
#include "dtorch/promise/reservation.h"
#include "dtorch/promise/token.h"

#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

namespace dtorch {

/// Where a promise may be fulfilled.
enum class PromiseMode : uint8_t {
  kUnset,    // as kAuto, until SetMode()
  kAuto,     // in this process, and wherever it travels
  kMemory,   // in this process alone
  kFile,     // in any process of this machine
  kNetwork,  // wherever RPC leads
};

/// What the handles of one promise share: the end of a future that is fulfilled once.
///
///      pending --SetValue, SetError, Break--> satisfied
///         |------------Cancel---------------> cancelled
///         `-----------Reserve---------------> satisfied, while the value is on its way; or pending
///                                             again, if it cannot come and others may fulfil it
///
/// The first to leave `pending` completes the future; every later attempt throws
/// PromiseAlreadySatisfiedError and changes nothing. The last handle that goes away while the
/// promise is pending breaks it: the future fails with BrokenPromiseError.
///
/// A promise is at home in the process that made it. Making its token lets other processes fulfil
/// it, through a backend, whose end is then the source of the future; from there on this object
/// may go without breaking it. In a process that has unpickled the token, and in a forked child,
/// the object has no future: it hands what is set to the backend.
///
/// Thread-safe. Completing runs the future's callbacks in the calling thread.
class DTORCH_API PromiseState : public torch::CustomClassHolder {
 public:
  PromiseState(c10::TypePtr value_type, PromiseMode mode);
  /// Of a token.
  PromiseState(const PromiseToken& token, bool has_value);
  ~PromiseState() override;

  /// For a binding whose objects exist before their arguments are known. DTorchError if the mode
  /// was set before.
  void SetMode(PromiseMode mode);

  /// Where the value is to be, before anybody can have set it. Asks no driver: whether there is
  /// such a device shows when the value comes. c10::ValueError for one that has no elements.
  void SetDevice(c10::Device device);
  /// nullopt: where the value comes from; or not known in this process.
  std::optional<c10::Device> wanted_device() const;

  void SetError(std::exception_ptr error);

  /// For a value that is still to come: the promise counts as fulfilled from now on, though its
  /// future is pending. `device`: where the value is, if it is a tensor of an accelerator. Throws
  /// what setting a value does.
  std::unique_ptr<Reservation> Reserve(std::optional<c10::Device> device = std::nullopt);
  /// Whether the value goes to another process: then the reservation takes a tensor on the CPU.
  bool LeavesProcess() const;
  /// c10::TypeError, which says what to do, if such a tensor cannot be set.
  void CheckValue(const at::Tensor& value) const;

  /// Fails the future with CancelledError. False if the promise was fulfilled before. DTorchError
  /// where the future is not.
  bool Cancel();

  /// What is said if this object, which goes now, was the last that could have fulfilled the
  /// promise.
  void Explain(std::string why) const;

  /// DTorchError where the future is not.
  const FuturePtr& future() const;
  /// Whether it can be fulfilled now: nobody has, nor has reserved it, and nobody has cancelled it.
  /// One of another machine's has to be asked: BrokenPromiseError if it is not to be reached.
  bool is_pending() const;
  /// "pending" or "satisfied", or whose it is where that would have to be asked. Does not block.
  std::string ToString() const;

  /// Text that makes the promise in another process: FromToken(). DTorchError if its mode forbids
  /// that, PromiseAlreadySatisfiedError if there is nothing left to fulfil.
  std::string Token();

  /// In a forked child, for a promise that it was given: this process is a producer of it from now
  /// on, whether or not it ever touches the promise. Does nothing elsewhere.
  void Adopt();

 protected:
  void SetValue(c10::IValue value);
  /// The end of a process that is not the promise's home; nullptr at home. DTorchError in a forked
  /// child that cannot reach the home.
  ProducerEnd* producer() const;

 private:
  enum class Status : uint8_t { kPending, kSatisfied, kCancelled };
  class Claim;

  PromiseState(const PromiseToken& token, Backend::Imported imported);
  bool TryLeavePending(Status to);
  bool TryClaim(Status to);  // for a completion by this process: from wherever the promise is
  [[noreturn]] void ThrowSatisfied() const;

  FuturePtr future_;                                      // null where the promise was unpickled
  std::unique_ptr<ProducerEnd> producer_;                 // null at home
  mutable std::atomic<ProducerEnd*> inherited_{nullptr};  // owned; made in a forked child
  const uint32_t fork_generation_;
  std::atomic<PromiseMode> mode_;
  const bool of_token_;
  const std::string peer_;  // of a token: the owner, in the network
  std::atomic<Status> status_{Status::kPending};
};

/// Registered as torch.classes.dtorch.TensorPromise.
class DTORCH_API TensorPromiseState final : public PromiseState {
 public:
  explicit TensorPromiseState(PromiseMode mode = PromiseMode::kAuto);
  explicit TensorPromiseState(const PromiseToken& token)
      : PromiseState(token, /*has_value=*/true) {}
  static c10::intrusive_ptr<TensorPromiseState> FromToken(const std::string& token);

  /// In its own process `value` is delivered as it is. c10::ValueError if it is undefined.
  void Set(at::Tensor value);

  /// A tensor, not initialised, that a value can be computed straight into: for a promise of
  /// another process in the memory that both share, so that Set() with it copies nothing.
  at::Tensor Empty(at::IntArrayRef size, c10::ScalarType dtype);
};

/// Registered as torch.classes.dtorch.VoidPromise.
class DTORCH_API VoidPromiseState final : public PromiseState {
 public:
  explicit VoidPromiseState(PromiseMode mode = PromiseMode::kAuto);
  explicit VoidPromiseState(const PromiseToken& token) : PromiseState(token, /*has_value=*/false) {}
  static c10::intrusive_ptr<VoidPromiseState> FromToken(const std::string& token);

  void Set();
};

}  // namespace dtorch
