#include "dtorch/shm/mailbox.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace dtorch::shm {
namespace {

constexpr uint64_t kBellEvent = ~uint64_t{0};
constexpr uint64_t kStopEvent = ~uint64_t{1};

[[noreturn]] void ThrowErrno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

Fd MakeMemory() {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < kTotalBytes) {
    errno = EFBIG;  // growing the file would raise SIGXFSZ, which ends most programs
    ThrowErrno("dtorch_ops: shared memory for promises (the file size limit, ulimit -f, is set)");
  }
  Fd fd(memfd_create("dtorch_ops", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) ThrowErrno("dtorch_ops: memfd_create");
  if (ftruncate(fd.get(), static_cast<off_t>(kTotalBytes)) != 0) {
    ThrowErrno("dtorch_ops: growing the shared memory for promises (sparse, 8 TiB)");
  }
  // A peer that could shrink it would end us with SIGBUS.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    ThrowErrno("dtorch_ops: sealing the shared memory for promises");
  }
  return fd;
}

}  // namespace

// One producer process, as the consumer sees it. Kept by the blocks of it that tensors use.
class ConsumerLane {
 public:
  ConsumerLane(int memory_fd, Meta meta, uint32_t index, ProcessId producer)
      : memory_fd_(memory_fd), meta_(meta), index_(index), producer_(producer) {}

  ~ConsumerLane() {
    // Dead, and nothing of it in use: the memory goes back to the system, the lane to the next.
    if (!retired_) return;
    fallocate(memory_fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(kDataAt + index_ * kLaneBytes), static_cast<off_t>(kLaneBytes));
    fallocate(memory_fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(kHoldsAt + index_ * kHoldsBytes), static_cast<off_t>(kHoldsBytes));
    meta_.lane(index_).returned.store(0);
    meta_.lane(index_).owner.store(kFreeLane);
  }

  // A block that a description names; nullptr if it is not inside of the lane.
  std::byte* Block(uint64_t offset, uint64_t bytes) {
    if (offset % alignof(BlockHeader) != 0 || offset < sizeof(BlockHeader) ||
        offset >= kLaneBytes || bytes > kLaneBytes - offset) {
      return nullptr;
    }
    if (!mapping_) mapping_ = Mapping(memory_fd_, kDataAt + index_ * kLaneBytes, kLaneBytes);
    return mapping_ ? mapping_.data() + offset : nullptr;
  }

  void GiveBack(uint64_t offset) {
    auto* header = reinterpret_cast<BlockHeader*>(mapping_.data() + offset) - 1;
    auto& returned = meta_.lane(index_).returned;
    uint64_t top = returned.load();
    do {
      header->next = top;
    } while (!returned.compare_exchange_weak(top, offset));
  }

  void Retire() {
    retired_ = true;
    meta_.lane(index_).owner.store(kRetiredLane);
  }
  ProcessId producer() const { return producer_; }
  Fd watch;

 private:
  const int memory_fd_;
  const Meta meta_;
  const uint32_t index_;
  const ProcessId producer_;
  Mapping mapping_;
  bool retired_ = false;
};

Mailbox::Mailbox() : memory_(MakeMemory()) {
  mapping_ = Mapping(memory_.get(), 0, kMetaBytes);
  if (!mapping_) ThrowErrno("dtorch_ops: mapping the shared memory for promises (ulimit -v?)");
  meta_ = Meta(mapping_.data());

  int bell[2];
  if (pipe2(bell, O_CLOEXEC | O_NONBLOCK) != 0) ThrowErrno("dtorch_ops: pipe");
  bell_read_ = Fd(bell[0]);
  bell_write_ = Fd(bell[1]);
  stop_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  if (!stop_ || !epoll_) ThrowErrno("dtorch_ops: epoll");
  // Edge-triggered: of several threads that sleep, one is woken by one ring.
  epoll_event bell_event{EPOLLIN | EPOLLET, {.u64 = kBellEvent}};
  epoll_event stop_event{EPOLLIN, {.u64 = kStopEvent}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, bell_read_.get(), &bell_event);
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, stop_.get(), &stop_event);

  address_.owner = ThisProcess();
  address_.pid_namespace = PidNamespace();
  address_.memory_fd = memory_.get();
  address_.bell_fd = bell_write_.get();
  if (getrandom(address_.nonce.data(), address_.nonce.size(), 0) !=
      static_cast<ssize_t>(address_.nonce.size())) {
    ThrowErrno("dtorch_ops: getrandom");
  }

  Header& header = meta_.header();
  header.version = kVersion;
  header.slots = kSlots;
  header.lanes = kLanes;
  header.lane_bytes = kLaneBytes;
  std::memcpy(header.nonce, address_.nonce.data(), sizeof(header.nonce));
  header.magic = kMagic;
  lanes_.resize(kLanes);
}

Mailbox::~Mailbox() = default;

