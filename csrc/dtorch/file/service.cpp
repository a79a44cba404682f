#include "dtorch/file/service.h"

#include "dtorch/base/error.h"
#include "dtorch/base/fork.h"
#include "dtorch/base/log.h"
#include "dtorch/file/codec.h"
#include "dtorch/future/complete.h"
#include "dtorch/future/sleeper.h"
#include "dtorch/future/span.h"
#include "dtorch/promise/error_record.h"
#include "dtorch/sys/thread.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace dtorch::file {
namespace {

// How long a thread looks out before it sleeps, if the wait before was no longer than that: about
// what it takes to sleep and be woken.
constexpr std::chrono::microseconds kLookOut{15};
// How long a second thread stays after it was last of use.
constexpr int kSpareMs = 1000;

std::mutex& InstanceMutex() {
  static auto* mutex = [] {
    auto* made = new std::mutex;
    HoldAcrossFork(*made);
    return made;
  }();
  return *mutex;
}
constexpr uint64_t Key(shm::Mailbox::Place place) {
  return uint64_t{place.generation} << 32 | place.slot;
}

std::atomic<Service*> instance{nullptr};  // leaked on purpose: tensors may outlive everything

}  // namespace

// The owner's end of one promise. In a forked child it is inert, but for its token.
class Service::End final : public OwnerEnd, public std::enable_shared_from_this<End> {
 public:
  End(Service& service, const FuturePtr& future, shm::Mailbox::Place place, bool has_value)
      : service_(service), future_(future.get()), place_(place), has_value_(has_value) {}

  ~End() override {
    if (generation_ != ForkGeneration()) return;
    FuturePtr share;  // dropped behind the lock
    bool taken = false;
    {
      std::lock_guard<std::mutex> lock(service_.mutex_);
      const auto it = service_.outstanding_.find(Key(place()));
      if (it != service_.outstanding_.end()) {
        share = std::move(it->second.future);
        taken = it->second.taken;
        service_.outstanding_.erase(it);
        service_.explained_.erase(Key(place()));
      }
    }
    if (!taken) service_.mailbox_.GiveUp(place());
  }

  void OnRelease() override {
    if (generation_ != ForkGeneration()) return;
    FuturePtr unused;  // dropped behind the lock, and this with it
    std::lock_guard<std::mutex> lock(service_.mutex_);
    const auto it = service_.outstanding_.find(Key(place()));
    if (it == service_.outstanding_.end()) return;
    // Nobody else has one, and nobody can come by one: that takes the lock.
    if (it->second.future.use_count() > 1 || HasObservers(it->second.future)) return;
    unused = std::move(it->second.future);
    service_.outstanding_.erase(it);
    service_.explained_.erase(Key(place()));
  }

  std::string Token() override {
    service_.mailbox_.HandOut(place());
    return token().ToText();
  }

  bool Retract(Purpose purpose) override {
    return service_.mailbox_.Retract(place(), purpose == Purpose::kCancel);
  }
  bool IsPending() const override { return service_.mailbox_.IsPending(place_); }
  void OwnerDropped() override { service_.mailbox_.OwnerDropped(place()); }
  void Hold() override { service_.mailbox_.HoldAtHome(place()); }
  void Drop() override { service_.mailbox_.DropAtHome(place()); }
  void Explain(std::string why) override {
    std::lock_guard<std::mutex> lock(service_.mutex_);
    if (service_.outstanding_.contains(Key(place()))) {
      service_.explained_[Key(place())] = std::move(why);
    }
  }
  void HandOver() override { service_.mailbox_.HandOverAtHome(place()); }
  bool Claim() override { return service_.mailbox_.ClaimAtHome(place()); }
  void Fulfil() override { service_.mailbox_.FulfilAtHome(place()); }
  void Abandon() override { service_.mailbox_.AbandonAtHome(place()); }

  void Poll() override {
    if (generation_ != ForkGeneration()) return;
    if (auto event = Look()) service_.Deliver(*std::move(event));
  }

