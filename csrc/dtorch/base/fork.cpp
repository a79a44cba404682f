#include "dtorch/base/fork.h"

#include <atomic>
#include <deque>
#include <pthread.h>
#include <vector>

namespace dtorch {
namespace {

struct ForkState;
ForkState& State();

struct ForkState {
  std::atomic<uint32_t> generation{0};
  std::mutex mutex;  // guards `held`
  std::vector<std::mutex*> held;
  std::deque<ForkHandlers> handlers;  // grows only; a handler may be added while others are called
};

void Call(void (*ForkHandlers::*handler)()) {
  for (size_t i = 0; i < State().handlers.size(); ++i) {
    const ForkHandlers& each = State().handlers[i];
    if (each.*handler) (each.*handler)();
  }
}

// Takes all locks that are held across a fork, and then the list's: with that one first, who
// registers a lock while it holds another would wait for us, and we for it.
void LockAll() {
  size_t locked = 0;
  for (;;) {
    State().mutex.lock();
    if (locked == State().held.size()) return;
    std::mutex* const next = State().held[locked++];
    State().mutex.unlock();
    next->lock();
  }
}

void UnlockAll() {
  for (std::mutex* m : State().held) m->unlock();
  State().mutex.unlock();
}

ForkState& State() {
  // Leaked on purpose: threads may still use it while static destructors run.
  static ForkState* state = [] {
    auto* s = new ForkState;
    pthread_atfork(
        [] {
          Call(&ForkHandlers::prepare);
          LockAll();
        },
        [] {
          UnlockAll();
          Call(&ForkHandlers::parent);
        },
        [] {
          State().generation.fetch_add(1, std::memory_order_relaxed);
          UnlockAll();
          Call(&ForkHandlers::child);
        });
    return s;
  }();
  return *state;
}

}  // namespace

uint32_t ForkGeneration() { return State().generation.load(std::memory_order_relaxed); }

void OnFork(ForkHandlers handlers) {
  std::lock_guard<std::mutex> lock(State().mutex);
  State().handlers.push_back(handlers);
}

void HoldAcrossFork(std::mutex& mutex) {
  std::lock_guard<std::mutex> lock(State().mutex);
  State().held.push_back(&mutex);
}

}  // namespace dtorch
