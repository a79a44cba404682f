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

// The producer's end of one promise of another process.
class End final : public ProducerEnd {
 public:
  explicit End(const shm::Token& token)
      : token_(token), attachment_(shm::Attachment::To(token.mailbox)) {
    attachment_->Hold(token_.slot, token_.generation);
  }
  ~End() override { attachment_->Drop(token_.slot, token_.generation); }

  std::string Token() override {
    attachment_->HandOver(token_.slot, token_.generation);
    return token_.ToText();
  }

  bool IsPending() override { return attachment_->IsPending(token_.slot, token_.generation); }

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
    if (!attachment_->OwnerLives()) {
      throw BrokenPromiseError(
          "the process that waits for the promise has ended: nobody is left to "
          "take the value");
    }
    if (!attachment_->Claim(token_.slot, token_.generation)) {
      throw PromiseAlreadySatisfiedError(
          "the promise has been fulfilled before, by another of its producers or by its owner, or "
          "was cancelled: it takes one value or one error");
    }
    try {
      write(attachment_->Prepare(token_.slot, value));
    } catch (...) {
      attachment_->Abandon(token_.slot, token_.generation);
      throw;
    }
    attachment_->Publish(token_.slot, token_.generation);
  }

  const shm::Token token_;
  const std::shared_ptr<shm::Attachment> attachment_;
};

class FileBackend final : public Backend {
 public:
  std::unique_ptr<OwnerEnd> Export(c10::intrusive_ptr<PromiseState> promise) override {
    try {
      return Service::Get().Export(std::move(promise));
    } catch (const std::runtime_error& error) {
      throw DTorchError(error.what());
    }
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
    if (service && service->address() == token.mailbox) {
      if (auto promise = service->Find(token)) return {std::move(promise), nullptr};
      throw PromiseAlreadySatisfiedError(
          "the promise of this token has been fulfilled, cancelled or broken already");
    }
    try {
      return {nullptr, std::make_unique<End>(token)};
    } catch (const std::runtime_error& error) {
      throw DTorchError(std::string("expected a promise that can be fulfilled from here, got one "
                                    "that cannot: ") +
                        error.what() + "; and the network backend, which could, is still to come");
    }
  }
};

const bool registered [[maybe_unused]] = [] {
  SetFileBackend(new FileBackend);
  return true;
}();

}  // namespace
}  // namespace dtorch::file