Mailbox::Place Mailbox::Allocate() {
  std::lock_guard<std::mutex> lock(mutex_);
  uint32_t index;
  if (!free_.empty()) {
    index = free_.back();  // the one freed last is warm
    free_.pop_back();
  } else if (locals_.size() < kSlots) {
    index = static_cast<uint32_t>(locals_.size());
    locals_.emplace_back();
  } else {
    throw std::runtime_error("expected at most " + std::to_string(kSlots) +
                             " promises outstanding in other processes, all are taken: wait for "
                             "some of their futures first");
  }
  Local& local = locals_[index];
  if (++local.generation == 0) ++local.generation;
  local.outstanding = true;
  Slot& slot = meta_.slot(index);
  slot.held.store(0);
  slot.handed_over.store(0);
  slot.word.store(SlotWord{State::kPending, 0, local.generation}.Pack());
  return {index, local.generation};
}

void Mailbox::Free(Place place) {
  locals_[place.slot].outstanding = false;
  free_.push_back(place.slot);
}

bool Mailbox::Retract(Place place) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (locals_[place.slot].generation != place.generation || !locals_[place.slot].outstanding) {
    return false;
  }
  uint64_t expected = SlotWord{State::kPending, 0, place.generation}.Pack();
  const uint64_t free = SlotWord{State::kFree, 0, place.generation}.Pack();
  if (!meta_.slot(place.slot).word.compare_exchange_strong(expected, free)) return false;
  Free(place);
  return true;
}

uint32_t Mailbox::LanesUsed() const { return std::min(meta_.header().lanes_used.load(), kLanes); }

bool Mailbox::IsHeld(Place place) const {
  for (uint32_t lane = 0; lane < LanesUsed(); ++lane) {
    const uint64_t owner = meta_.lane(lane).owner.load();
    if (owner == kFreeLane || owner == kRetiredLane) continue;
    if (meta_.hold(lane, place.slot).load() == place.generation) return true;
  }
  return false;
}

void Mailbox::BreakUnlessHeld(Place place, SlotWord from, std::vector<Event>& events) {
  Slot& slot = meta_.slot(place.slot);
  uint64_t expected = from.Pack();
  if (IsHeld(place) || slot.handed_over.load() == place.generation) {
    // A claim that was never finished goes to whoever comes next.
    const uint64_t pending = SlotWord{State::kPending, 0, place.generation}.Pack();
    if (from.state == State::kClaimed) slot.word.compare_exchange_strong(expected, pending);
    return;
  }
  const uint64_t free = SlotWord{State::kFree, 0, place.generation}.Pack();
  if (!slot.word.compare_exchange_strong(expected, free)) return;
  Free(place);
  events.push_back({place, /*broken=*/true, {}});
}

void Mailbox::Take(Place place, uint32_t lane_index, std::vector<Event>& events) {
  Slot& slot = meta_.slot(place.slot);
  // Copied out once; from here on the producer's writes change nothing.
  Description description;
  std::memcpy(&description, &slot.description, sizeof(description));
  slot.word.store(SlotWord{State::kFree, 0, place.generation}.Pack());
  Free(place);

  Received received;
  received.payload = description.payload;
  received.dtype = description.dtype;
  received.bytes = description.bytes;
  // Its process may have claimed it since we have looked.
  const auto lane = lane_index < kLanes && Watch(lane_index) ? lanes_[lane_index] : nullptr;
  std::byte* block = nullptr;
  const size_t shape_bytes =
      description.dims > kInlineDims ? description.dims * sizeof(int64_t) : 0;
  if (!lane) {
    received.defect = "it names a lane that nobody has claimed";
  } else if (description.dims > kMaxDims) {
    received.defect = "it has " + std::to_string(description.dims) + " dimensions";
  } else if (!description.in_block && (shape_bytes || description.bytes > kInlineBytes)) {
    received.defect = "it does not fit into the slot that it claims to lie in";
  } else if (description.in_block &&
             (description.bytes > kLaneBytes ||
              !(block = lane->Block(description.block,
                                    ShapeOffset(description.bytes) + shape_bytes)))) {
    received.defect = "its block lies outside of the producer's lane";
  }
  if (received.defect.empty()) {
    const std::byte* shape = shape_bytes ? block + ShapeOffset(description.bytes)
                                         : reinterpret_cast<const std::byte*>(description.sizes);
    received.sizes.resize(description.dims);
    std::memcpy(received.sizes.data(), shape, description.dims * sizeof(int64_t));
    if (description.in_block) {
      received.data = block;
      received.keep = std::shared_ptr<void>(
          block, [lane, offset = description.block](void*) { lane->GiveBack(offset); });
    } else {
      auto* copy = new (std::align_val_t{64}) std::byte[kInlineBytes];
      std::memcpy(copy, description.value, kInlineBytes);
      received.data = copy;
      received.keep =
          std::shared_ptr<void>(copy, [](void* p) { operator delete[](p, std::align_val_t{64}); });
    }
  }
  events.push_back({place, /*broken=*/false, std::move(received)});
}

void Mailbox::Look(uint32_t index, std::vector<Event>& events) {
  if (index >= locals_.size() || !locals_[index].outstanding) return;
  const Place place{index, locals_[index].generation};
  const SlotWord word = SlotWord::Unpack(meta_.slot(index).word.load());
  if (word.generation != place.generation) return;
  if (word.state == State::kReady) {
    Take(place, word.lane, events);
  } else if (word.state == State::kPending && meta_.slot(index).held.load() == place.generation) {
    BreakUnlessHeld(place, word, events);
  }
}

