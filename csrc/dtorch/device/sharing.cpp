#include "dtorch/device/sharing.h"

#include "dtorch/base/fork.h"
#include "dtorch/base/log.h"
#include "dtorch/device/async.h"
#include "dtorch/device/device.h"
#include "dtorch/device/leaving.h"
#include "dtorch/device/stream_watch.h"
#include "dtorch/device/streams.h"
#include "dtorch/device/transfer.h"
#include "dtorch/device/work_thread.h"
#include "dtorch/future/complete.h"
#include "dtorch/shm/lane_memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace dtorch {
namespace {

// Below, the way through the host is over before the question is answered.
constexpr int64_t kShareFrom = 64 << 10;
// A consumer that has much to do answers late; one that is stopped, not at all.
constexpr int64_t kAnswerMs = 300;
constexpr int64_t kAnswerOfSilentMs = 5;
constexpr uint64_t kGranule = 2 << 20;  // what drivers map at least

auto& All() {
  static std::array<DeviceSharing, static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)> all{};
  return all;
}

// Null functions where there is none.
const DeviceSharing& SharingOf(c10::DeviceType type) {
  (void)EventFactoryOf(type);  // loads what knows the device
  return All()[static_cast<size_t>(type)];
}

void PrepareThread(c10::DeviceType type) {
  if (auto prepare = EventFactoryOf(type).prepare_thread) prepare();
}

// In a thread of its own: a driver may wait, for all that a device has to do, before it gives
// memory back. In a forked child nothing is given back: it is the parent's.
void LaterUnlessForked(uint32_t generation, std::function<void()> work) {
  if (generation != ForkGeneration()) return;
  try {
    RunInWorkThread(Work::kGiveBack, std::move(work));
  } catch (const std::exception&) {
    // It stays until the process ends.
  }
}

// ---- The consumer -------------------------------------------------------------------------------

std::atomic<uint64_t> provided_bytes{0};

// The blocks that one producer was given, and their handles. They are not given back to the driver
// while it may have them open.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  ~Pool() {
    std::vector<Block> blocks = std::move(blocks_);
    for (const Block& block : blocks) provided_bytes -= block.bytes;
    LaterUnlessForked(generation_, [blocks = std::move(blocks)] {
      for (const Block& block : blocks) {
        PrepareThread(block.device.type());
        SharingOf(block.device.type()).free(block.device, block.data);
      }
    });
  }

  // An empty grant if there is no more memory for this producer.
  DeviceMemoryRequest::Grant Take(c10::Device device, uint64_t bytes) {
    std::unique_lock<std::mutex> lock(mutex_);
    Block* found = nullptr;
    for (Block& block : blocks_) {
      const bool fits = !block.used && block.device == device && block.bytes >= bytes;
      if (fits && (!found || block.bytes < found->bytes)) found = &block;
    }
    if (!found) {
      // One value may be larger than what is kept.
      const uint64_t whole = (bytes + kGranule - 1) / kGranule * kGranule;
      if (whole < bytes || (bytes_ > 0 && bytes_ + whole > shm::CacheLimit())) return {};
      Block made{device, nullptr, whole, {}, false};
      bytes_ += whole;
      lock.unlock();  // it may take long, and who gives back a block waits for nothing
      try {
        made.data = SharingOf(device.type()).allocate(device, whole, made.handle);
      } catch (...) {
        lock.lock();
        bytes_ -= whole;
        throw;
      }
      lock.lock();
      provided_bytes += whole;
      found = &blocks_.emplace_back(std::move(made));
    }
    found->used = true;
    auto block = std::shared_ptr<DeviceBlock>(
        new DeviceBlock{device, found->data, found->bytes},
        [pool = shared_from_this(), data = found->data](DeviceBlock* given) {
          pool->GiveBack(data);
          delete given;
        });
    std::string text(sizeof(found->bytes), '\0');
    std::memcpy(text.data(), &found->bytes, sizeof(found->bytes));
    return {text + found->handle, std::move(block)};
  }

 private:
  struct Block {
    c10::Device device;
    void* data;
    uint64_t bytes;
    std::string handle;
    bool used;
  };

  void GiveBack(void* data) {
    if (generation_ != ForkGeneration()) return;  // the lock may have been held
    std::lock_guard<std::mutex> lock(mutex_);
    for (Block& block : blocks_) {
      if (block.data == data) block.used = false;
    }
  }

  const uint32_t generation_ = ForkGeneration();
  std::mutex mutex_;  // guards what follows
  std::vector<Block> blocks_;
  uint64_t bytes_ = 0;
};

