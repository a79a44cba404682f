// Tests of the C++ core: time limits, sleeping, the waiter lists, groups, promises. Each runs
// alone: core_test NAME; without a name, all of them.
//
// What races is run many times over, and checked for what must hold whoever wins.

#include "dtorch/base/deadline.h"
#include "dtorch/base/host.h"
#include "dtorch/dtorch.h"
#include "dtorch/future/collect.h"
#include "dtorch/future/complete.h"
#include "dtorch/future/completion_queue.h"
#include "dtorch/future/outcome.h"
#include "dtorch/future/sleeper.h"
#include "dtorch/future/wait.h"
#include "dtorch/future/waiter_list.h"
#include "dtorch/promise/promise_state.h"
#include "dtorch/sys/futex.h"

#include <ATen/ATen.h>
#include <ATen/core/jit_type.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <pthread.h>
#include <signal.h>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

using namespace dtorch;

namespace {

constexpr int64_t kLong = 60'000;  // never reached by a test that passes

// ---- What a test needs --------------------------------------------------------------------------

#define EXPECT(condition)                                                              \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " << #condition << " is false\n"; \
      std::abort();                                                                    \
    }                                                                                  \
  } while (false)

#define EXPECT_THROWS(expression, type)                                                         \
  do {                                                                                          \
    bool thrown = false;                                                                        \
    try {                                                                                       \
      (void)(expression);                                                                       \
    } catch (const type&) {                                                                     \
      thrown = true;                                                                            \
    }                                                                                           \
    if (!thrown) {                                                                              \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " << #expression << " throws no " << #type \
                << "\n";                                                                        \
      std::abort();                                                                             \
    }                                                                                           \
  } while (false)

using Clock = std::chrono::steady_clock;

int64_t MsSince(Clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
}

FuturePtr Pending() { return c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get()); }

FuturePtr Ready(int64_t value) { return MakeCompletedFuture(c10::IntType::get(), value); }

FuturePtr Failed(const std::string& message) {
  FuturePtr future = Pending();
  CompleteWithError(future, std::make_exception_ptr(std::runtime_error(message)));
  return future;
}

// Runs every function in a thread of its own, all starting at once, and waits for them.
void Race(const std::vector<std::function<void()>>& functions) {
  std::barrier start(static_cast<std::ptrdiff_t>(functions.size()));
  std::vector<std::thread> threads;
  for (const auto& function : functions) {
    threads.emplace_back([&start, &function] {
      start.arrive_and_wait();
      function();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Counts how often it is notified.
class CountingWaiter final : public Waiter {
 public:
  ~CountingWaiter() override { Unlink(); }
  int notified() const { return notified_.load(); }

  // What a test adds, under the lock of the list.
  std::function<void()> on_notify;
  std::shared_ptr<Waker> waker;

 private:
  std::shared_ptr<Waker> Notify() noexcept override {
    notified_.fetch_add(1);
    if (on_notify) on_notify();
    return std::move(waker);
  }
  std::atomic<int> notified_{0};
};

// ---- Time limits --------------------------------------------------------------------------------

void DeadlineOverflow() {
  const int64_t huge[] = {std::numeric_limits<int64_t>::max(), int64_t{1} << 62,
                          std::numeric_limits<int64_t>::max() / 1'000'000};
  for (int64_t ms : huge) {
    const Deadline deadline = Deadline::AfterMs(ms);
    EXPECT(!deadline.HasPassed());
    EXPECT(deadline.when() > Clock::now());
    const Deadline nearer = deadline.AtMostMs(1);
    EXPECT(nearer.when() <= Clock::now() + std::chrono::milliseconds(1));
  }
  EXPECT(Deadline::AfterMs(std::numeric_limits<int64_t>::max()).IsNever());
  EXPECT(!Deadline::AfterMs(kLong).IsNever());
  EXPECT(Deadline::AfterMs(0).HasPassed());
  EXPECT(!Deadline::Never().HasPassed());
  EXPECT(Deadline::Never().AtMostMs(0).HasPassed());
  EXPECT(Deadline::AfterMs(0).AtMostMs(kLong).HasPassed());
  // Round the point where milliseconds stop fitting the clock.
  const auto room = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::time_point::max() -
                                                                          Clock::now());
  for (int64_t off = -5000; off <= 5000; off += 100) {
    EXPECT(!Deadline::AfterMs(room.count() + off).HasPassed());
  }
}

void DeadlineFromUser() {
  EXPECT_THROWS(DeadlineFromMs(-1), c10::ValueError);
  EXPECT_THROWS(DeadlineFromMs(std::numeric_limits<int64_t>::min()), c10::ValueError);
  EXPECT(DeadlineFromMs(0).HasPassed());
  EXPECT(DeadlineFromMs(std::numeric_limits<int64_t>::max()).IsNever());
}

// ---- Futex and sleeper --------------------------------------------------------------------------

void FutexTimesOut() {
  const std::atomic<uint32_t> word{7};
  EXPECT(FutexWait(word, 7, Deadline::AfterMs(0)) == FutexResult::kTimedOut);
  const auto begin = Clock::now();
  EXPECT(FutexWait(word, 7, Deadline::AfterMs(30)) == FutexResult::kTimedOut);
  EXPECT(MsSince(begin) >= 30);
}

void FutexSeesAnotherValue() {
  const std::atomic<uint32_t> word{7};
  EXPECT(FutexWait(word, 8, Deadline::Never()) == FutexResult::kWoken);
  EXPECT(FutexWait(word, 8, Deadline::AfterMs(int64_t{1} << 40)) == FutexResult::kWoken);
}

void FutexIsWoken() {
  std::atomic<uint32_t> word{0};
  std::thread waker([&] {
    word = 1;
    FutexWake(word, 1);
  });
  while (word == 0) EXPECT(FutexWait(word, 0, Deadline::AfterMs(kLong)) == FutexResult::kWoken);
  waker.join();
  FutexWake(word, 1);  // nobody sleeps
}

void OnSignal(int) {}

void AllowInterruption() {
  struct sigaction action = {};
  action.sa_handler = OnSignal;  // without SA_RESTART
  sigaction(SIGUSR1, &action, nullptr);
}

void FutexIsInterrupted() {
  AllowInterruption();
  const std::atomic<uint32_t> word{0};
  std::atomic<bool> interrupted{false};
  std::thread sleeper([&] {
    while (FutexWait(word, 0, Deadline::AfterMs(kLong)) != FutexResult::kInterrupted) {
    }
    interrupted = true;
  });
  while (!interrupted) pthread_kill(sleeper.native_handle(), SIGUSR1);
  sleeper.join();
}

void SleeperTakesOneWake() {
  Sleeper sleeper;
  EXPECT(!sleeper.Sleep(Deadline::AfterMs(0)));
  sleeper.Wake();
  sleeper.Wake();
  EXPECT(sleeper.Sleep(Deadline::AfterMs(0)));  // was not lost, though nobody slept
  EXPECT(!sleeper.Sleep(Deadline::AfterMs(0)));
  const auto begin = Clock::now();
  EXPECT(!sleeper.Sleep(Deadline::AfterMs(30)));
  EXPECT(MsSince(begin) >= 30);
  sleeper.Wake();
  EXPECT(sleeper.Sleep(Deadline::Never()));
}

void SleepersPlayPingPong() {
  Sleeper ping, pong;
  std::thread other([&] {
    for (int i = 0; i < 20'000; ++i) {
      EXPECT(ping.Sleep(Deadline::AfterMs(kLong)));
      pong.Wake();
    }
  });
  for (int i = 0; i < 20'000; ++i) {
    ping.Wake();
    EXPECT(pong.Sleep(i % 2 ? Deadline::AfterMs(kLong) : Deadline::Never()));
  }
  other.join();
}

// The sleeper dies as soon as it is woken, while Wake() may still be running.
void SleeperMayDieWhenWoken() {
  for (int i = 0; i < 5'000; ++i) {
    auto sleeper = std::make_unique<Sleeper>();
    std::thread waker([raw = sleeper.get()] { raw->Wake(); });
    EXPECT(sleeper->Sleep(Deadline::AfterMs(kLong)));
    sleeper.reset();
    waker.join();
  }
}

void SignalsDoNotEndASleep() {
  AllowInterruption();
  Sleeper sleeper;
  std::atomic<bool> awake{false};
  std::thread thread([&] {
    EXPECT(sleeper.Sleep(Deadline::AfterMs(kLong)));
    awake = true;
  });
  for (int i = 0; i < 1'000; ++i) pthread_kill(thread.native_handle(), SIGUSR1);
  EXPECT(!awake);
  sleeper.Wake();
  thread.join();
}

// ---- Waiter lists -------------------------------------------------------------------------------

void WaiterIsNotifiedOnce() {
  const FuturePtr future = Pending();
  CountingWaiter waiter;
  EXPECT(waiter.LinkTo(future));
  EXPECT(waiter.notified() == 0);
  CompleteWithValue(future, 1);
  EXPECT(waiter.notified() == 1);
  waiter.Unlink();  // long since
  waiter.Unlink();
  EXPECT(waiter.notified() == 1);
  CountingWaiter late;
  EXPECT(!late.LinkTo(future));
  EXPECT(late.notified() == 0);
}

void WaitersAreNotifiedInOrder() {
  const FuturePtr future = Pending();
  std::vector<int> order;
  std::vector<std::unique_ptr<CountingWaiter>> waiters;
  for (int i = 0; i < 100; ++i) {
    auto waiter = std::make_unique<CountingWaiter>();
    waiter->on_notify = [&order, i] { order.push_back(i); };
    EXPECT(waiter->LinkTo(future));
    waiters.push_back(std::move(waiter));
  }
  for (int gone : {0, 50, 99, 1, 98}) waiters[gone]->Unlink();
  for (int back : {50, 0}) EXPECT(waiters[back]->LinkTo(future));  // behind the others
  CompleteWithValue(future, 1);
  std::vector<int> expected;
  for (int i = 2; i < 98; ++i) {
    if (i != 50) expected.push_back(i);
  }
  expected.push_back(50);
  expected.push_back(0);
  EXPECT(order == expected);
}

void WaiterMovesBetweenFutures() {
  CountingWaiter waiter;
  for (int i = 1; i <= 1'000; ++i) {
    const FuturePtr future = Pending();
    EXPECT(waiter.LinkTo(future));
    if (i % 2) {
      CompleteWithValue(future, 1);
    } else {
      waiter.Unlink();
    }
    EXPECT(waiter.notified() == (i + 1) / 2);
  }
}

void WhatIsKeptAliveIsLetGo() {
  for (int how = 0; how < 3; ++how) {
    FuturePtr future = Pending();
    auto kept = std::make_shared<int>(3);
    const std::weak_ptr<int> watch = kept;
    CountingWaiter waiter;
    EXPECT(waiter.LinkTo(future, std::move(kept)));
    EXPECT(!watch.expired());
    if (how == 0) CompleteWithValue(future, 1);
    if (how == 1) waiter.Unlink();
    if (how == 2) future.reset();  // dropped pending: there will be no notification
    EXPECT(watch.expired());
    EXPECT(waiter.notified() == (how == 0));
    waiter.Unlink();
  }
}

void AnAddressThatIsUsedAgainIsAnotherFuture() {
  for (int i = 0; i < 10'000; ++i) {
    CountingWaiter waiter;
    {
      const FuturePtr dropped = Pending();
      EXPECT(waiter.LinkTo(dropped));
    }
    const FuturePtr future = Pending();  // as often as not in the same place
    CompleteWithValue(future, 1);
    EXPECT(waiter.notified() == 0);
  }
}

void WaitersComeBeforeTheCallbacksOfAPromise() {
  const FuturePtr future = Pending();
  PrepareForWaiters(future, Origin::kPromise);
  std::vector<std::string> order;
  future->addCallback([&](c10::ivalue::Future&) { order.push_back("callback"); });
  CountingWaiter waiter;
  waiter.on_notify = [&] { order.push_back("waiter"); };
  EXPECT(waiter.LinkTo(future));
  CompleteWithValue(future, 1);
  EXPECT((order == std::vector<std::string>{"waiter", "callback"}));
}

void WakersRunOutsideOfTheLock() {
  struct Linking final : Waker {
    void Wake() override {
      // Would block for ever if the lock were held: every list is tried.
      for (int i = 0; i < 1'000; ++i) {
        CountingWaiter waiter;
        futures.push_back(Pending());
        EXPECT(waiter.LinkTo(futures.back()));
      }
      ran = true;
    }
    std::vector<FuturePtr> futures;
    bool ran = false;
  };
  const auto waker = std::make_shared<Linking>();
  const FuturePtr future = Pending();
  CountingWaiter waiter;
  waiter.waker = waker;
  EXPECT(waiter.LinkTo(future));
  CompleteWithValue(future, 1);
  EXPECT(waker->ran);
}

// Linking, unlinking and completing at the same time: whoever was linked is notified exactly once,
// unless it had unlinked; after Unlink() nothing comes any more.
void WaitersRaceWithTheCompletion() {
  for (int round = 0; round < 3'000; ++round) {
    const FuturePtr future = Pending();
    std::atomic<int> missed{0};
    const auto wait = [&] {
      CountingWaiter waiter;
      if (!waiter.LinkTo(future)) {
        EXPECT(future->completed());
        EXPECT(waiter.notified() == 0);
        return;
      }
      const Deadline limit = Deadline::AfterMs(kLong);
      while (waiter.notified() == 0 && !limit.HasPassed()) std::this_thread::yield();
      if (waiter.notified() != 1) ++missed;
    };
    const auto come_and_go = [&] {
      for (int i = 0; i < 20; ++i) {
        CountingWaiter waiter;
        if (!waiter.LinkTo(future)) return;
        waiter.Unlink();
        const int notified = waiter.notified();
        EXPECT(notified <= 1);
        std::this_thread::yield();
        EXPECT(waiter.notified() == notified);
      }
    };
    Race({wait, wait, come_and_go, come_and_go, [&] { CompleteWithValue(future, round); }});
    EXPECT(missed == 0);
  }
}

// Futures that die pending, are completed, and are watched, in many threads: the table of lists.
void ListsOfManyFutures() {
  const auto churn = [] {
    std::vector<FuturePtr> futures(64);
    std::vector<std::unique_ptr<CountingWaiter>> waiters(64);
    for (int i = 0; i < 20'000; ++i) {
      const int slot = i * 7 % 64;
      if (!futures[slot]) {
        futures[slot] = Pending();
        waiters[slot] = std::make_unique<CountingWaiter>();
        EXPECT(waiters[slot]->LinkTo(futures[slot]));
      } else if (i % 3 == 0) {
        CompleteWithValue(futures[slot], i);
        EXPECT(waiters[slot]->notified() == 1);
        futures[slot].reset();
        waiters[slot].reset();
      } else if (i % 3 == 1) {
        waiters[slot]->Unlink();
        futures[slot].reset();
        EXPECT(waiters[slot]->notified() == 0);
      } else {
        futures[slot].reset();
        EXPECT(waiters[slot]->notified() == 0);
      }
    }
  };
  Race({churn, churn, churn, churn});
}

// ---- Waiting ------------------------------------------------------------------------------------

void WaitingHasABound() {
  const FuturePtr future = Pending();
  EXPECT(!WaitUntil(future, Deadline::AfterMs(0)));
  const auto begin = Clock::now();
  EXPECT(!WaitUntil(future, Deadline::AfterMs(30)));
  EXPECT(MsSince(begin) >= 30);
  EXPECT_THROWS(WaitForValue(future, Deadline::AfterMs(0)), TimeoutError);
  CompleteWithValue(future, 5);
  EXPECT(WaitUntil(future, Deadline::AfterMs(0)));
  EXPECT(WaitForValue(future, Deadline::AfterMs(0)).toInt() == 5);
}

void WaitingRacesWithTheCompletion() {
  for (int round = 0; round < 3'000; ++round) {
    const FuturePtr future = Pending();
    const auto wait = [&] {
      EXPECT(WaitForValue(future, Deadline::AfterMs(kLong)).toInt() == round);
    };
    const auto wait_briefly = [&] {
      while (!WaitUntil(future, Deadline::AfterMs(round % 2))) {
      }
      EXPECT(future->completed());
    };
    Race({wait, wait, wait_briefly, [&] { CompleteWithValue(future, round); }});
  }
}

struct Peculiar : std::exception {
  explicit Peculiar(int number) : number(number) {}
  const char* what() const noexcept override { return "peculiar"; }
  int number;
};

void AnErrorKeepsItsType() {
  const FuturePtr future = Pending();
  CompleteWithError(future, std::make_exception_ptr(Peculiar(3)));
  for (int i = 0; i < 3; ++i) {
    try {
      WaitForValue(future, Deadline::Never());
      EXPECT(false);
    } catch (const Peculiar& error) {
      EXPECT(error.number == 3);
    }
    EXPECT(ErrorOf(future) != nullptr);
    EXPECT_THROWS(ValueOf(future), Peculiar);
    EXPECT_THROWS(WaitForAll({Ready(1), future}, Deadline::Never()), Peculiar);
  }
  EXPECT(ErrorOf(Ready(1)) == nullptr);
}

void WaitingForAll() {
  WaitForAll({}, Deadline::AfterMs(0));
  const FuturePtr pending = Pending();
  EXPECT_THROWS(WaitForAll({pending, Ready(1)}, Deadline::AfterMs(0)), TimeoutError);
  EXPECT_THROWS(WaitForAll({pending, Failed("now")}, Deadline::AfterMs(kLong)), std::runtime_error);
  EXPECT_THROWS(WaitForAll({Failed("now"), pending}, Deadline::AfterMs(kLong)), std::runtime_error);
  std::thread producer([&] { CompleteWithValue(pending, 1); });
  WaitForAll({pending, pending, Ready(1)}, Deadline::AfterMs(kLong));
  producer.join();
  try {
    WaitForAll({Pending(), Pending(), Ready(1)}, Deadline::AfterMs(0));
    EXPECT(false);
  } catch (const TimeoutError& error) {
    EXPECT(std::string(error.what()).find("2 of 3") == 0);
  }
}

// ---- Completion queue ---------------------------------------------------------------------------

void QueueTellsInTheOrderOfCompletion() {
  const FuturePtr a = Pending(), b = Pending();
  CompletionQueue queue({a, Ready(1), b, Ready(2)});
  EXPECT(queue.size() == 4 && queue.remaining() == 4);
  EXPECT(queue.Pop(Deadline::AfterMs(0)) == 1u);
  EXPECT(queue.Pop(Deadline::AfterMs(0)) == 3u);
  EXPECT(!queue.Pop(Deadline::AfterMs(0)));
  EXPECT(queue.remaining() == 2);
  CompleteWithValue(b, 1);
  CompleteWithError(a, std::make_exception_ptr(std::runtime_error("an error counts too")));
  EXPECT(queue.Pop(Deadline::AfterMs(0)) == 2u);
  EXPECT(queue.Pop(Deadline::AfterMs(0)) == 0u);
  EXPECT(queue.remaining() == 0);
  EXPECT(!queue.Pop(Deadline::Never()));  // all were told: does not block
  CompletionQueue nothing({});
  EXPECT(!nothing.Pop(Deadline::Never()));
}

void QueueTellsOfOneFutureTwice() {
  const FuturePtr future = Pending();
  CompletionQueue queue({future, future});
  CompleteWithValue(future, 1);
  EXPECT(queue.Pop(Deadline::AfterMs(0)) == 0u);
  EXPECT(queue.Pop(Deadline::AfterMs(0)) == 1u);
}

void QueueRacesWithItsProducers() {
  for (int round = 0; round < 300; ++round) {
    std::vector<FuturePtr> futures(40);
    for (FuturePtr& future : futures) future = Pending();
    const auto produce = [&](size_t first) {
      for (size_t i = first; i < futures.size(); i += 2) CompleteWithValue(futures[i], 1);
    };
    const auto consume = [&] {
      CompletionQueue queue(futures);
      std::map<size_t, int> told;
      while (auto index = queue.Pop(Deadline::AfterMs(kLong))) {
        EXPECT(futures[*index]->completed());
        ++told[*index];
      }
      EXPECT(queue.remaining() == 0);
      EXPECT(told.size() == futures.size());
    };
    Race({consume, consume, [&] { produce(0); }, [&] { produce(1); }});
  }
}

void QueueMayGoBeforeItsFuturesComplete() {
  for (int round = 0; round < 1'000; ++round) {
    std::vector<FuturePtr> futures(8);
    for (FuturePtr& future : futures) future = Pending();
    Race({[&] {
            for (int i = 0; i < 5; ++i) {
              CompletionQueue queue(futures);
              queue.Pop(Deadline::AfterMs(0));
            }
          },
          [&] {
            for (FuturePtr& future : futures) CompleteWithValue(future, 1);
          }});
  }
}

// ---- Groups -------------------------------------------------------------------------------------

void CollectingAll() {
  EXPECT(CollectAll({}, c10::IntType::get())->value().toList().empty());
  const FuturePtr a = Pending(), b = Pending();
  const FuturePtr group = CollectAll({a, Ready(7), b, a}, c10::IntType::get());
  CompleteWithValue(b, 2);
  EXPECT(!group->completed());
  CompleteWithValue(a, 1);
  EXPECT(group->completed());
  const auto members = group->value().toList();
  std::vector<int64_t> values;
  for (const auto& member : members) {
    values.push_back(c10::IValue(member.get()).toFuture()->value().toInt());
  }
  EXPECT((values == std::vector<int64_t>{1, 7, 2, 1}));
}

void CollectingEndsAtTheFirstError() {
  const FuturePtr pending = Pending();
  for (const auto& futures : {std::vector<FuturePtr>{pending, Failed("now")},
                              std::vector<FuturePtr>{Failed("now"), pending}}) {
    const FuturePtr group = CollectAll(futures, c10::IntType::get());
    EXPECT(group->completed() && group->hasError());
    EXPECT(!pending->completed());
  }
  const FuturePtr a = Pending(), b = Pending();
  const FuturePtr group = CollectAll({a, b}, c10::IntType::get());
  CompleteWithError(b, std::make_exception_ptr(Peculiar(1)));
  EXPECT_THROWS(ValueOf(group), Peculiar);
  CompleteWithError(a, std::make_exception_ptr(std::runtime_error("too late")));
  EXPECT_THROWS(ValueOf(group), Peculiar);
}

void CollectingAny() {
  EXPECT_THROWS(CollectAny({}, c10::IntType::get()), c10::ValueError);
  EXPECT(CollectAny({Pending(), Ready(1), Ready(2)}, c10::IntType::get())->value().toInt() == 1);
  const FuturePtr a = Pending(), b = Pending();
  const FuturePtr group = CollectAny({a, b}, c10::IntType::get());
  EXPECT(!group->completed());
  CompleteWithValue(b, 2);
  CompleteWithValue(a, 1);
  EXPECT(group->value().toInt() == 2);
  EXPECT(CollectAny({Pending(), Failed("now")}, c10::IntType::get())->hasError());
}

void GroupsRaceWithTheirMembers() {
  for (int round = 0; round < 1'000; ++round) {
    std::vector<FuturePtr> futures(6);
    for (FuturePtr& future : futures) future = Pending();
    const auto produce = [&](size_t first) {
      for (size_t i = first; i < futures.size(); i += 2) {
        CompleteWithValue(futures[i], static_cast<int64_t>(i));
      }
    };
    const auto collect = [&] {
      const FuturePtr all = CollectAll(futures, c10::IntType::get());
      const FuturePtr any = CollectAny(futures, c10::IntType::get());
      EXPECT(WaitForValue(all, Deadline::AfterMs(kLong)).toList().size() == futures.size());
      const int64_t first = WaitForValue(any, Deadline::AfterMs(kLong)).toInt();
      EXPECT(first >= 0 && first < 6);
    };
    Race({collect, collect, [&] { produce(0); }, [&] { produce(1); }});
  }
}

void AGroupThatIsSettledLetsGoOfItsMembers() {
  const FuturePtr never = Pending();
  const size_t before = never.use_count();
  for (int i = 0; i < 100; ++i) {
    CollectAny({never, Ready(1)}, c10::IntType::get());
    CollectAll({never, Failed("now")}, c10::IntType::get());
    CollectAll({never, Pending()}, c10::IntType::get());  // dropped at once, and pending
  }
  EXPECT(never.use_count() == before);
  CompleteWithValue(never, 1);
}

// ---- Promises -----------------------------------------------------------------------------------

void PromiseIsFulfilledOnce() {
  const TensorPromise promise;
  TensorFuture future = promise.GetFuture();
  promise.SetValue(at::ones({2}));
  EXPECT_THROWS(promise.SetValue(at::ones({2})), PromiseAlreadySatisfiedError);
  EXPECT_THROWS(promise.SetException("late"), PromiseAlreadySatisfiedError);
  EXPECT(!promise.Cancel());
  EXPECT(future.Get().sum().item<float>() == 2);
  EXPECT_THROWS(future.Get(), FutureAlreadyRetrievedError);
  EXPECT(promise.GetFuture().Get().sum().item<float>() == 2);  // a handle of its own
}

void PromiseWithoutAValue() {
  const TensorPromise promise;
  EXPECT_THROWS(promise.SetValue(at::Tensor()), c10::ValueError);
  EXPECT(!promise.GetFuture().IsReady());
  TensorFuture future = promise.GetFuture();
  EXPECT_THROWS(future.Wait(0), TimeoutError);
  EXPECT_THROWS(future.Wait(-1), c10::ValueError);
  promise.SetException("no value");
  future.Wait(0);
  future.Wait(std::numeric_limits<int64_t>::max());
  EXPECT(future.Valid());
  EXPECT_THROWS(future.Get(), std::runtime_error);
  EXPECT(!future.Valid());  // an error is a result, too
  EXPECT_THROWS(future.Get(), FutureAlreadyRetrievedError);
}

void PromiseIsCancelled() {
  const VoidPromise promise;
  VoidFuture future = promise.GetFuture();
  EXPECT(promise.Cancel());
  EXPECT(!promise.Cancel());
  EXPECT_THROWS(promise.SetValue(), PromiseAlreadySatisfiedError);
  EXPECT_THROWS(future.Get(), CancelledError);
}

void PromiseIsBrokenByItsLastHandle() {
  auto promise = std::make_unique<TensorPromise>();
  TensorFuture future = promise->GetFuture();
  auto copy = std::make_unique<TensorPromise>(*promise);
  c10::IValue passed_to_a_script = promise->ToIValue();
  promise.reset();
  EXPECT(!future.IsReady());
  std::thread([&] { copy.reset(); }).join();
  EXPECT(!future.IsReady());
  passed_to_a_script = c10::IValue();
  EXPECT(future.IsReady());
  EXPECT_THROWS(future.Get(), BrokenPromiseError);
}

void ProducersRace() {
  for (int round = 0; round < 2'000; ++round) {
    auto state = c10::make_intrusive<TensorPromiseState>();
    const FuturePtr future = state->future();
    std::atomic<int> winners{0}, losers{0}, callbacks{0};
    std::atomic<int> winner{-1};
    future->addCallback([&](c10::ivalue::Future&) { ++callbacks; });
    std::vector<std::function<void()>> producers;
    for (int i = 0; i < 8; ++i) {
      producers.push_back([&, i] {
        try {
          if (i % 4 == 3) {
            if (!state->Cancel()) {
              ++losers;
              return;
            }
          } else if (i % 2) {
            state->SetError(std::make_exception_ptr(Peculiar(i)));
          } else {
            state->Set(at::full({}, i));
          }
          ++winners;
          winner = i;
        } catch (const PromiseAlreadySatisfiedError&) {
          ++losers;
        }
      });
    }
    Race(producers);
    EXPECT(winners == 1 && losers == 7 && callbacks == 1);
    try {
      const int value = ValueOf(future).toTensor().item<int>();
      EXPECT(value == winner && winner % 2 == 0);
    } catch (const Peculiar& error) {
      EXPECT(error.number == winner && winner % 4 == 1);
    } catch (const CancelledError&) {
      EXPECT(winner % 4 == 3);
    }
  }
}

void BreakingRacesWithWaiting() {
  for (int round = 0; round < 1'000; ++round) {
    auto state = c10::make_intrusive<TensorPromiseState>();
    const FuturePtr future = state->future();
    Race(
        {[&] { EXPECT_THROWS(WaitForValue(future, Deadline::AfterMs(kLong)), BrokenPromiseError); },
         [&] { state.reset(); }});
  }
}

// A callback that blocks on another future, which a callback completes that blocks, and so on.
void CallbacksMayBlockOnEachOther() {
  constexpr int kDepth = 40;
  std::vector<TensorPromise> promises(kDepth + 1);
  std::atomic<int> finished{0};
  for (int i = 0; i < kDepth; ++i) {
    promises[i].GetFuture().future()->addCallback([&, i](c10::ivalue::Future&) {
      promises[i + 1].GetFuture().Wait(kLong);
      ++finished;
    });
  }
  std::vector<std::thread> producers;
  for (int i = 0; i <= kDepth; ++i) {
    producers.emplace_back([&, i] { promises[i].SetValue(at::zeros({1})); });
  }
  for (std::thread& producer : producers) producer.join();
  EXPECT(finished == kDepth);
}

void ManyThreadsWaitForOnePromise() {
  const TensorPromise promise;
  std::vector<std::function<void()>> functions(8, [&] {
    TensorFuture future = promise.GetFuture();
    future.Wait(kLong);
    EXPECT(future.Get().item<float>() == 3);
  });
  functions.push_back([&] { promise.SetValue(at::full({}, 3.0f)); });
  Race(functions);
}

// ---- Fork ---------------------------------------------------------------------------------------

void AForkedChild() {
  const TensorPromise promise(c10::make_intrusive<TensorPromiseState>(PromiseMode::kMemory));
  TensorFuture future = promise.GetFuture();
  std::atomic<bool> stop{false};
  std::thread busy([&] {  // so that locks are held when the process forks
    while (!stop) {
      TensorFuture other = TensorPromise().GetFuture();
      EXPECT_THROWS(other.Get(), BrokenPromiseError);
    }
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      EXPECT_THROWS(promise.SetValue(at::ones({1})), DTorchError);
      EXPECT_THROWS(promise.Cancel(), DTorchError);
      EXPECT_THROWS(future.Wait(kLong), DTorchError);
      const TensorPromise own;
      TensorFuture result = own.GetFuture();
      std::thread([&] { own.SetValue(at::ones({1})); }).join();
      EXPECT(result.Get().item<float>() == 1);
      _exit(0);
    }
    int status = 0;
    EXPECT(waitpid(child, &status, 0) == child);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  stop = true;
  busy.join();
  EXPECT(!future.IsReady());
  promise.SetValue(at::ones({1}));
  EXPECT(future.Get().item<float>() == 1);
}

void ForksOfSeveralThreadsAtOnce() {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int round = 0; round < 50; ++round) {
        const pid_t child = fork();
        if (child == 0) _exit(0);
        int status = 0;
        EXPECT(waitpid(child, &status, 0) == child);
        EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

void AForkedChildFulfils() {
  const TensorPromise promise;
  const VoidPromise done;
  TensorFuture future = promise.GetFuture();
  VoidFuture is_done = done.GetFuture();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    at::Tensor value = promise.Empty({1000});
    value.fill_(2);
    promise.SetValue(value);
    EXPECT_THROWS(promise.SetValue(value), PromiseAlreadySatisfiedError);
    done.SetValue();
    _exit(0);
  }
  EXPECT(future.Get().sum().item<float>() == 2000);
  is_done.Get();
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// ---- Host ---------------------------------------------------------------------------------------

struct Interrupted {};
std::atomic<int> lock_depth{0};

// A host, as the Python module is one: its lock is dropped while a thread blocks, and its interrupt
// check ends a wait of the main thread.
void HostEndsAWait() {
  static std::atomic<bool> interrupt{false};
  SetHost({[] {
             EXPECT(lock_depth == 0);
             if (interrupt) throw Interrupted();
           },
           []() -> void* {
             --lock_depth;
             return &lock_depth;
           },
           [](void*) { ++lock_depth; }});
  lock_depth = 1;
  const FuturePtr future = Pending();
  AllowInterruption();
  std::atomic<bool> stop{false};
  std::thread sender([&, main = pthread_self()] {
    interrupt = true;
    while (!stop) pthread_kill(main, SIGUSR1);
  });
  EXPECT_THROWS(WaitUntil(future, Deadline::AfterMs(kLong)), Interrupted);
  EXPECT(lock_depth == 1);
  EXPECT_THROWS(WaitForAll({future}, Deadline::AfterMs(kLong)), Interrupted);
  EXPECT(lock_depth == 1);
  stop = true;
  sender.join();
  interrupt = false;
  EXPECT(!WaitUntil(future, Deadline::AfterMs(0)));  // lives on
  bool locked = true;
  future->addCallback([&](c10::ivalue::Future&) { locked = lock_depth != 0; });
  CompleteWithValue(future, 1);
  EXPECT(!locked);
  EXPECT(lock_depth == 1);
  SetHost({});
}

// ---- Operators ----------------------------------------------------------------------------------

void OperatorsRefuseWhatTheyMust() {
  EXPECT_THROWS(GetTensorAsync(at::Tensor()), c10::ValueError);
  EXPECT_THROWS(GetTensor(at::Tensor()), c10::ValueError);
  EXPECT_THROWS(GetTensorAsync(at::ones({1}), c10::Device("privateuseone")), c10::ValueError);
  EXPECT_THROWS(Sync(std::vector<c10::Device>{c10::Device("privateuseone:3")}), c10::ValueError);
}

void OperatorsFromManyThreads() {
  const at::Tensor tensor = at::arange(4);
  const auto use = [&] {
    for (int i = 0; i < 2'000; ++i) {
      EXPECT(GetTensorAsync(tensor, std::nullopt, i % 2).Get().sum().item<int64_t>() == 6);
      Sync();
    }
  };
  Race({use, use, use, use});
}

void GradientsAreRecorded() {
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  for (bool copy : {false, true}) {
    const at::Tensor value = GetTensorAsync(leaf * 2, c10::kCPU, copy).Get();
    EXPECT(value.requires_grad());
    value.sum().backward();
  }
  EXPECT(leaf.grad().sum().item<float>() == 8);
}

void TensorsAreFetchedAsOne() {
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  const at::Tensor other = at::zeros({3});
  EXPECT(GetTensorsAsync({leaf, other}).Get()[1].is_same(other));
  const auto copies = GetTensorsAsync({leaf, other, leaf}, std::nullopt, /*copy=*/true).Get();
  EXPECT(copies.size() == 3 && copies[0].is_same(copies[2]) && !copies[0].is_same(leaf));
  copies[0].sum().backward();
  EXPECT(leaf.grad().sum().item<float>() == 2);
  EXPECT(GetTensorsAsync({}).Get().empty());
  try {
    GetTensorsAsync({other, at::Tensor()});
    EXPECT(false);
  } catch (const c10::ValueError& error) {
    EXPECT(std::string(error.what()).find("at self[1]") != std::string::npos);
  }
}

const std::vector<std::pair<const char*, void (*)()>> kTests = {
#define TEST(name) {#name, name}
    TEST(DeadlineOverflow),
    TEST(DeadlineFromUser),
    TEST(FutexTimesOut),
    TEST(FutexSeesAnotherValue),
    TEST(FutexIsWoken),
    TEST(FutexIsInterrupted),
    TEST(SleeperTakesOneWake),
    TEST(SleepersPlayPingPong),
    TEST(SleeperMayDieWhenWoken),
    TEST(SignalsDoNotEndASleep),
    TEST(WaiterIsNotifiedOnce),
    TEST(WaitersAreNotifiedInOrder),
    TEST(WaiterMovesBetweenFutures),
    TEST(WhatIsKeptAliveIsLetGo),
    TEST(AnAddressThatIsUsedAgainIsAnotherFuture),
    TEST(WaitersComeBeforeTheCallbacksOfAPromise),
    TEST(WakersRunOutsideOfTheLock),
    TEST(WaitersRaceWithTheCompletion),
    TEST(ListsOfManyFutures),
    TEST(WaitingHasABound),
    TEST(WaitingRacesWithTheCompletion),
    TEST(AnErrorKeepsItsType),
    TEST(WaitingForAll),
    TEST(QueueTellsInTheOrderOfCompletion),
    TEST(QueueTellsOfOneFutureTwice),
    TEST(QueueRacesWithItsProducers),
    TEST(QueueMayGoBeforeItsFuturesComplete),
    TEST(CollectingAll),
    TEST(CollectingEndsAtTheFirstError),
    TEST(CollectingAny),
    TEST(GroupsRaceWithTheirMembers),
    TEST(AGroupThatIsSettledLetsGoOfItsMembers),
    TEST(PromiseIsFulfilledOnce),
    TEST(PromiseWithoutAValue),
    TEST(PromiseIsCancelled),
    TEST(PromiseIsBrokenByItsLastHandle),
    TEST(ProducersRace),
    TEST(BreakingRacesWithWaiting),
    TEST(CallbacksMayBlockOnEachOther),
    TEST(ManyThreadsWaitForOnePromise),
    TEST(AForkedChild),
    TEST(AForkedChildFulfils),
    TEST(ForksOfSeveralThreadsAtOnce),
    TEST(HostEndsAWait),
    TEST(OperatorsRefuseWhatTheyMust),
    TEST(OperatorsFromManyThreads),
    TEST(GradientsAreRecorded),
    TEST(TensorsAreFetchedAsOne),
#undef TEST
};

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--list") {
    for (const auto& [name, test] : kTests) std::cout << name << "\n";
    return 0;
  }
  int ran = 0;
  for (const auto& [name, test] : kTests) {
    if (argc == 2 && std::string(argv[1]) != name) continue;
    test();
    ++ran;
  }
  std::cout << ran << " passed\n";
  return ran ? 0 : 1;
}
