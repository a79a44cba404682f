#include "dtorch/network/claim.h"

#include "dtorch/base/log.h"
#include "dtorch/future/complete.h"
#include "dtorch/network/peers.h"
#include "dtorch/network/rpc.h"
#include "dtorch/network/timer.h"
#include "dtorch/promise/error_record.h"
#include "dtorch/promise/sendable.h"
#include "dtorch/promise/unseen.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <atomic>
#include <utility>

namespace dtorch::network {
namespace {

std::atomic<int64_t> last_number{0};

at::Tensor BytesOf(const at::Tensor& tensor) {
  const auto bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
  if (tensor.is_cpu()) {
    auto* const data = const_cast<void*>(tensor.const_data_ptr());  // it is only read
    return at::from_blob(data, {bytes}, [tensor](void*) {}, at::kByte);
  }
  // The very storage, whose allocator is told which streams use it.
  at::Tensor view = at::empty({0}, tensor.options().dtype(at::kByte));
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_storage_and_dtype(tensor.storage(), view.dtype());
  impl->set_storage_offset(tensor.storage_offset() * static_cast<int64_t>(tensor.element_size()));
  impl->set_sizes_contiguous({bytes});
  return view;
}

void SayGivenBack(const Target& target, int64_t number, const FuturePtr& done, bool again) {
  FuturePtr replied;
  try {
    replied = target.Say({.verb = Verb::kAbandon, .number = number}, GetLostAfterMs());
  } catch (const std::exception&) {  // RPC was shut down: the owner notices
    return CompleteWithValue(done, c10::IValue());
  }
  replied->addCallback([=](c10::ivalue::Future& answered) {
    // What was behind the lost connection may still arrive: once more, when it has.
    if (answered.hasError() && again) {
      RunAfter(1000, [=] { SayGivenBack(target, number, done, /*again=*/false); });
    } else {
      CompleteWithValue(done, c10::IValue());
    }
  });
}

}  // namespace

Request RequestOf(const std::exception_ptr& error) {
  return {.verb = Verb::kFail, .text = EncodeError(error).ToBytes()};
}

Request RequestOf(const c10::IValue& value, c10::Device from, c10::Device on) {
  Request request{.verb = Verb::kSet};
  if (!value.isTensor()) return request;
  const Unseen unseen;
  const at::Tensor tensor = Sendable(value.toTensor(), on).detach().contiguous();
  request.description = {static_cast<int64_t>(tensor.scalar_type()),
                         static_cast<int64_t>(from.type()), from.index()};
  for (const int64_t size : tensor.sizes()) request.description.push_back(size);
  request.bytes = BytesOf(tensor);
  return request;
}

Claim::Claim(Target target, std::shared_ptr<Said> said, std::optional<c10::Device> device)
    : target_(std::move(target)),
      said_(std::move(said)),
      device_(device.value_or(c10::kCPU)),
      number_(++last_number) {
  Reserve({});
}

Claim::Claim(Target target, std::shared_ptr<Said> said, Request value)
    : target_(std::move(target)),
      said_(std::move(said)),
      device_(c10::kCPU),
      number_(++last_number) {
  Watch(target_.peer);  // it may take long, and the owner may have been given up before
  Reserve(std::move(value));
}

Claim::~Claim() {
  if (is_over_ || target_.generation != ForkGeneration()) return;
  GiveBackBehind(MakeCompletedFuture(c10::NoneType::get(), c10::IValue()));
}

void Claim::SetValue(c10::IValue value) {
  c10::Device on = value.isTensor() ? value.toTensor().device() : c10::kCPU;
  // Of no elements there is no address either, by which the device would be told.
  if (SendsFrom(on) && value.toTensor().numel() > 0) {
    Log(LogLevel::kDebug, "network", "a value on ", on, " is sent from there");
  } else {
    on = c10::kCPU;
  }
  Fulfil(RequestOf(value, device_, on));
}

void Claim::SetValueSent() { Fulfil({.verb = Verb::kSet}); }

void Claim::SetError(std::exception_ptr error) {
  Request request = RequestOf(error);
  if (!was_said_) return Fulfil(std::move(request));
  request.number = number_;
  GiveBackBehind(target_.Say(std::move(request), GetLostAfterMs()));
}

bool Claim::SendsFrom(c10::Device device) const {
  return !device.is_cpu() && network::SendsFrom(device, target_.peer);
}

void Claim::Reserve(Request request) {
  request.verb = Verb::kReserve;
  request.number = number_;
  const FuturePtr replied = target_.Say(std::move(request), /*timeout_ms=*/0);
  try {
    target_.AwaitFulfilled(replied);
  } catch (...) {
    GiveBackBehind(replied);
    throw;
  }
}

void Claim::Fulfil(Request request) {
  request.number = number_;
  was_said_ = true;
  const FuturePtr replied = target_.Say(std::move(request), /*timeout_ms=*/0);
  try {
    target_.AwaitFulfilled(replied);
    is_over_ = true;
  } catch (...) {
    // Where it has been fulfilled, there is nothing to give back.
    GiveBackBehind(replied);
    throw;
  }
}

void Claim::GiveBackBehind(const FuturePtr& replied) {
  is_over_ = true;
  auto done = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
  said_->Set(&Said::given_back, done);
  replied->addCallback([target = target_, number = number_, done](c10::ivalue::Future&) {
    SayGivenBack(target, number, done, /*again=*/true);
  });
}

}  // namespace dtorch::network
