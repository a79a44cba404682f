#include "dtorch/network/leave.h"

#include "dtorch/network/peers.h"
#include "dtorch/network/rpc.h"
#include "dtorch/network/stand_ins.h"

#include <algorithm>
#include <cstdint>

namespace dtorch::network {

void LeaveNetwork(bool all_leave) {
  Leave();
  StopServing();
  StopAnswering();
  // Those who leave answer what they were asked; and other threads of this process may have said
  // something, and wait.
  AwaitReplies(/*beats_ms=*/all_leave ? 500 : 0,
               /*others_ms=*/std::min<int64_t>(GetLostAfterMs(), 5000));
}

void CloseNetwork() { Close(); }

}  // namespace dtorch::network
