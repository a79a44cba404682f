#include "dtorch/base/fork.h"

#include <atomic>
#include <pthread.h>
#include <vector>

namespace dtorch {
namespace {

struct ForkState {
  std::atomic<uint32_t> generation{0};
  std::mutex mutex;  // guards `held`
  std::vector<std::mutex*> held;
  std::vector<void (*)()> in_child;
};

ForkState& State() {
  // Leaked on purpose: threads may still use it while static destructors run.
  static ForkState* state = [] {
    auto* s = new ForkState;
    pthread_atfork(
        [] {
          State().mutex.lock();
          for (std::mutex* m : State().held) m->lock();
        },
        [] {
          for (std::mutex* m : State().held) m->unlock();
          State().mutex.unlock();
        },
        [] {
          State().generation.fetch_add(1, std::memory_order_relaxed);
          for (std::mutex* m : State().held) m->unlock();
          State().mutex.unlock();
          for (auto function : State().in_child) function();
        });
    return s;
  }();
  return *state;
}

}  // namespace

uint32_t ForkGeneration() { return State().generation.load(std::memory_order_relaxed); }

void OnForkInChild(void (*function)()) {
  std::lock_guard<std::mutex> lock(State().mutex);
  State().in_child.push_back(function);
}

void HoldAcrossFork(std::mutex& mutex) {
  std::lock_guard<std::mutex> lock(State().mutex);
  State().held.push_back(&mutex);
}

}  // namespace dtorch
