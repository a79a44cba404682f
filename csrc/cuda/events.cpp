// CUDA's own events, for the waiting threads: those that c10 makes for every device spin while a
// thread waits for one, and their use by another thread breaks a graph capture in progress.

#include "dtorch/device/event.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace dtorch {
namespace {

// Events that have been used, by device: making one takes longer than recording it.
class EventPool {
 public:
  cudaEvent_t Take(c10::DeviceIndex device) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto& free = free_[device];
      if (!free.empty()) {
        const cudaEvent_t event = free.back();
        free.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    C10_CUDA_CHECK(
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
    return event;
  }
  void GiveBack(c10::DeviceIndex device, cudaEvent_t event) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_[device].push_back(event);
  }

 private:
  std::mutex mutex_;
  std::map<c10::DeviceIndex, std::vector<cudaEvent_t>> free_;
};

EventPool& Pool() {
  static auto* const pool = new EventPool;  // leaked on purpose: used at exit
  return *pool;
}

class BlockingEvent final : public Event::Impl {
 public:
  explicit BlockingEvent(const c10::Stream& stream) : device_(stream.device_index()) {
    const c10::cuda::CUDAGuard guard(device_);
    event_ = Pool().Take(device_);
    const cudaError_t error = cudaEventRecord(event_, c10::cuda::CUDAStream(stream).stream());
    if (error != cudaSuccess) Pool().GiveBack(device_, event_);
    C10_CUDA_CHECK(error);
  }
  ~BlockingEvent() override { Pool().GiveBack(device_, event_); }

  void Synchronize() const override {
    // Or the runtime would set up device 0 for this thread.
    const c10::cuda::CUDAGuard guard(device_);
    C10_CUDA_CHECK(cudaEventSynchronize(event_));
  }

  void Block(const c10::Stream& stream) const override {
    const c10::cuda::CUDAGuard guard(stream.device_index());
    C10_CUDA_CHECK(cudaStreamWaitEvent(c10::cuda::CUDAStream(stream).stream(), event_, 0));
  }

 private:
  const c10::DeviceIndex device_;
  cudaEvent_t event_ = nullptr;
};

std::unique_ptr<Event::Impl> Record(const c10::Stream& stream) {
  return std::make_unique<BlockingEvent>(stream);
}

// A wait of this thread is none of the business of a capture elsewhere.
void PrepareThread() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  // The error may be an earlier one of the device: the events tell of it.
  if (cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess) (void)cudaGetLastError();
}

bool IsCapturing(const c10::Stream& stream) {
  // The default stream of a device is that of the current one.
  const c10::cuda::CUDAGuard guard(stream.device_index());
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(c10::cuda::CUDAStream(stream).stream(), &status);
  if (error == cudaErrorStreamCaptureImplicit) {
    // The legacy stream, which a stream that captures waits for: what it is given breaks that.
    (void)cudaGetLastError();
    return true;
  }
  C10_CUDA_CHECK(error);
  return status != cudaStreamCaptureStatusNone;
}

const bool registered [[maybe_unused]] = [] {
  SetEventFactory(c10::DeviceType::CUDA, {Record, PrepareThread, IsCapturing});
  return true;
}();

}  // namespace
}  // namespace dtorch
