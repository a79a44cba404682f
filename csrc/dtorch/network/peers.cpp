#include "dtorch/network/peers.h"

#include "dtorch/base/error.h"
#include "dtorch/base/fork.h"
#include "dtorch/future/complete.h"
#include "dtorch/future/wait.h"
#include "dtorch/network/rpc.h"
#include "dtorch/network/timer.h"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <sstream>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace dtorch::network {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kBeatMs = 1000;
constexpr char kHasLeft[] = "has left torch.distributed.rpc";
std::atomic<int64_t> lost_after_ms{30'000};
std::atomic<int64_t> blocked_in_pool{0};  // threads of RPC's

struct Peers {
  std::mutex mutex;
  std::unordered_map<std::string, Clock::time_point> heard;
  uint64_t next_answer = 0;
  std::unordered_map<uint64_t, FuturePtr> answers;  // that are still to be given
};
Peers* all = new Peers;  // leaked on purpose: RPC's threads may outlive everything
Peers& GetPeers() { return *all; }

const bool registered [[maybe_unused]] = [] {
  OnFork({.child = [] {
    all = new Peers;  // a lock may be held by a thread that is not here
    blocked_in_pool = 0;
  }});
  return true;
}();

bool IsOfPool() {
  thread_local const bool is = [] {
    char name[16] = "";
    return pthread_getname_np(pthread_self(), name, sizeof(name)) == 0 &&
           std::string_view(name) == "pt_thread_pool";
  }();
  return is;
}

std::exception_ptr HasLeftError() {
  return std::make_exception_ptr(DTorchError(std::string("it ") + kHasLeft));
}

// The limit, as a text.
std::string Limit() {
  std::ostringstream text;
  text << static_cast<double>(GetLostAfterMs()) / 1000 << " s";
  return text.str();
}

bool WasHeard(const std::string& worker, Clock::time_point since) {
  Peers& peers = GetPeers();
  std::lock_guard<std::mutex> lock(peers.mutex);
  const auto it = peers.heard.find(worker);
  return it != peers.heard.end() && it->second >= since;
}

std::string WhyLost(const std::string& worker, const FuturePtr& failed) {
  if (IsTimeout(failed)) {
    return "worker '" + worker + "' has given no sign for " + Limit() +
           " (dtorch_ops.network.set_lost_after)";
  }
  std::string said = failed->tryRetrieveErrorMessage();
  said = said.substr(0, said.find('\n'));
  return "the connection to worker '" + worker + "' is lost: " + said;
}

struct WatchOf {
  std::string worker;
  bool answers_later;
  std::function<bool()> is_wanted;
  std::function<void(const std::string& why)> on_lost;
};

void Ask(const std::shared_ptr<const WatchOf>& watch);

bool HasLeft(const WatchOf& watch, const FuturePtr& answer) {
  return !watch.answers_later &&
         Reply::FromText(answer->value().toStringRef()).status == Reply::Status::kElsewhere;
}

// What goes wrong here must not end the watch without a word, nor leave RPC's thread.
template <typename Body>
void OrLost(const std::shared_ptr<const WatchOf>& watch, const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    watch->on_lost("worker '" + watch->worker + "' cannot be watched: " + error.what());
  }
}

void OnAnswer(const std::shared_ptr<const WatchOf>& watch, const FuturePtr& answer) {
  if (!watch->is_wanted()) return;
  if (answer->hasError()) {
    // What is large holds up what is behind it, on a slow line.
    const auto since = Clock::now() - std::chrono::milliseconds(GetLostAfterMs());
    if (IsTimeout(answer) &&
        (ValuesOnTheWayTo(watch->worker) > 0 || WasHeard(watch->worker, since))) {
      return Ask(watch);
    }
    watch->on_lost(WhyLost(watch->worker, answer));
  } else if (HasLeft(*watch, answer)) {
    watch->on_lost("worker '" + watch->worker + "' " + kHasLeft);
  } else if (watch->answers_later) {
    Ask(watch);
  } else {
    RunAfter(std::min(kBeatMs, GetLostAfterMs() / 4), [watch] {
      OrLost(watch, [&] {
        if (watch->is_wanted()) Ask(watch);
      });
    });
  }
}