DeviceMemoryRequest::Grant Provide(const DeviceMemoryRequest& request) {
  if (!HasDevice(request.device) || !SharingOf(request.device.type()).allocate) return {};
  PrepareThread(request.device.type());
  const auto pool =
      std::static_pointer_cast<Pool>(request.keepsake([] { return std::make_shared<Pool>(); }));
  return pool->Take(request.device, request.bytes);
}

// ---- The producer -------------------------------------------------------------------------------

// The consumer's blocks that this process has opened, by handle. Kept until the consumer ends.
class OpenBlocks {
 public:
  ~OpenBlocks() {
    LaterUnlessForked(generation_, [opened = std::move(opened_)] {
      for (const auto& [handle, block] : opened) {
        PrepareThread(block.device.type());
        SharingOf(block.device.type()).close(block.device, block.data);
      }
    });
  }

  // The last question was not answered in time: the next one is not waited for.
  std::atomic<bool> is_silent{false};

  void* Open(c10::Device device, const std::string& handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = opened_.find(handle);
    if (it != opened_.end()) return it->second.data;
    void* const data = SharingOf(device.type()).open(device, handle);
    opened_.emplace(handle, Block{device, data});
    return data;
  }

 private:
  struct Block {
    c10::Device device;
    void* data;
  };
  const uint32_t generation_ = ForkGeneration();
  std::mutex mutex_;  // guards what follows
  std::unordered_map<std::string, Block> opened_;
};

// A value on its way: what the completions that see to it hand on.
struct Sending {
  Sending(at::Tensor snapshot, std::unique_ptr<Reservation> promise)
      : value(std::move(snapshot)), reservation(std::move(promise)) {}
  ~Sending() { DropValue(std::move(value)); }
  const Leave leave;  // goes last
  at::Tensor value;   // contiguous
  std::unique_ptr<Reservation> reservation;

  void Fail(std::exception_ptr error) noexcept { SetErrorOf(*reservation, std::move(error)); }
};

// The copy is there.
class CopyCompletion final : public Completion {
 public:
  explicit CopyCompletion(std::unique_ptr<Sending> sending) : sending_(std::move(sending)) {}
  bool RunsCallbacks() const override { return false; }
  void Complete(std::exception_ptr error) noexcept override {
    try {
      if (error) std::rethrow_exception(error);
      sending_->reservation->remote_memory()->SetValueThere(sending_->value);
    } catch (...) {
      sending_->Fail(std::current_exception());
    }
  }

 private:
  const std::unique_ptr<Sending> sending_;
};

// The snapshot is there.
class SnapshotCompletion final : public Completion {
 public:
  SnapshotCompletion(std::unique_ptr<Sending> sending, const c10::Stream& stream, const char* op)
      : sending_(std::move(sending)), stream_(stream), op_(op) {}
  bool RunsCallbacks() const override { return false; }

  void Complete(std::exception_ptr error) noexcept override {
    try {
      if (error) std::rethrow_exception(error);
      if (!CopyThere()) {
        Log(LogLevel::kInfo, "device", "no memory of the device to share: through the host");
        ThroughHost();
      }
    } catch (...) {
      if (sending_) sending_->Fail(std::current_exception());
    }
  }

