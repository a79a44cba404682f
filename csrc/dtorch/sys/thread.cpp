#include "dtorch/sys/thread.h"

#include <pthread.h>
#include <signal.h>
#include <thread>
#include <unistd.h>
#include <utility>

namespace dtorch {

void StartThread(std::function<void()> body, const char* name) {
  struct NoSignals {
    NoSignals() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  } no_signals;
  std::thread([body = std::move(body), name] {
    pthread_setname_np(pthread_self(), name);
    body();
  }).detach();
}

void SleepForEver() {
  for (;;) pause();
}

}  // namespace dtorch
