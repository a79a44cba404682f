#include "dtorch/network/peers.h"

#include "dtorch/base/error.h"
#include "dtorch/base/fork.h"
#include "dtorch/future/complete.h"
#include "dtorch/future/wait.h"
#include "dtorch/network/rpc.h"
#include "dtorch/network/timer.h"
#include "dtorch/promise/token.h"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <utility>

namespace dtorch::network {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<int64_t> lost_after_ms{30'000};

struct Peers {
  std::mutex mutex;
  std::unordered_map<std::string, Clock::time_point> heard;
  size_t many = 16;                                   // of them
  std::unordered_map<std::string, uint64_t> watched;  // and which watch it is
  uint64_t next_watch = 0;
  uint64_t next_answer = 0;
  std::unordered_map<uint64_t, FuturePtr> answers;  // that are still to be given
};
Peers* all = new Peers;  // leaked on purpose: RPC's threads may outlive everything
Peers& GetPeers() { return *all; }

void (*on_lost)(const std::string& peer, const std::string& why) = nullptr;

const bool registered [[maybe_unused]] = [] {
  OnFork({.child = [] {
    all = new Peers;  // a lock may be held by a thread that is not here
  }});
  return true;
}();

// The reply of one that leaves.
std::string HasLeft() {
  return Reply{Reply::Status::kElsewhere, "has left torch.distributed.rpc"}.ToText();
}

// The limit, as a text.
std::string Limit() {
  std::ostringstream text;
  text << static_cast<double>(GetLostAfterMs()) / 1000 << " s";
  return text.str();
}

// How long it may still be silent before it counts as lost, in milliseconds: since it was last
// heard, or `since`.
int64_t MayBeSilent(const std::string& peer, Clock::time_point since = {}) {
  Peers& peers = GetPeers();
  {
    std::lock_guard<std::mutex> lock(peers.mutex);
    const auto it = peers.heard.find(peer);
    if (it != peers.heard.end()) since = std::max(since, it->second);
  }
  using std::chrono::milliseconds;
  const auto silent = std::chrono::duration_cast<milliseconds>(Clock::now() - since);
  return GetLostAfterMs() - silent.count();
}

std::string WhyLost(const std::string& peer, const FuturePtr& failed) {
  if (IsTimeout(failed)) {
    return Called(peer) + " has given no sign for " + Limit() +
           " (dtorch_ops.network.set_lost_after)";
  }
  std::string said = failed->tryRetrieveErrorMessage();
  said = said.substr(0, said.find('\n'));
  return "the connection to " + Called(peer) + " is lost: " + said;
}

// One watch of a peer. When it is over, because the peer is lost or this process has left, whoever
// has to do with the peer from then on begins another one, which what still comes of this one is
// nothing to.
struct Watching {
  std::string peer;
  uint64_t number = 0;

  bool IsOver() const {
    Peers& peers = GetPeers();
    std::lock_guard<std::mutex> lock(peers.mutex);
    const auto it = peers.watched.find(peer);
    return it == peers.watched.end() || it->second != number;
  }
  // False if it was over before.
  bool End() const {
    Peers& peers = GetPeers();
    std::lock_guard<std::mutex> lock(peers.mutex);
    const auto it = peers.watched.find(peer);
    if (it == peers.watched.end() || it->second != number) return false;
    peers.watched.erase(it);
    return true;
  }
};

void Lose(const Watching& watch, const std::string& why) {
  if (!watch.End()) return;
  on_lost(watch.peer, why);
  Forget(watch.peer);
}

// What goes wrong here must not end the watch without a word, nor leave the agent's thread.
template <typename Body>
void OrLost(const Watching& watch, const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    Lose(watch, Called(watch.peer) + " cannot be watched: " + error.what());
  }
}

void Ask(const Watching& watch, int64_t limit);

void OnAnswer(const Watching& watch, const FuturePtr& answer) {
  const std::string& peer = watch.peer;
  if (watch.IsOver()) return;
  if (answer->hasError()) {
    // What it asks itself, or says, is a sign as well.
    const int64_t left = IsTimeout(answer) ? MayBeSilent(peer) : 0;
    return left > 0 ? Ask(watch, left) : Lose(watch, WhyLost(peer, answer));
  }
  HeardFrom(peer);
  const Reply reply = Reply::FromText(answer->value().toStringRef());
  if (reply.status != Reply::Status::kDone) {
    return Lose(watch, Called(peer) + " " + reply.text);
  }
  Ask(watch, GetLostAfterMs());
}

void Ask(const Watching& watch, int64_t limit) {
  Request beat{.verb = Verb::kBeat, .sender = Present(), .number = limit / 4};
  if (beat.sender.empty()) return;  // this process has left
  Call(watch.peer, std::move(beat), limit)->addCallback([watch](c10::ivalue::Future& answered) {
    OrLost(watch, [&] { OnAnswer(watch, FuturePtr::reclaim_copy(&answered)); });
  });
}

// The agents end then (rpc.cpp), and wait for what they owe.
void StopAtExit() {
  static const bool once [[maybe_unused]] = [] {
    std::atexit([] {
      if (LeaveAtExit()) StopAnswering();
    });
    return true;
  }();
}

}  // namespace