void Ask(const std::shared_ptr<const WatchOf>& watch) {
  const int64_t limit = GetLostAfterMs();
  const FuturePtr answer =
      watch->answers_later
          ? AskLater(watch->worker, limit / 4, limit)
          : Call(watch->worker, {.verb = Verb::kBeat, .sender = SelfName()}, limit);
  answer->addCallback([watch](c10::ivalue::Future& answered) {
    OrLost(watch, [&] { OnAnswer(watch, FuturePtr::reclaim_copy(&answered)); });
  });
}

}  // namespace

MayBlock::MayBlock() : counts_(IsOfPool()) {
  if (!counts_) return;
  constexpr int64_t kFree = 2;
  may_ = ++blocked_in_pool <= std::max<int64_t>(PoolSize() - kFree, 0);
}

MayBlock::~MayBlock() {
  if (counts_) --blocked_in_pool;
}

void SetLostAfterMs(int64_t ms) { lost_after_ms = ms; }
int64_t GetLostAfterMs() { return lost_after_ms; }

void Watch(const std::string& worker, bool answers_later, std::function<bool()> is_wanted,
           std::function<void(const std::string& why)> on_lost) {
  Ask(std::make_shared<const WatchOf>(
      WatchOf{worker, answers_later, std::move(is_wanted), std::move(on_lost)}));
}

void HeardFrom(const std::string& sender) {
  Peers& peers = GetPeers();
  std::lock_guard<std::mutex> lock(peers.mutex);
  peers.heard[sender] = Clock::now();
}

FuturePtr AnswerLater(const std::string& sender, int64_t after_ms) {
  HeardFrom(sender);
  auto answer = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
  Peers& peers = GetPeers();
  uint64_t number = 0;
  {
    std::lock_guard<std::mutex> lock(peers.mutex);
    number = ++peers.next_answer;
    peers.answers.emplace(number, answer);
  }
  const auto take = [&peers, number] {
    std::lock_guard<std::mutex> lock(peers.mutex);
    const auto it = peers.answers.find(number);
    if (it == peers.answers.end()) return FuturePtr();
    FuturePtr due = std::move(it->second);
    peers.answers.erase(it);
    return due;
  };
  // Looked at behind the emplacing: whoever leaves from now on finds it.
  if (SelfName().empty()) {
    if (const FuturePtr due = take()) CompleteWithError(due, HasLeftError());
    return answer;
  }
  // Its questions are signs to this process as well, whose limit may be a shorter one.
  RunAfter(std::clamp<int64_t>(after_ms, 0, GetLostAfterMs() / 4), [take] {
    if (const FuturePtr due = take()) CompleteWithValue(due, c10::IValue());
  });
  return answer;
}

void StopAnswering() {
  Peers& peers = GetPeers();
  std::unordered_map<uint64_t, FuturePtr> due;
  {
    std::lock_guard<std::mutex> lock(peers.mutex);
    due = std::exchange(peers.answers, {});
    peers.heard.clear();
  }
  for (const auto& [number, answer] : due) CompleteWithError(answer, HasLeftError());
}

void WaitFor(const FuturePtr& reply, const std::string& worker) {
  const auto start = Clock::now();
  for (;;) {
    const int64_t limit = GetLostAfterMs();
    if (WaitUntil(reply, Deadline::AfterMs(std::clamp<int64_t>(limit / 4, 1, 1000)))) break;
    const auto since = Clock::now() - std::chrono::milliseconds(limit);
    if (start < since && !WasHeard(worker, since)) {
      throw BrokenPromiseError(
          "worker '" + worker + "', which waits for the promise, has given no sign for " + Limit() +
          " (dtorch_ops.network.set_lost_after): nobody may be left to take the value");
    }
  }
  if (!reply->hasError()) return;
  throw BrokenPromiseError(WhyLost(worker, reply) + "; it waits for the promise");
}

}  // namespace dtorch::network
