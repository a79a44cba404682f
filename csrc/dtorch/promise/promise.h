#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/future.h"
#include "dtorch/promise/promise_state.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <exception>
#include <string>

namespace dtorch {

/// The producing end of a TensorFuture. Copies are handles of the same promise; when the last one
/// goes away unset, the future fails with BrokenPromiseError. Thread-safe.
class DTORCH_API TensorPromise {
 public:
  TensorPromise() : state_(c10::make_intrusive<TensorPromiseState>()) {}
  explicit TensorPromise(c10::intrusive_ptr<TensorPromiseState> state) : state_(std::move(state)) {}

  /// PromiseAlreadySatisfiedError if it was set or cancelled before.
  void SetValue(at::Tensor value) const { state_->Set(std::move(value)); }
  void SetException(std::exception_ptr error) const { state_->SetError(std::move(error)); }
  /// Memory that a value can be computed straight into: SetValue() with the very tensor copies
  /// nothing where the promise came from another process. What is written to it later shows there.
  at::Tensor Empty(at::IntArrayRef size, c10::ScalarType dtype = c10::kFloat) const {
    return state_->Empty(size, dtype);
  }
  /// As std::runtime_error.
  void SetException(const std::string& message) const;
  /// Fails the future with CancelledError. False if the promise was fulfilled before.
  bool Cancel() const { return state_->Cancel(); }
  TensorFuture GetFuture() const { return TensorFuture(state_->future()); }

  /// Text, for another process of this machine: FromToken() there makes a producer of it.
  std::string Token() const { return state_->Token(); }
  static TensorPromise FromToken(const std::string& token) {
    return TensorPromise(TensorPromiseState::FromToken(token));
  }

  /// For operators and scripted functions, which take a torch.classes.dtorch.TensorPromise.
  c10::IValue ToIValue() const;

 private:
  c10::intrusive_ptr<TensorPromiseState> state_;
};

/// The same without a value.
class DTORCH_API VoidPromise {
 public:
  VoidPromise() : state_(c10::make_intrusive<VoidPromiseState>()) {}
  explicit VoidPromise(c10::intrusive_ptr<VoidPromiseState> state) : state_(std::move(state)) {}

  void SetValue() const { state_->Set(); }
  void SetException(std::exception_ptr error) const { state_->SetError(std::move(error)); }
  void SetException(const std::string& message) const;
  bool Cancel() const { return state_->Cancel(); }
  VoidFuture GetFuture() const { return VoidFuture(state_->future()); }
  std::string Token() const { return state_->Token(); }
  static VoidPromise FromToken(const std::string& token) {
    return VoidPromise(VoidPromiseState::FromToken(token));
  }
  c10::IValue ToIValue() const;

 private:
  c10::intrusive_ptr<VoidPromiseState> state_;
};

}  // namespace dtorch