 private:
  // False if the consumer has no memory for it, or it cannot be reached: nothing has happened.
  bool CopyThere() {
    RemoteMemory& remote = *sending_->reservation->remote_memory();
    auto open = std::static_pointer_cast<OpenBlocks>(
        remote.Keepsake([] { return std::make_shared<OpenBlocks>(); }));
    const Deadline limit = Deadline::AfterMs(open->is_silent ? kAnswerOfSilentMs : kAnswerMs);
    PrepareToBlock();  // other values of the stream do not wait for this one's consumer
    const std::string text = remote.WaitForAnswer(limit);
    open->is_silent = text.empty() && limit.HasPassed();
    uint64_t bytes = 0;
    if (text.size() < sizeof(bytes)) return false;
    std::memcpy(&bytes, text.data(), sizeof(bytes));
    if (bytes < sending_->value.nbytes()) return false;
    const std::string handle = text.substr(sizeof(bytes));
    const c10::Device device = sending_->value.device();
    std::optional<Event> copied;
    std::optional<c10::Stream> side;
    try {
      side = SideStream(stream_, device);
      void* const there = open->Open(device, handle);
      const c10::StreamGuard guard(*side);
      at::for_blob(there, sending_->value.sizes())
          .target_device(device)
          .options(sending_->value.options())
          .make_tensor()
          .copy_(sending_->value, /*non_blocking=*/true);
      copied.emplace(*side);
    } catch (const std::exception&) {
      // The copy may be under way, into memory that would be another value's next.
      if (side) side->synchronize();
      return false;
    }
    std::vector<Event> reached;
    reached.push_back(*std::move(copied));
    WhenReached(*side, std::move(reached), std::make_unique<CopyCompletion>(std::move(sending_)));
    return true;
  }

  void ThroughHost() {
    const c10::StreamGuard guard(SideStream(stream_, sending_->value.device()));
    Transfer transfer = FetchTo(sending_->value, c10::kCPU, op_);
    transfer.keep.push_back(sending_->value);  // its memory is another stream's
    Start(std::move(transfer), std::move(sending_->reservation), Destination::kOtherProcess);
  }

  std::unique_ptr<Sending> sending_;
  const c10::Stream stream_;
  const char* const op_;
};

}  // namespace

void SetDeviceSharing(c10::DeviceType type, DeviceSharing sharing) {
  All()[static_cast<size_t>(type)] = sharing;
}

bool CanShare(const at::Tensor& value) {
  return value.layout() == c10::kStrided && !value.is_nested() && !value.is_quantized() &&
         value.dim() <= static_cast<int64_t>(shm::kInlineDims) &&
         value.numel() * static_cast<int64_t>(value.element_size()) >= kShareFrom &&
         SharingOf(value.device().type()).open != nullptr;
}

void StartSharing(const at::Tensor& value, std::unique_ptr<Reservation>& reservation,
                  const char* op) {
  const c10::Stream stream = CurrentStream(value.device(), op);
  at::Tensor snapshot =
      value.clone(at::MemoryFormat::Contiguous).resolve_conj().resolve_neg().contiguous();
  std::vector<Event> reached;
  reached.emplace_back(stream);
  auto sending = std::make_unique<Sending>(std::move(snapshot), std::move(reservation));
  sending->reservation->remote_memory()->Ask(sending->value.device(), sending->value.nbytes());
  WhenReached(stream, std::move(reached),
              std::make_unique<SnapshotCompletion>(std::move(sending), stream, op));
}

void ProvideMemory(DeviceMemoryRequest request) {
  auto shared = std::make_shared<DeviceMemoryRequest>(std::move(request));
  try {
    RunInWorkThread(Work::kProvide, [shared] {
      DeviceMemoryRequest::Grant grant;
      try {
        grant = Provide(*shared);
      } catch (const std::exception&) {
        // The device refuses: through the host, then.
      }
      shared->answer(std::move(grant));
    });
  } catch (const std::exception&) {
    shared->answer({});
  }
}

uint64_t ProvidedBytes() { return provided_bytes.load(); }

}  // namespace dtorch
