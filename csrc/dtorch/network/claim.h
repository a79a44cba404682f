#pragma once

#include "dtorch/future/waiter_list.h"
#include "dtorch/network/message.h"
#include "dtorch/network/target.h"
#include "dtorch/promise/reservation.h"

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>

namespace dtorch::network {

Request RequestOf(const std::exception_ptr& error);
/// Refers to the elements, if they can be sent as they lie. They are on the device `on`, that of
/// the value or the CPU.
Request RequestOf(const c10::IValue& value, c10::Device from, c10::Device on = c10::kCPU);

/// What was said of one promise, and may not have been answered, as an end and its claims know it.
/// Thread-safe.
struct Said {
  std::mutex mutex;
  FuturePtr last;        // the word that the promise was dropped comes behind it
  FuturePtr given_back;  // or null: a claim; whatever fulfils the promise comes behind it

  void Set(FuturePtr Said::* which, FuturePtr what) {
    std::lock_guard<std::mutex> lock(mutex);
    this->*which = std::move(what);
  }
  FuturePtr Get(FuturePtr Said::* which) {
    std::lock_guard<std::mutex> lock(mutex);
    return this->*which;
  }
};

/// A promise of another machine's that this process has claimed: the owner has a reservation, by a
/// number that is chosen here. It is given back wherever the owner may have it and no value comes:
/// also if a reply was lost, and if it comes late since the caller was interrupted.
class Claim final : public Reservation {
 public:
  Claim(Target target, std::shared_ptr<Said> said, std::optional<c10::Device> device);
  /// Sends a value along. It counts behind SetValueSent(), by when it has arrived. Nothing can call
  /// it back before that, and if the caller is interrupted it may write to the elements meanwhile.
  Claim(Target target, std::shared_ptr<Said> said, Request value);
  ~Claim() override;

  void SetValue(c10::IValue value) override;
  void SetValueSent();
  /// After a value that was said and not answered it only says it, and waits for no answer.
  void SetError(std::exception_ptr error) override;
  bool RunsCallbacks() const override { return false; }
  bool SendsFrom(c10::Device device) const override;

 private:
  void Reserve(Request request);
  void Fulfil(Request request);
  void GiveBackBehind(const FuturePtr& replied);

  const Target target_;
  const std::shared_ptr<Said> said_;
  const c10::Device device_;
  const int64_t number_;
  bool was_said_ = false;  // how it is fulfilled
  bool is_over_ = false;
};

}  // namespace dtorch::network
