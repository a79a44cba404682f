#include "dtorch/file/service.h"

#include "dtorch/base/error.h"
#include "dtorch/base/fork.h"
#include "dtorch/file/codec.h"
#include "dtorch/promise/error_record.h"

#include <ATen/core/Tensor.h>

#include <cstdlib>
#include <pthread.h>
#include <signal.h>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace dtorch::file {
namespace {

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

// The owner's end of one promise.
class Service::End final : public OwnerEnd {
 public:
  End(Service& service, shm::Token token) : service_(service), token_(token) {}

  std::string Token() override { return token_.ToText(); }

  bool Retract() override {
    if (!service_.mailbox_.Retract(place())) return false;
    service_.Forget(place());
    return true;
  }

 private:
  shm::Mailbox::Place place() const { return {token_.slot, token_.generation}; }

  Service& service_;
  const shm::Token token_;
};

Service* Service::GetIfAny() { return instance.load(); }

Service& Service::Get() {
  std::lock_guard<std::mutex> lock(InstanceMutex());
  if (Service* service = instance.load()) return *service;
  static const bool once [[maybe_unused]] = [] {
    OnForkInChild([] {
      if (Service* inherited = instance.exchange(nullptr)) inherited->mailbox_.CloseInChild();
    });
    std::atexit([] {
      if (Service* service = instance.load()) service->StopAtExit();
    });
    return true;
  }();
  auto* service = new Service;
  instance.store(service);
  service->StartThread();
  return *service;
}

std::unique_ptr<OwnerEnd> Service::Export(c10::intrusive_ptr<PromiseState> promise) {
  shm::Token token;
  token.mailbox = mailbox_.address();
  token.has_value = promise->has_value();
  std::lock_guard<std::mutex> lock(mutex_);
  const auto place = mailbox_.Allocate();
  token.slot = place.slot;
  token.generation = place.generation;
  promises_.emplace(Key(place), std::move(promise));
  return std::make_unique<End>(*this, token);
}

c10::intrusive_ptr<PromiseState> Service::Find(const shm::Token& token) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = promises_.find(Key({token.slot, token.generation}));
  return it == promises_.end() ? c10::intrusive_ptr<PromiseState>() : it->second;
}

c10::intrusive_ptr<PromiseState> Service::Forget(shm::Mailbox::Place place) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = promises_.find(Key(place));
  if (it == promises_.end()) return {};
  auto promise = std::move(it->second);
  promises_.erase(it);
  return promise;
}

void Service::Deliver(shm::Mailbox::Event event) {
  const auto promise = Forget(event.place);
  if (!promise) return;  // the owner has fulfilled it in this moment
  if (event.broken) {
    promise->DeliverError(std::make_exception_ptr(BrokenPromiseError(
        "the last process that could fulfil the promise has ended, or has dropped it, without a "
        "value: see its log for why")));
    return;
  }
  shm::Received& received = event.received;
  try {
    if (received.payload == shm::Payload::kTensor && promise->has_value()) {
      promise->Deliver(Read(std::move(received)));
    } else if (received.payload == shm::Payload::kNothing && !promise->has_value() &&
               received.defect.empty()) {
      promise->Deliver(c10::IValue());
    } else if (received.payload == shm::Payload::kError && received.defect.empty()) {
      ErrorRecord record;
      const std::string_view bytes(reinterpret_cast<const char*>(received.data), received.bytes);
      if (!ErrorRecord::FromBytes(bytes, record)) {
        throw std::runtime_error("what the producer published as an error is none");
      }
      promise->DeliverError(DecodeError(record));
    } else {
      throw std::runtime_error("what the producer published is not what was promised");
    }
  } catch (const std::exception& error) {
    promise->DeliverError(std::make_exception_ptr(DTorchError(error.what())));
  }
}

void Service::StartThread() {
  // Signals are for the threads of the program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  ++listening_;
  std::thread([this] { Run(); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Service::Run() {
  pthread_setname_np(pthread_self(), "dtorch_ops");
  for (;;) {
    auto events = mailbox_.Collect();
    if (!events.empty() && !stopping_) {
      if (--listening_ == 0) StartThread();
      for (auto& event : events) Deliver(std::move(event));
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
