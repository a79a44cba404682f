// The file backend: promises that are fulfilled through shared memory, by another process of this
// machine.

#include "dtorch/base/error.h"
#include "dtorch/file/codec.h"
#include "dtorch/file/service.h"
#include "dtorch/promise/error_record.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <stdexcept>
#include <utility>

namespace dtorch::file {
namespace {

// Below, a system call costs more than it saves.
constexpr uint64_t kFillColdFrom = 16384;

// What the shared memory refuses is our error.
template <typename Body>
auto AsOurs(const Body& body) {
  try {
    return body();
  } catch (const std::runtime_error& error) {
    throw DTorchError(error.what());
  }
}

// The producer's end of one promise of another process.
class End final : public ProducerEnd {
 public:
  explicit End(const shm::Token& token)
      : attachment_(shm::Attachment::To(token.mailbox)),
        slot_(token.slot),
        generation_(token.generation),
        has_value_(token.has_value) {
    attachment_->Hold(slot_, generation_);
  }
  ~End() override { attachment_->Drop(slot_, generation_); }

  std::string Token() override {
    attachment_->HandOver(slot_, generation_);
    return token().ToText();
  }

  at::Tensor Lend(at::IntArrayRef size, c10::ScalarType dtype) override {
    return AsOurs([&] { return Lent(attachment_, size, dtype); });
  }

  bool IsPending() const override { return attachment_->IsPending(slot_, generation_); }

  void SetValue(const c10::IValue& value) override {
    if (!value.isTensor()) {
      Send({}, [](std::byte*) {});
      return;
    }
    const at::Tensor tensor = Sendable(value.toTensor());  // throws before anything is claimed
    Send(Describe(tensor), [&](std::byte* bytes) { Write(tensor, bytes); });
  }

  void SetError(const std::exception_ptr& error) override {
    const std::string bytes = EncodeError(error).ToBytes();
    shm::Attachment::Value value;
    value.payload = shm::Payload::kError;
    value.bytes = bytes.size();
    Send(value, [&](std::byte* to) { std::memcpy(to, bytes.data(), bytes.size()); });
  }

 private:
  template <typename Writer>
  void Send(const shm::Attachment::Value& value, const Writer& write) {
    if (!AsOurs([&] { return attachment_->Claim(slot_, generation_); })) {
      CheckOwner();
      throw PromiseAlreadySatisfiedError(
          attachment_->IsCancelled(slot_, generation_)
              ? "the promise was cancelled by its owner: nobody waits for this value any more"
              : "the promise has been fulfilled before, by another of its producers or by its "
                "owner, or nobody waits for it any more: it takes one value or one error");
    }
    shm::Attachment::Place place;
    bool cold = false;
    try {
      place = attachment_->Prepare(slot_, value);
      cold = place.cold && value.data && value.bytes >= kFillColdFrom;
      if (cold) {
        attachment_->FillCold(place, value.data, value.bytes);
      } else if (place.to) {
        write(place.to);
      }
    } catch (const std::exception& error) {
      attachment_->Abandon(slot_, generation_, place.block);
      if (dynamic_cast<const std::runtime_error*>(&error) &&
          !dynamic_cast<const DTorchError*>(&error)) {
        throw DTorchError(error.what());
      }
      throw;
    }
    if (!attachment_->Publish(slot_, generation_)) {
      throw BrokenPromiseError(
          "the process that waits for the promise has taken this one for dead, and given it up");
    }
    // The consumer, if there is one, is under way.
    CheckOwner();
    if (cold) attachment_->WarmUp(place, value.bytes);
  }

  void CheckOwner() const {
    if (attachment_->OwnerLives()) return;
    throw BrokenPromiseError(
        "the process that waits for the promise has ended: nobody is left to take the value");
  }

  shm::Token token() const { return {attachment_->address(), slot_, generation_, has_value_}; }

  const std::shared_ptr<shm::Attachment> attachment_;
  const uint32_t slot_, generation_;
  const bool has_value_;
};

// An end in this process. DTorchError if the owner cannot be reached.
std::unique_ptr<ProducerEnd> Attach(const shm::Token& token) {
  try {
    return std::make_unique<End>(token);
  } catch (const std::runtime_error& error) {
    throw DTorchError(std::string("expected a promise that can be fulfilled from here, got one "
                                  "that cannot: ") +
                      error.what() + "; and the network backend, which could, is still to come");
  }
}

class FileBackend final : public Backend {
 public:
  std::shared_ptr<OwnerEnd> Export(const FuturePtr& future) override {
    return AsOurs([&] { return Service::Get().Export(future); });
  }

  Imported Import(const std::string& text, bool has_value) override {
    shm::Token token;
    try {
      token = shm::Token::FromText(text);
    } catch (const std::invalid_argument& error) {
      TORCH_CHECK_VALUE(false, error.what());
    }
    TORCH_CHECK_VALUE(token.has_value == has_value, "token: expected one of a ",
                      has_value ? "TensorPromise" : "VoidPromise", ", got one of a ",
                      token.has_value ? "TensorPromise" : "VoidPromise");
    Service* service = Service::GetIfAny();
    if (!service || service->address() != token.mailbox) return {{}, nullptr, Attach(token)};
    Imported found = service->Find(token);
    if (found.future) return found;
    throw PromiseAlreadySatisfiedError(
        "the promise of this token has been fulfilled, cancelled or broken already");
  }

  std::unique_ptr<ProducerEnd> Inherit(const OwnerEnd& inherited) override {
    return Attach(Service::TokenOf(inherited));
  }
};

const bool registered [[maybe_unused]] = [] {
  SetFileBackend(new FileBackend);
  Service::RegisterForkHandlers();
  return true;
}();

}  // namespace
}  // namespace dtorch::file
