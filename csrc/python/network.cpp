#include "python/network.h"

#include "dtorch/base/host.h"
#include "dtorch/network/leave.h"
#include "dtorch/network/peers.h"

#include "python/gil.h"

namespace dtorch::python {

namespace py = pybind11;

bool JoinNetwork() {
  GilAcquire gil;
  if (!gil) return false;
  try {
    return py::module_::import("dtorch_ops.network").attr("_join")().cast<bool>();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("dtorch_ops.network");
  } catch (const std::exception&) {
  }
  return false;  // others ask now and then, instead
}

void BindNetwork(py::module_& m) {
  m.def("leave_network", [] {
    HostUnlocked unlocked;
    network::LeaveNetwork();
  });
  m.def("set_lost_after_ms", &network::SetLostAfterMs);
  m.def("lost_after_ms", &network::GetLostAfterMs);
}

}  // namespace dtorch::python