  std::unique_ptr<Alarm> Listen() override {
    class SlotAlarm final : public Alarm {
     public:
      explicit SlotAlarm(std::shared_ptr<End> end) : end_(std::move(end)) {}
      ~SlotAlarm() override {
        const bool is_short = std::chrono::steady_clock::now() - began_ < kLookOut;
        end_->service_.look_out_.store(is_short, std::memory_order_relaxed);
      }
      std::atomic<uint32_t>& counter() override { return mailbox().bell(end_->place()); }
      void LookOut() override { end_->service_.LookOut(*end_); }
      void Enter() override {
        mailbox().BeginWait(end_->place());
        entered_ = true;
      }
      void Leave() override {
        if (std::exchange(entered_, false)) mailbox().EndWait(end_->place());
      }
      void Look() override {
        auto event = end_->Look();
        if (!event) return;
        // The slot is free and may be used again: nobody waits for it any more who completes this.
        Leave();
        end_->service_.Deliver(*std::move(event));
      }

     private:
      shm::Mailbox& mailbox() const { return end_->service_.mailbox_; }
      const std::shared_ptr<End> end_;
      const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
      bool entered_ = false;
    };
    if (generation_ != ForkGeneration()) return nullptr;
    return std::make_unique<SlotAlarm>(shared_from_this());
  }

  shm::Token token() const {
    return {service_.address(), place_.slot, place_.generation, has_value_};
  }
  bool has_value() const { return has_value_; }
  // By whoever holds the future.
  bool IsComplete() const { return future_->completed(); }

 private:
  shm::Mailbox::Place place() const { return place_; }

  // In a thread that waits for the promise, and holds its future: what it is to complete it with.
  std::optional<shm::Mailbox::Event> Look() {
    // Another thread may have found it, and be in a callback that does not end before this does.
    if (service_.mailbox_.HasMore()) service_.mailbox_.WakeAnother();
    if (!service_.mailbox_.IsReady(place())) return std::nullopt;
    // This thread may hold what a callback of others wants: those run where they always do. (One
    // that is added in this very moment, with no way of ours, is run here.)
    const FuturePtr future = FuturePtr::reclaim_copy(future_);
    // Nor is it the place for a device's work: it may be in the middle of a graph's capture.
    const bool takes_device =
        service_.mailbox_.NeedsDevice(place()) || WantedDevice(future).has_value();
    if (!takes_device && !RunsCallbacks(future)) {
      return service_.mailbox_.CollectOne(place());
    }
    service_.mailbox_.WakeAnother();
    return std::nullopt;
  }

  Service& service_;
  c10::ivalue::Future* const future_;  // which owns this, and is owned by the table
  const shm::Mailbox::Place place_;
  const bool has_value_;
  const uint32_t generation_ = ForkGeneration();
};

Service* Service::GetIfAny() { return instance.load(); }

Service& Service::Get() {
  if (Service* service = instance.load()) return *service;
  std::lock_guard<std::mutex> lock(InstanceMutex());
  if (Service* service = instance.load()) return *service;
  static const bool once [[maybe_unused]] = [] {
    std::atexit([] {
      if (Service* service = instance.load()) service->StopAtExit();
    });
    return true;
  }();
  auto* service = new Service;
  instance.store(service);
  service->StartListening();
  return *service;
}

void Service::RegisterForkHandlers() {
  OnFork({
      .prepare =
          [] {
            // A child is a producer of whatever is outstanding, pickled or not.
            for (const FuturePtr& future : FindPromisesWithoutSource()) {
              try {
                Get().Export(future);
              } catch (const std::exception&) {
                break;  // no shared memory to be had: the child is told so if it uses the promise
              }
            }
            if (Service* service = instance.load()) service->mailbox_.BeforeFork();
          },
      .parent =
          [] {
            if (Service* service = instance.load()) service->mailbox_.AfterForkInParent();
          },
      .child =
          [] {
            if (Service* inherited = instance.exchange(nullptr)) {
              inherited->mailbox_.AfterForkInChild();
            }
          },
  });
}

