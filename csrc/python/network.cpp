#include "python/network.h"

#include "dtorch/base/host.h"
#include "dtorch/network/leave.h"
#include "dtorch/network/peers.h"

namespace dtorch::python {

namespace py = pybind11;

void BindNetwork(py::module_& m) {
  m.def("leave_network", [](bool all_leave) {
    HostUnlocked unlocked;
    network::LeaveNetwork(all_leave);
  });
  m.def("close_network", [] {
    HostUnlocked unlocked;
    network::CloseNetwork();
  });
  m.def("set_lost_after_ms", &network::SetLostAfterMs);
  m.def("lost_after_ms", &network::GetLostAfterMs);
}

}  // namespace dtorch::python
