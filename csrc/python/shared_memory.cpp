#include "python/shared_memory.h"

#include "dtorch/base/host.h"
#include "dtorch/device/sharing.h"
#include "dtorch/file/stats.h"
#include "dtorch/shm/attachment.h"

namespace dtorch::python {

namespace py = pybind11;

void BindSharedMemory(py::module_& m) {
  m.def("stats", [] {
    const file::Stats stats = file::GetStats();
    py::dict result;
    result["outstanding"] = stats.outstanding;
    result["unclaimed"] = stats.unclaimed;
    result["producers"] = stats.producers;
    result["received_bytes"] = stats.received_bytes;
    result["memory_bytes"] = stats.memory_bytes;
    result["consumers"] = stats.consumers;
    result["held"] = stats.held;
    result["live_bytes"] = stats.live_bytes;
    result["cached_bytes"] = stats.cached_bytes;
    result["device_bytes"] = ProvidedBytes();
    return result;
  });
  m.def("trim", [] {
    HostUnlocked unlocked;  // giving back a gigabyte takes a while
    file::Trim();
  });
  m.def("set_cache_limit", &shm::SetCacheLimit);
  m.def("cache_limit", &shm::CacheLimit);
}

}  // namespace dtorch::python