std::shared_ptr<OwnerEnd> Service::Export(const FuturePtr& future) {
  if (auto source = SourceOf(future)) return std::static_pointer_cast<OwnerEnd>(std::move(source));
  const bool has_value = future->elementType()->kind() != c10::TypeKind::NoneType;
  const auto place = mailbox_.Allocate();
  auto end = std::make_shared<End>(*this, future, place, has_value);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    outstanding_.emplace(Key(place), Outstanding{end.get(), future});
  }
  return std::static_pointer_cast<OwnerEnd>(SetSource(future, std::move(end)));
}

Backend::Imported Service::Find(const shm::Token& token) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = outstanding_.find(Key({token.slot, token.generation}));
  if (it == outstanding_.end()) return {};
  // An end leaves the table before it goes.
  auto end = it->second.end->weak_from_this().lock();
  if (!end || end->has_value() != token.has_value) return {};
  return {it->second.future, std::move(end), nullptr};
}

FuturePtr Service::FutureAt(shm::Mailbox::Place place, bool& has_value, bool takes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = outstanding_.find(Key(place));
  if (it == outstanding_.end()) return {};
  it->second.taken = it->second.taken || takes;
  has_value = it->second.end->has_value();
  return it->second.future;
}

std::string Service::WhyBroken(shm::Mailbox::Place place) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = explained_.find(Key(place));
  if (it != explained_.end()) return it->second;
  return "the last process that could fulfil the promise has ended, or has dropped it, without a "
         "value: see its log for why";
}

shm::Token Service::TokenOf(const OwnerEnd& end) { return static_cast<const End&>(end).token(); }

// Whether `wanted` is that device; without an index, any of the type will do.
bool Names(c10::Device wanted, c10::Device device) {
  return wanted.type() == device.type() && (!wanted.has_index() || wanted == device);
}

// A producer asks for memory of a device.
void Service::Answer(shm::Mailbox::Event event) {
  const shm::Question question = *std::move(event.question);
  const auto provide = GetAcceleratorValues().provide;
  const bool sensible =
      question.device_type < c10::COMPILE_TIME_MAX_DEVICE_TYPES && question.device_index >= 0;
  bool has_value = false;
  const FuturePtr future = FutureAt(event.place, has_value, /*takes=*/false);
  const c10::Device device =
      sensible
          ? c10::Device(static_cast<c10::DeviceType>(question.device_type), question.device_index)
          : c10::Device(c10::kCPU);
  const auto wanted = future ? WantedDevice(future) : std::nullopt;
  if (!provide || !sensible || !future || (wanted && !Names(*wanted, device))) {
    mailbox_.Answer(event.place, question, {}, nullptr);
    return;
  }
  const uint64_t bytes = question.bytes;
  DeviceMemoryRequest request{
      .device = device,
      .bytes = bytes,
      .keepsake = [kept = question.keepsake](const auto& make) { return kept->Get(make); },
      .answer =
          [this, place = event.place, question](DeviceMemoryRequest::Grant grant) {
            mailbox_.Answer(place, question, grant.text, std::move(grant.block));
          },
  };
  provide(std::move(request));
}

