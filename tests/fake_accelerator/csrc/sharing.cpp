// libfake_sharing.so: how the fake accelerator gives its memory to other processes. It is a library
// of its own since it is a plugin of dtorch_ops, as libdtorch_ops_cuda.so is; the device itself
// knows nothing of that.
//
// Memory that is shared is a memfd: a handle says the process and the number of the descriptor.

#include "dtorch/device/sharing.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

#define FAKE_API extern "C" __attribute__((visibility("default")))

extern "C" int fake_in_bad_fork();

namespace {

constexpr int kPoison = 0xCD;

struct Mapping {
  size_t bytes;
  int fd;  // -1 of one that was opened
};

struct State {
  std::mutex mutex;
  std::map<void*, Mapping> mappings;
  std::string fails;  // the next call of that name
} state;

std::atomic<int> allocated{0}, freed{0}, opened{0}, closed{0};

void MayFail(const char* call) {
  std::lock_guard<std::mutex> lock(state.mutex);
  if (state.fails != call) return;
  state.fails.clear();
  throw std::runtime_error(std::string("fake accelerator: ") + call + " was told to fail");
}

void* Map(int fd, size_t bytes, int kept_fd) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) throw std::runtime_error(std::strerror(errno));
  std::lock_guard<std::mutex> lock(state.mutex);
  state.mappings[data] = {bytes, kept_fd};
  return data;
}

void Unmap(void* data) {
  std::lock_guard<std::mutex> lock(state.mutex);
  const auto it = state.mappings.find(data);
  if (it == state.mappings.end()) throw std::runtime_error("fake accelerator: no shared memory");
  munmap(data, it->second.bytes);
  if (it->second.fd >= 0) close(it->second.fd);
  state.mappings.erase(it);
}

void* Allocate(c10::Device, uint64_t bytes, std::string& handle) {
  MayFail("allocate");
  if (fake_in_bad_fork()) throw std::runtime_error("fake accelerator: used before the fork");
  const int fd = memfd_create("fake_device", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    throw std::runtime_error(std::strerror(errno));
  }
  void* const data = Map(fd, bytes, fd);
  std::memset(data, kPoison, bytes);
  handle = std::to_string(getpid()) + " " + std::to_string(fd) + " " + std::to_string(bytes) + " " +
           std::to_string(++allocated);
  return data;
}

void Free(c10::Device, void* data) {
  Unmap(data);
  ++freed;
}

void* Open(c10::Device, const std::string& handle) {
  MayFail("open");
  std::istringstream words(handle);
  std::string pid, fd;
  size_t bytes = 0;
  words >> pid >> fd >> bytes;
  const int theirs = open(("/proc/" + pid + "/fd/" + fd).c_str(), O_RDWR | O_CLOEXEC);
  if (theirs < 0) throw std::runtime_error(std::strerror(errno));
  void* const data = Map(theirs, bytes, -1);
  close(theirs);
  ++opened;
  return data;
}

void Close(c10::Device, void* data) {
  Unmap(data);
  ++closed;
}

}  // namespace

FAKE_API void fake_sharing_install() {
  dtorch::SetDeviceSharing(c10::DeviceType::PrivateUse1, {Allocate, Free, Open, Close});
}

FAKE_API void fake_sharing_fail(const char* call) {
  std::lock_guard<std::mutex> lock(state.mutex);
  state.fails = call;
}

// How often each was called: allocate, free, open, close.
FAKE_API void fake_sharing_calls(int* counts) {
  counts[0] = allocated;
  counts[1] = freed;
  counts[2] = opened;
  counts[3] = closed;
}
