#pragma once

#include "dtorch/shm/address.h"
#include "dtorch/shm/mailbox.h"
#include "dtorch/sys/futex.h"

#include <atomic>
#include <climits>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "value.h"

namespace dtorch::shm::test {

/// What a consumer process does with its mailbox, as file/service.cpp does it, without futures:
/// threads that listen, and threads that wait for one promise.
class Consumer {
 public:
  enum class End { kNone, kValue, kBroken, kDefect };
  struct Promise {
    Token token;
    std::function<void(Promise&)> on_end;  // called once, in the thread that has found it
    std::atomic<End> end{End::kNone};
    Received received;
    Mailbox::Place place() const { return {token.slot, token.generation}; }
  };
  using PromisePtr = std::shared_ptr<Promise>;

  explicit Consumer(int threads = 1) {
    for (int i = 0; i < threads; ++i) listeners_.emplace_back([this] { Listen(); });
  }
  ~Consumer() {
    stopping_ = true;
    mailbox_.Stop();
    for (auto& thread : listeners_) thread.join();
    while (auto event = mailbox_.Collect()) Deliver(*std::move(event));
  }

  PromisePtr Make(std::function<void(Promise&)> on_end) {
    auto promise = std::make_shared<Promise>();
    promise->on_end = std::move(on_end);
    promise->token.mailbox = mailbox_.address();
    const auto place = mailbox_.Allocate();
    promise->token.slot = place.slot;
    promise->token.generation = place.generation;
    std::lock_guard<std::mutex> lock(mutex_);
    outstanding_.emplace(Key(place), promise);
    return promise;
  }

  /// Nobody wants it any more. False if it has ended before; on_end is not called otherwise.
  bool Drop(const PromisePtr& promise, bool cancelled = false) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (outstanding_.erase(Key(promise->place())) == 0) return false;
    }
    const auto place = promise->place();
    if (cancelled) {
      mailbox_.Retract(place, cancelled);  // unless the value is on its way
    } else if (mailbox_.ClaimAtHome(place)) {
      std::this_thread::yield();
      mailbox_.FulfilAtHome(place);
    }
    return true;
  }

  std::vector<PromisePtr> Outstanding() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<PromisePtr> all;
    for (const auto& [key, promise] : outstanding_) all.push_back(promise);
    return all;
  }

  /// SlotAlarm and Sleeper: false when the time is over first. `on_begin` is called when whoever
  /// publishes from now on sees the waiter.
  template <typename OnBegin>
  bool Wait(const PromisePtr& promise, Deadline deadline, const OnBegin& on_begin) {
    const auto place = promise->place();
    mailbox_.BeginWait(place);
    on_begin();
    for (;;) {
      auto& bell = mailbox_.bell(place);
      const uint32_t rung = bell.load();
      if (mailbox_.HasMore()) mailbox_.WakeAnother();
      if (mailbox_.IsReady(place)) {
        if (auto event = mailbox_.CollectOne(place)) {
          mailbox_.EndWait(place);
          Deliver(*std::move(event));
          return true;
        }
      }
      const bool ended = promise->end.load() != End::kNone;
      if (ended || deadline.HasPassed()) {
        mailbox_.EndWait(place);
        return ended;
      }
      FutexWait(bell, rung, deadline, FutexScope::kShared);
    }
  }

  /// What a thread does that is about to Wait(). Takes what has come, or finds that it is another
  /// thread's.
  void LookOut(const PromisePtr& promise, Deadline deadline, bool takes) {
    mailbox_.BeginLookOut();
    while (promise->end.load() == End::kNone && !deadline.HasPassed()) {
      if (!mailbox_.HasNews()) continue;
      auto event = mailbox_.Collect();
      if (event && !takes) {
        mailbox_.PutBack(*std::move(event));
        break;
      }
      if (event) Deliver(*std::move(event));
    }
    mailbox_.EndLookOut();
  }

  Mailbox& mailbox() { return mailbox_; }

 private:
  static uint64_t Key(Mailbox::Place place) {
    return uint64_t{place.generation} << 32 | place.slot;
  }

  void Listen() {
    while (!stopping_) {
      if (auto event = mailbox_.Collect()) {
        // Another thread may go on with what was found together with this.
        if (mailbox_.HasMore()) mailbox_.WakeAnother();
        Deliver(*std::move(event));
      } else {
        mailbox_.Sleep(-1);
      }
    }
  }

  // Of a device that is none: its memory is a number, how large it is. There is none of odd size.
  // Every third answer comes late: with the next question, when whoever asked may be gone.
  void Answer(Mailbox::Event event) {
    std::vector<Mailbox::Event> due;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      due.swap(late_);
      (++questions_ % 3 ? due : late_).push_back(std::move(event));
    }
    for (const auto& each : due) {
      const auto& question = *each.question;
      const bool has_memory = question.bytes % 2 == 0;
      mailbox_.Answer(each.place, question, has_memory ? std::to_string(question.bytes) : "",
                      std::make_shared<uint64_t>(question.bytes));
    }
  }

  void Deliver(Mailbox::Event event) {
    if (event.question) return Answer(std::move(event));
    PromisePtr promise;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto it = outstanding_.find(Key(event.place));
      if (it == outstanding_.end()) return;  // retracted, or dropped
      promise = std::move(it->second);
      outstanding_.erase(it);
    }
    promise->received = std::move(event.received);
    promise->end = event.broken                       ? End::kBroken
                   : promise->received.defect.empty() ? End::kValue
                                                      : End::kDefect;
    promise->on_end(*promise);
    // Sleeper::Wake, of those who wait for it as well.
    auto& bell = mailbox_.bell(event.place);
    bell.fetch_add(1);
    FutexWake(bell, INT_MAX, FutexScope::kShared);
  }

  Mailbox mailbox_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, PromisePtr> outstanding_;
  std::vector<Mailbox::Event> late_;
  uint64_t questions_ = 0;
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> listeners_;
};

}  // namespace dtorch::shm::test