void Service::Deliver(shm::Mailbox::Event event) {
  if (event.question) return Answer(std::move(event));
  bool has_value = false;
  const FuturePtr future = FutureAt(event.place, has_value);
  if (!future) return;  // dropped, or set by the owner, in this moment
  const shm::Token token{address(), event.place.slot, event.place.generation, has_value};
  const Span span("dtorch::shm.read", FlowBetweenProcesses(token.Key()));
  // A callback may wait for what was found together with this, or is published from now on: another
  // thread is to look, which may sleep with the bell disarmed.
  if (RunsCallbacks(future)) mailbox_.WakeAnother();
  if (event.broken) {
    Log(LogLevel::kInfo, "file", "the last producer has gone, of future ", future.get());
    CompleteWithError(future, std::make_exception_ptr(BrokenPromiseError(WhyBroken(event.place))));
    return;
  }
  shm::Received& received = event.received;
  try {
    if ((received.payload == shm::Payload::kTensor ||
         received.payload == shm::Payload::kDeviceTensor) &&
        has_value) {
      const c10::Device device = DeviceOf(received);
      at::Tensor value = Read(std::move(received));
      const auto deliver = GetAcceleratorValues().deliver;
      if ((device.is_cpu() && !WantedDevice(future)) || !deliver) {
        CompleteWithValue(future, std::move(value));
      } else {
        auto reservation = ReserveFuture(future);
        try {
          deliver(reservation, std::move(value), device, WantedDevice(future));
        } catch (const std::exception& error) {
          if (reservation) {
            SetErrorOf(*reservation, std::make_exception_ptr(DTorchError(TextOf(error))));
          }
        }
      }
    } else if (received.payload == shm::Payload::kNothing && !has_value &&
               received.defect.empty()) {
      CompleteWithValue(future, c10::IValue());
    } else if (received.payload == shm::Payload::kError && received.defect.empty()) {
      ErrorRecord record;
      const std::string_view bytes(reinterpret_cast<const char*>(received.data()), received.bytes);
      if (!ErrorRecord::FromBytes(bytes, record)) {
        throw std::runtime_error("what the producer published as an error is none");
      }
      CompleteWithError(future, DecodeError(record));
    } else {
      throw std::runtime_error("what the producer published is not what was promised");
    }
  } catch (const std::exception& error) {
    CompleteWithError(future, std::make_exception_ptr(DTorchError(TextOf(error))));
  }
}

bool Service::DeliverNext() {
  auto event = mailbox_.Collect();
  if (!event) return false;
  bool has_value = false;
  const FuturePtr future = FutureAt(event->place, has_value, /*takes=*/!event->question);
  const bool takes_device = event->question || event->received.memory ||
                            event->received.device_type != 0 || (future && WantedDevice(future));
  if (takes_device || (future && RunsCallbacks(future))) {
    mailbox_.PutBack(*std::move(event));
    return false;
  }
  Deliver(*std::move(event));
  return true;
}

void Service::LookOut(End& end) {
  static const bool alone = std::thread::hardware_concurrency() < 2;
  if (alone || !look_out_.load(std::memory_order_relaxed)) return;
  struct LooksOut {
    explicit LooksOut(shm::Mailbox& mailbox) : mailbox(mailbox) { mailbox.BeginLookOut(); }
    ~LooksOut() { mailbox.EndLookOut(); }
    shm::Mailbox& mailbox;
  } looks_out(mailbox_);
  const auto limit = std::chrono::steady_clock::now() + kLookOut;
  while (std::chrono::steady_clock::now() < limit) {
    if (!mailbox_.HasNews()) {
      if (end.IsComplete()) break;
    } else if (!DeliverNext() && mailbox_.HasMore()) {
      break;  // it runs callbacks, which have their threads
    }
  }
}

void Service::StartListening() {
  ++listening_;
  try {
    StartThread([this] { Run(); });
  } catch (...) {
    --listening_;
    throw;
  }
}

void Service::Run() {
  for (;;) {
    auto event = mailbox_.Collect();
    if (event && !stopping_) {
      try {
        if (--listening_ == 0) StartListening();
      } catch (const std::exception&) {
        // No thread to be had: what callbacks may wait for is seen to behind them.
      }
      Deliver(*std::move(event));
      ++listening_;
      continue;
    }
    const bool spare = listening_ > 1;
    const bool woken = stopping_ || mailbox_.Sleep(spare ? kSpareMs : -1);
    if (stopping_) break;
    if (!woken) {
      int threads = listening_;
      // One stays.
      while (threads > 1) {
        if (listening_.compare_exchange_weak(threads, threads - 1)) return;
      }
    }
  }
  --listening_;
}

void Service::StopAtExit() {
  // The threads must not meet what static destructors have taken down. One that is inside of a
  // callback is left where it is.
  stopping_ = true;
  mailbox_.Stop();
  for (int tries = 0; listening_ > 0 && tries < 1000; ++tries) std::this_thread::yield();
}

}  // namespace dtorch::file
