#pragma once

#include "dtorch/base/api.h"

namespace dtorch::network {

/// Before torch.distributed.rpc is shut down: promises that others were to fulfil through it fail,
/// and nobody is asked, or answered late, any more. In Python rpc.shutdown() calls it. A C++
/// program calls it when all workers are about to join() their agents. Does nothing where RPC is
/// not initialised. `all_leave`: others do so as well at this time; otherwise it is not waited for.
DTORCH_API void LeaveNetwork(bool all_leave = true);

/// When all workers have done so: ends connections and threads. In Python rpc.shutdown() calls it,
/// a C++ program may, behind join(). Not in a callback of a future.
DTORCH_API void CloseNetwork();

}  // namespace dtorch::network
