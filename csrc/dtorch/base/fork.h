#pragma once

#include "dtorch/base/api.h"

#include <cstdint>
#include <mutex>

namespace dtorch {

/// How many forks lie between the process that loaded the library and this one. State that was
/// made under another generation was inherited: its threads are not here, its locks may be held
/// for ever by one of them.
DTORCH_API uint32_t ForkGeneration();

/// Keeps `mutex` usable in a forked child: it is taken around every fork, so that no thread that
/// the child lacks can be holding it. For the few locks of global tables. `mutex` must live for
/// ever. A fork takes them in no particular order, and with the host's global lock held, if that is
/// its caller's: who holds one waits neither for another nor for that.
DTORCH_API void HoldAcrossFork(std::mutex& mutex);

/// What is called around every fork. Each may be null.
struct ForkHandlers {
  void (*prepare)() = nullptr;  // in the forking thread, before the locks are taken
  void (*parent)() = nullptr;   // once the locks are free again
  void (*child)() = nullptr;    // the same, in the child
};
DTORCH_API void OnFork(ForkHandlers handlers);

}  // namespace dtorch
