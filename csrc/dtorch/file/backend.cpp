// The file backend: promises that are fulfilled through shared memory, by another process of this
// machine.

#include "dtorch/base/error.h"
#include "dtorch/base/fork.h"
#include "dtorch/base/log.h"
#include "dtorch/file/codec.h"
#include "dtorch/file/service.h"
#include "dtorch/future/span.h"
#include "dtorch/promise/error_record.h"
#include "dtorch/promise/sendable.h"
#include "dtorch/shm/attachments.h"

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

// One promise of another process, as a producer reaches it.
struct Target {
  std::shared_ptr<shm::Attachment> attachment;
  uint32_t slot, generation;
  bool has_value;

  shm::Token token() const { return {attachment->address(), slot, generation, has_value}; }

  void CheckOwner() const {
    if (attachment->OwnerLives()) return;
    throw BrokenPromiseError(
        "the process that waits for the promise has ended: nobody is left to take the value");
  }
};

// A promise that this process has claimed, and has to fulfil.
class Claim final : public Reservation, public RemoteMemory {
 public:
  explicit Claim(const Target& target, std::optional<c10::Device> device = std::nullopt)
      : target_(target), device_(device) {
    if (AsOurs([&] { return target.attachment->Claim(target.slot, target.generation); })) return;
    target.CheckOwner();
    throw PromiseAlreadySatisfiedError(
        target.attachment->IsCancelled(target.slot, target.generation)
            ? "the promise was cancelled by its owner: nobody waits for this value any more"
            : "the promise has been fulfilled before, by another of its producers or by its "
              "owner, or nobody waits for it any more: it takes one value or one error");
  }
  ~Claim() override {
    if (!is_over_ && generation_ == ForkGeneration()) {
      target_.attachment->Abandon(target_.slot, target_.generation);
    }
  }

  void SetValue(c10::IValue value) override {
    if (!value.isTensor()) {
      Publish({}, [](std::byte*) {});
      return;
    }
    const at::Tensor tensor = Sendable(value.toTensor());
    shm::Attachment::Value described = Describe(tensor);
    if (device_) {
      described.device_type = static_cast<uint8_t>(device_->type());
      described.device_index = device_->index();
    }
    Publish(described, [&](std::byte* bytes) { Write(tensor, bytes); });
  }

  void SetError(std::exception_ptr error) override {
    const std::string bytes = EncodeError(error).ToBytes();
    shm::Attachment::Value value;
    value.payload = shm::Payload::kError;
    value.bytes = bytes.size();
    Publish(value, [&](std::byte* to) { std::memcpy(to, bytes.data(), bytes.size()); });
  }

  bool RunsCallbacks() const override { return false; }
  RemoteMemory* remote_memory() override { return this; }

  void Ask(c10::Device device, uint64_t bytes) override {
    target_.attachment->Ask(target_.slot, target_.generation, static_cast<uint8_t>(device.type()),
                            device.index(), bytes);
  }
  std::string WaitForAnswer(Deadline deadline) override {
    try {
      return target_.attachment->WaitForAnswer(target_.slot, target_.generation, deadline)
          .value_or(std::string());
    } catch (const std::runtime_error& error) {
      is_over_ = true;  // it is not ours any more
      throw DTorchError(error.what());
    }
  }
  std::shared_ptr<void> Keepsake(const std::function<std::shared_ptr<void>()>& make) override {
    return target_.attachment->keepsake().Get(make);
  }
  void SetValueThere(const at::Tensor& value) override {
    shm::Attachment::Value described = Describe(value);
    described.payload = shm::Payload::kDeviceTensor;
    described.data = nullptr;
    Publish(described, [](std::byte*) {});
  }

 private:
  [[noreturn]] static void ThrowGivenUp() {
    throw BrokenPromiseError(
        "the process that waits for the promise has taken this one for dead, and given it up");
  }

  template <typename Writer>
  void Publish(const shm::Attachment::Value& value, const Writer& write) {
    if (is_over_) ThrowGivenUp();  // the slot may be another promise's by now
    const Span span("dtorch::shm.write", FlowBetweenProcesses(target_.token().Key()));
    shm::Attachment& attachment = *target_.attachment;
    shm::Attachment::Place place;
    bool cold = false;
    try {
      place = attachment.Prepare(target_.slot, value);
      cold = place.cold && value.data && value.bytes >= kFillColdFrom;
      if (cold) {
        attachment.FillCold(place, value.data, value.bytes);
      } else if (place.to) {
        write(place.to);
      }
    } catch (const std::exception& error) {
      attachment.FreeBlock(place.block);
      if (dynamic_cast<const std::runtime_error*>(&error) &&
          !dynamic_cast<const DTorchError*>(&error)) {
        throw DTorchError(error.what());
      }
      throw;
    }
    is_over_ = true;
    Log(LogLevel::kDebug, "file", "a value of ", value.bytes, " bytes is published to process ",
        attachment.address().owner.pid);
    if (!attachment.Publish(target_.slot, target_.generation)) ThrowGivenUp();
    // The consumer, if there is one, is under way.
    target_.CheckOwner();
    if (cold) attachment.WarmUp(place, value.bytes);
  }

  const Target target_;
  const std::optional<c10::Device> device_;
  const uint32_t generation_ = ForkGeneration();
  bool is_over_ = false;
};

// The producer's end of one promise of another process.
class End final : public ProducerEnd {
 public:
  explicit End(const shm::Token& token)
      : target_{shm::AttachTo(token.mailbox), token.slot, token.generation, token.has_value} {
    target_.attachment->Hold(target_.slot, target_.generation);
  }
  ~End() override { target_.attachment->Drop(target_.slot, target_.generation); }

  std::string Token() override {
    target_.attachment->HandOver(target_.slot, target_.generation);
    return target_.token().ToText();
  }

  at::Tensor Lend(at::IntArrayRef size, c10::ScalarType dtype) override {
    return AsOurs([&] { return Lent(target_.attachment, size, dtype); });
  }

  bool IsPending() const override {
    return target_.attachment->IsPending(target_.slot, target_.generation);
  }

  void CheckValue(const at::Tensor& value) const override { CheckSendable(value); }

  void SetValue(const c10::IValue& value) override {
    Claim claim(target_);
    try {
      if (value.isTensor()) CheckSendable(value.toTensor());
      claim.SetValue(value);
    } catch (...) {
      // Who waits is told as well: no other value may ever come.
      SetErrorOf(claim, std::current_exception());
      throw;
    }
  }
  void SetError(const std::exception_ptr& error) override { Claim(target_).SetError(error); }

  std::unique_ptr<Reservation> Reserve(std::optional<c10::Device> device) override {
    return std::make_unique<Claim>(target_, device);
  }

 private:
  const Target target_;
};

// An end in this process. UnreachableError if the owner cannot be reached.
std::unique_ptr<ProducerEnd> Attach(const shm::Token& token) {
  try {
    return std::make_unique<End>(token);
  } catch (const std::runtime_error& error) {
    throw UnreachableError(error.what());
  }
}

shm::Token Parse(const std::string& text) {
  try {
    return shm::Token::FromText(text);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

class FileBackend final : public Backend {
 public:
  std::shared_ptr<OwnerEnd> Export(const FuturePtr& future) override {
    return AsOurs([&] { return Service::Get().Export(future); });
  }

  bool IsHome(const std::string& text) override {
    const shm::Token token = Parse(text);
    const Service* service = Service::GetIfAny();
    return service && service->address() == token.mailbox;
  }

  Imported Import(const std::string& text, bool has_value) override {
    const shm::Token token = Parse(text);
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
