#include "python/logging.h"

#include "dtorch/base/host.h"
#include "dtorch/base/log.h"

#include <vector>

namespace dtorch::python {

namespace py = pybind11;

void BindLogging(py::module_& m) {
  m.def("queue_log", [](int level) { QueueLog(static_cast<LogLevel>(level)); });
  m.def("open_log", &OpenLog);
  m.def("close_log", &CloseLog);
  m.def("next_log_messages", [] {
    std::vector<LogMessage> messages;
    {
      HostUnlocked unlocked;
      messages = NextLogMessages();
    }
    py::list result;
    for (const LogMessage& each : messages) {
      result.append(py::make_tuple(static_cast<int>(each.level), each.component, each.text,
                                   each.when, each.thread));
    }
    return result;
  });
}

}  // namespace dtorch::python
