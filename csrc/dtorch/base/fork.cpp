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

ForkState& State() {
  // Leaked on purpose: threads may still use it while static destructors run.
  static ForkState* state = [] {
    auto* s = new ForkState;
    pthread_atfork(
        [] {
          Call(&ForkHandlers::prepare);
          State().mutex.lock();
          for (std::mutex* m : State().held) m->lock();
        },
        [] {
          for (std::mutex* m : State().held) m->unlock();
          State().mutex.unlock();
          Call(&ForkHandlers::parent);
        },
        [] {
          State().generation.fetch_add(1, std::memory_order_relaxed);
          for (std::mutex* m : State().held) m->unlock();
          State().mutex.unlock();
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
