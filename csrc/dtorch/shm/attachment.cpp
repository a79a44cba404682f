#include "dtorch/shm/attachment.h"

#include "dtorch/base/fork.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <stdexcept>
#include <sys/stat.h>
#include <unistd.h>

namespace dtorch::shm {
namespace {

// Freed blocks keep their pages, since touching fresh ones costs over twenty times the copy; up to
// so many bytes in each lane.
constexpr uint64_t kCacheLimit = uint64_t{1} << 30;

constexpr uint64_t Key(uint32_t slot, uint32_t generation) {
  return uint64_t{generation} << 32 | slot;
}

// Four sizes for each doubling: little is wasted, and blocks of about one size are used again.
uint64_t SizeClass(uint64_t bytes) {
  if (bytes <= 256) return 256;
  const int shift = std::bit_width(bytes - 1) - 3;
  const uint64_t step = std::max<uint64_t>(uint64_t{1} << shift, alignof(BlockHeader));
  return (bytes + step - 1) / step * step;
}

std::runtime_error Unreachable(const std::string& reason) {
  return std::runtime_error("the shared memory of the process that waits cannot be reached: " +
                            reason);
}

Fd OpenDescriptor(const Address& address, int number, int flags) {
  const std::string path =
      "/proc/" + std::to_string(address.owner.pid) + "/fd/" + std::to_string(number);
  Fd fd(open(path.c_str(), flags | O_CLOEXEC));
  if (!fd) {
    throw Unreachable(path + ": " + std::strerror(errno) +
                      (errno == EACCES || errno == EPERM
                           ? " (another user's process, one with more capabilities, or one that is "
                             "not dumpable)"
                           : ""));
  }
  return fd;
}

}  // namespace

// ---- LaneMemory ---------------------------------------------------------------------------------

uint64_t LaneMemory::Allocate(uint64_t bytes) {
  const uint64_t size = SizeClass(bytes);
  TakeBackReturned();
  auto& free = free_[size];
  uint64_t offset = 0;
  if (!free.empty()) {
    offset = free.back();
    free.pop_back();
    cached_ -= std::min(cached_, size);
  } else if (size <= kLaneBytes - sizeof(BlockHeader) - top_) {
    offset = top_ + sizeof(BlockHeader);
    top_ = offset + size;
  } else {
    return 0;
  }
  live_.emplace(offset, size);
  auto* header = reinterpret_cast<BlockHeader*>(base_ + offset) - 1;
  header->bytes = size;
  return offset;
}

void LaneMemory::Free(uint64_t offset) {
  const auto it = live_.find(offset);
  if (it == live_.end()) return;  // nothing that was handed out: the consumer's word is not trusted
  const uint64_t size = it->second;
  live_.erase(it);
  if (cached_ + size > kCacheLimit) {
    const uint64_t from = (offset + kPage - 1) / kPage * kPage;
    const uint64_t to = (offset + size) / kPage * kPage;
    if (from < to) {
      fallocate(memory_fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                static_cast<off_t>(file_offset_ + from), static_cast<off_t>(to - from));
    }
    free_[size].insert(free_[size].begin(), offset);  // cold: used last
    return;
  }
  cached_ += size;
  free_[size].push_back(offset);
}

void LaneMemory::TakeBackReturned() {
  if (lane_->returned.load(std::memory_order_relaxed) == 0) return;
  uint64_t offset = lane_->returned.exchange(0);
  // A link that leads nowhere, or in a circle, names a block that is not live any more.
  while (offset != 0 && live_.count(offset)) {
    const uint64_t next = (reinterpret_cast<BlockHeader*>(base_ + offset) - 1)->next;
    Free(offset);
    offset = next;
  }
}

// ---- Attachment ---------------------------------------------------------------------------------

std::shared_ptr<Attachment> Attachment::To(const Address& address) {
  struct Table {
    std::mutex mutex;
    uint32_t generation = ForkGeneration();
    // Kept while the other process lives: its lane stays ours, and its memory warm.
    std::vector<std::shared_ptr<Attachment>> attachments;
  };
  static auto* table = [] {
    auto* made = new Table;
    HoldAcrossFork(made->mutex);
    return made;
  }();
  std::lock_guard<std::mutex> lock(table->mutex);
  auto& known = table->attachments;
  if (table->generation != ForkGeneration()) {
    // A lane belongs to one process: the parent's are left to it, mappings and all.
    new std::vector<std::shared_ptr<Attachment>>(std::move(known));
    known = {};
    table->generation = ForkGeneration();
  }
  for (const auto& each : known) {
    if (each->address() == address) return each;
  }
  std::erase_if(known, [](const auto& each) { return !each->OwnerLives(); });
  auto attachment = std::make_shared<Attachment>(address);
  known.push_back(attachment);
  return attachment;
}

Attachment::Attachment(const Address& address) : address_(address) {
  if (address.pid_namespace != PidNamespace()) {
    throw Unreachable("it runs in another PID namespace (another container)");
  }
  owner_watch_ = WatchProcess(address.owner);
  if (!owner_watch_) {
    throw Unreachable("process " + std::to_string(address.owner.pid) + " has ended");
  }
  memory_ = OpenDescriptor(address, address.memory_fd, O_RDWR);
  struct stat info{};
  const int seals = fcntl(memory_.get(), F_GET_SEALS);
  if (fstat(memory_.get(), &info) != 0 || info.st_size != static_cast<off_t>(kTotalBytes) ||
      seals < 0 || !(seals & F_SEAL_SHRINK)) {
    throw Unreachable("its descriptor " + std::to_string(address.memory_fd) +
                      " is no mailbox of this version");
  }
  meta_mapping_ = Mapping(memory_.get(), 0, kMetaBytes);
  if (!meta_mapping_) throw Unreachable(std::string("mmap: ") + std::strerror(errno));
  meta_ = Meta(meta_mapping_.data());
  const Header& header = meta_.header();
  if (header.magic != kMagic || header.version != kVersion ||
      std::memcmp(header.nonce, address.nonce.data(), sizeof(header.nonce)) != 0) {
    throw Unreachable("its descriptor " + std::to_string(address.memory_fd) +
                      " is another mailbox than the token names");
  }
  // For reading too, so that a write never raises SIGPIPE when the consumer has died.
  bell_ = OpenDescriptor(address, address.bell_fd, O_RDWR | O_NONBLOCK);
  ClaimLane();
}

Attachment::~Attachment() = default;

void Attachment::ClaimLane() {
  const uint64_t self = ThisProcess().ToWord();
  for (lane_ = 0; lane_ < kLanes; ++lane_) {
    uint64_t free = kFreeLane;
    if (meta_.lane(lane_).owner.compare_exchange_strong(free, self)) break;
  }
  if (lane_ == kLanes) {
    throw Unreachable("it has " + std::to_string(kLanes) +
                      " producer processes already; let some of them end");
  }
  auto& used = meta_.header().lanes_used;
  uint32_t seen = used.load();
  while (seen <= lane_ && !used.compare_exchange_weak(seen, lane_ + 1)) continue;
  meta_.header().new_lane.store(1);
  Ring();

  const uint64_t at = kDataAt + lane_ * kLaneBytes;
  lane_mapping_ = Mapping(memory_.get(), at, kLaneBytes);
  if (!lane_mapping_) throw Unreachable(std::string("mmap: ") + std::strerror(errno));
  lane_memory_ = LaneMemory(lane_mapping_.data(), &meta_.lane(lane_), memory_.get(), at);
}

bool Attachment::OwnerLives() const {
  pollfd ended{owner_watch_.get(), POLLIN, 0};
  return poll(&ended, 1, 0) == 0;
}

void Attachment::Hold(uint32_t slot, uint32_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (holds_[Key(slot, generation)]++ != 0) return;
  meta_.hold(lane_, slot).store(generation);
  Slot& place = meta_.slot(slot);
  if (SlotWord::Unpack(place.word.load()).generation != generation) return;
  place.held.store(generation);  // after the hold: whoever sees this one sees that
  uint32_t handed_over = generation;
  place.handed_over.compare_exchange_strong(handed_over, 0);
}

void Attachment::Drop(uint32_t slot, uint32_t generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = holds_.find(Key(slot, generation));
  if (it == holds_.end() || --it->second != 0) return;
  holds_.erase(it);
  auto& hold = meta_.hold(lane_, slot);
  uint32_t expected = generation;
  if (!hold.compare_exchange_strong(expected, 0)) return;
  if (IsPending(slot, generation)) Attend(slot);
}

void Attachment::HandOver(uint32_t slot, uint32_t generation) {
  if (IsPending(slot, generation)) meta_.slot(slot).handed_over.store(generation);
}

bool Attachment::IsPending(uint32_t slot, uint32_t generation) const {
  return meta_.slot(slot).word.load() == SlotWord{State::kPending, 0, generation}.Pack();
}

bool Attachment::Claim(uint32_t slot, uint32_t generation) {
  uint64_t expected = SlotWord{State::kPending, 0, generation}.Pack();
  return meta_.slot(slot).word.compare_exchange_strong(
      expected, SlotWord{State::kClaimed, static_cast<uint16_t>(lane_), generation}.Pack());
}

std::byte* Attachment::Prepare(uint32_t slot, const Value& value) {
  Description& description = meta_.slot(slot).description;
  const bool long_shape = value.dims > kInlineDims;
  description.payload = value.payload;
  description.dtype = value.dtype;
  description.dims = static_cast<uint8_t>(value.dims);
  description.bytes = value.bytes;
  description.in_block = long_shape || value.bytes > kInlineBytes;
  description.block = 0;
  if (!description.in_block) {
    if (value.dims) std::memcpy(description.sizes, value.sizes, value.dims * sizeof(int64_t));
    return description.value;
  }
  const uint64_t shape_bytes = value.dims * sizeof(int64_t);
  const uint64_t needed = ShapeOffset(value.bytes) + (long_shape ? shape_bytes : 0);
  uint64_t block = 0;
  if (needed < kLaneBytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    block = lane_memory_.Allocate(needed);
  }
  if (block == 0) {
    throw std::runtime_error("expected a value that fits into this process's " +
                             std::to_string(kLaneBytes >> 30) +
                             " GiB of shared memory, got one of " + std::to_string(value.bytes) +
                             " bytes: let the consumer drop some of the tensors that it has "
                             "received, or send it in parts");
  }
  description.block = block;
  std::byte* at = lane_memory_.At(block);
  std::memcpy(long_shape ? reinterpret_cast<void*>(at + ShapeOffset(value.bytes))
                         : static_cast<void*>(description.sizes),
              value.sizes, shape_bytes);
  return at;
}

void Attachment::Publish(uint32_t slot, uint32_t generation) {
  meta_.slot(slot).word.store(
      SlotWord{State::kReady, static_cast<uint16_t>(lane_), generation}.Pack());
  Attend(slot);
}

void Attachment::Abandon(uint32_t slot, uint32_t generation) {
  uint64_t expected = SlotWord{State::kClaimed, static_cast<uint16_t>(lane_), generation}.Pack();
  meta_.slot(slot).word.compare_exchange_strong(expected,
                                                SlotWord{State::kPending, 0, generation}.Pack());
}

void Attachment::Attend(uint32_t slot) {
  // Sequentially consistent, as the consumer's arming and its look at the summary are: either it
  // sees the bit, or we see it armed.
  meta_.ready()[slot / 64].fetch_or(uint64_t{1} << slot % 64);
  meta_.summary()[slot / 64 / 64].fetch_or(uint64_t{1} << slot / 64 % 64);
  Ring();
}

void Attachment::Ring() {
  if (meta_.header().armed.exchange(0) == 0) return;
  const char ring = 1;
  // If the pipe is full, rings enough are waiting to be heard.
  (void)!write(bell_.get(), &ring, 1);
}

}  // namespace dtorch::shm
