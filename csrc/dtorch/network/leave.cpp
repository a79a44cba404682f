#include "dtorch/network/leave.h"

#include "dtorch/network/peers.h"
#include "dtorch/network/rpc.h"
#include "dtorch/network/stand_ins.h"

namespace dtorch::network {

void LeaveNetwork() {
  Leave();
  StopServing();
  StopAnswering();
}

}  // namespace dtorch::network
