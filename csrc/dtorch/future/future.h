#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/waiter_list.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace dtorch {

/// A handle on a future whose result can be taken once; the base of the handles below.
///
///     valid --Get()--> consumed
///
/// Owns a share of the future. A handle is used by one thread at a time, as a std::future is;
/// different handles of one future by any. Waiting drops the host's lock.
class DTORCH_API FutureHandle {
 public:
  FutureHandle(const FutureHandle&) = default;
  FutureHandle(FutureHandle&&) = default;
  FutureHandle& operator=(const FutureHandle&) = delete;
  FutureHandle& operator=(FutureHandle&&) = delete;

  /// Blocks at most `timeout_ms` (>= 0, else c10::ValueError); TimeoutError if the future is
  /// pending then. Does not consume, does not throw the future's error.
  void Wait(int64_t timeout_ms) const;
  /// Blocks without a limit.
  void Wait() const;
  bool IsReady() const { return IsComplete(future_); }
  /// True until Get() has consumed the result.
  bool Valid() const { return !consumed_; }
  const FuturePtr& future() const { return future_; }

 protected:
  explicit FutureHandle(FuturePtr future) : future_(std::move(future)) {}
  ~FutureHandle() { ReleaseFuture(std::move(future_)); }
  c10::IValue Consume();

 private:
  FuturePtr future_;
  bool consumed_ = false;
};

class DTORCH_API TensorFuture : public FutureHandle {
 public:
  explicit TensorFuture(FuturePtr future) : FutureHandle(std::move(future)) {}
  /// Blocks, consumes, and returns the tensor or throws the error of the future.
  /// FutureAlreadyRetrievedError the second time.
  at::Tensor Get() { return Consume().toTensor(); }
};

class DTORCH_API VoidFuture : public FutureHandle {
 public:
  explicit VoidFuture(FuturePtr future) : FutureHandle(std::move(future)) {}
  void Get() { Consume(); }
};

/// Several VoidFutures as one: complete when all are, or at the first error.
class DTORCH_API VoidFutureCollect : public VoidFuture {
 public:
  explicit VoidFutureCollect(const std::vector<VoidFuture>& futures);
};

}  // namespace dtorch