void SetLostAfterMs(int64_t ms) { lost_after_ms = ms; }
int64_t GetLostAfterMs() { return lost_after_ms; }

void SetOnLost(void (*value)(const std::string& peer, const std::string& why)) { on_lost = value; }

void Watch(const std::string& peer) {
  StopAtExit();
  Peers& peers = GetPeers();
  Watching watch{peer};
  {
    std::lock_guard<std::mutex> lock(peers.mutex);
    const auto [it, begins] = peers.watched.emplace(peer, peers.next_watch + 1);
    if (!begins) return;
    watch.number = ++peers.next_watch;
  }
  HeardFrom(peer);  // which has just held something, or answered
  OrLost(watch, [&] { Ask(watch, GetLostAfterMs()); });
}

void HeardFrom(const std::string& sender) {
  Peers& peers = GetPeers();
  const auto now = Clock::now();
  std::lock_guard<std::mutex> lock(peers.mutex);
  peers.heard[sender] = now;
  if (peers.heard.size() <= peers.many) return;
  // What nobody asks about any more.
  const auto since = now - std::chrono::milliseconds(GetLostAfterMs());
  std::erase_if(peers.heard, [&](const auto& each) { return each.second < since; });
  peers.many = 2 * peers.heard.size() + 16;
}

FuturePtr AnswerLater(int64_t after_ms) {
  StopAtExit();
  auto answer = c10::make_intrusive<c10::ivalue::Future>(c10::StringType::get());
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
  if (Present().empty()) {
    if (const FuturePtr due = take()) CompleteWithValue(due, HasLeft());
    return answer;
  }
  // Its questions are signs to this process as well, whose limit may be a shorter one.
  RunAfter(std::clamp<int64_t>(after_ms, 0, GetLostAfterMs() / 4), [take] {
    if (const FuturePtr due = take()) CompleteWithValue(due, Reply().ToText());
  });
  return answer;
}

void StopAnswering() {
  Peers& peers = GetPeers();
  std::unordered_map<uint64_t, FuturePtr> due;
  {
    std::lock_guard<std::mutex> lock(peers.mutex);
    due = std::exchange(peers.answers, {});
    peers.watched.clear();
  }
  for (const auto& [number, answer] : due) CompleteWithValue(answer, HasLeft());
}

void WaitFor(const FuturePtr& reply, const std::string& peer) {
  const auto start = Clock::now();
  for (;;) {
    const int64_t left = MayBeSilent(peer, start);
    if (WaitUntil(reply, Deadline::AfterMs(std::clamp<int64_t>(left, 0, 1000)))) break;
    if (MayBeSilent(peer, start) <= 0) {
      throw BrokenPromiseError(
          Called(peer) + ", which waits for the promise, has given no sign for " + Limit() +
          " (dtorch_ops.network.set_lost_after): nobody may be left to take the value");
    }
  }
  if (!reply->hasError()) return;
  throw BrokenPromiseError(WhyLost(peer, reply) + "; it waits for the promise");
}

}  // namespace dtorch::network