bool Mailbox::Watch(uint32_t index) {
  if (lanes_[index]) return true;
  const uint64_t word = meta_.lane(index).owner.load();
  if (word == kFreeLane || word == kRetiredLane) return false;
  const auto producer = ProcessId::FromWord(word);
  lanes_[index] = std::make_shared<ConsumerLane>(memory_.get(), meta_, index, producer);
  lanes_[index]->watch = WatchProcess(producer);
  if (lanes_[index]->watch) {
    epoll_event event{EPOLLIN | EPOLLONESHOT, {.u64 = index}};
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, lanes_[index]->watch.get(), &event);
  } else {
    ended_.push_back(index);  // it has ended already
  }
  return true;
}

void Mailbox::WatchNewLanes() {
  if (meta_.header().new_lane.exchange(0) == 0) return;
  for (uint32_t index = 0; index < LanesUsed(); ++index) Watch(index);
}

void Mailbox::OnDeath(uint32_t lane, std::vector<Event>& events) {
  for (uint32_t index = 0; index < locals_.size(); ++index) {
    if (!locals_[index].outstanding) continue;
    const Place place{index, locals_[index].generation};
    auto& hold = meta_.hold(lane, index);
    const bool held = hold.load() == place.generation;
    if (held) hold.store(0);
    const SlotWord word = SlotWord::Unpack(meta_.slot(index).word.load());
    if (word.generation != place.generation) continue;
    if (word.state == State::kReady && word.lane == lane) {
      Take(place, lane, events);  // published, but the producer did not get round to ringing
    } else if ((word.state == State::kClaimed && word.lane == lane) ||
               (word.state == State::kPending && held)) {
      BreakUnlessHeld(place, word, events);
    }
  }
  lanes_[lane]->watch.Reset();
  lanes_[lane]->Retire();
  lanes_[lane] = nullptr;  // its blocks may keep it for a while
}

std::vector<Mailbox::Event> Mailbox::Collect() {
  std::vector<Event> events;
  std::lock_guard<std::mutex> lock(mutex_);
  WatchNewLanes();
  const auto* summary = meta_.summary();
  for (uint32_t i = 0; i < kSlots / 64 / 64; ++i) {
    if (summary[i].load(std::memory_order_relaxed) == 0) continue;
    uint64_t words = meta_.summary()[i].exchange(0);
    for (; words; words &= words - 1) {
      const uint32_t word = i * 64 + static_cast<uint32_t>(std::countr_zero(words));
      uint64_t bits = meta_.ready()[word].exchange(0);
      for (; bits; bits &= bits - 1) {
        Look(word * 64 + static_cast<uint32_t>(std::countr_zero(bits)), events);
      }
    }
  }
  for (const uint32_t lane : std::exchange(ended_, {})) {
    // Asked again: the lane may be another process's by now.
    if (!lanes_[lane]) continue;
    pollfd ended{lanes_[lane]->watch.get(), POLLIN, 0};
    if (!lanes_[lane]->watch || poll(&ended, 1, 0) == 1) OnDeath(lane, events);
  }
  // Armed before the last look at the bits: whoever sets one after that look rings.
  meta_.header().armed.store(1);
  return events;
}

bool Mailbox::Sleep(int timeout_ms) {
  meta_.header().armed.store(1);
  for (uint32_t i = 0; i < kSlots / 64 / 64; ++i) {
    if (meta_.summary()[i].load() != 0) return true;
  }
  if (meta_.header().new_lane.load() != 0) return true;
  epoll_event event{};
  const int events = epoll_wait(epoll_.get(), &event, 1, timeout_ms);
  if (events != 1) return events != 0;
  if (event.data.u64 == kBellEvent) {
    char rings[64];
    while (read(bell_read_.get(), rings, sizeof(rings)) > 0) continue;
  } else if (event.data.u64 < kLanes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_.push_back(static_cast<uint32_t>(event.data.u64));
  }
  return true;
}

void Mailbox::CloseInChild() {
  for (Fd* fd : {&memory_, &bell_read_, &bell_write_, &stop_, &epoll_}) fd->Reset();
  for (const auto& lane : lanes_) {
    if (lane) lane->watch.Reset();
  }
}

void Mailbox::Stop() {
  const uint64_t one = 1;
  (void)!write(stop_.get(), &one, sizeof(one));
}

Mailbox::Stats Mailbox::GetStats() {
  std::lock_guard<std::mutex> lock(mutex_);
  Stats stats{};
  for (uint32_t index = 0; index < locals_.size(); ++index) {
    if (!locals_[index].outstanding) continue;
    ++stats.outstanding;
    if (meta_.slot(index).held.load() != locals_[index].generation) ++stats.unclaimed;
  }
  for (const auto& lane : lanes_) stats.producers += lane != nullptr;
  return stats;
}

}  // namespace dtorch::shm
