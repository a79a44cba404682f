#include "dtorch/shm/attachment.h"

#include "dtorch/base/fork.h"
#include "dtorch/base/test_point.h"
#include "dtorch/sys/futex.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace dtorch::shm {
namespace {

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

constexpr uint64_t Key(uint32_t slot, uint32_t generation) {
  return uint64_t{generation} << 32 | slot;
}

std::runtime_error Unreachable(const std::string& reason) {
  return std::runtime_error("the shared memory of the process that waits cannot be reached: " +
                            reason);
}

std::runtime_error LaneIsFull(uint64_t bytes) {
  return std::runtime_error("expected a value that fits into this process's " +
                            std::to_string(kLaneBytes >> 30) +
                            " GiB of shared memory, got one of " + std::to_string(bytes) +
                            " bytes: let the consumer drop some of the tensors that it has "
                            "received, or send it in parts");
}

std::runtime_error Inert() {
  return std::runtime_error(
      "expected a promise that this process could take over from the process that has forked it, "
      "got one that it could not: all lanes of the process that waits are taken, or no descriptor "
      "was to be had at the fork; let the parent pickle the promise for this process instead");
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

Attachment::Attachment(const Address& address)
    : address_(address), fork_generation_(ForkGeneration()) {
  if (address.pid_namespace != PidNamespace()) {
    throw Unreachable("it runs in another PID namespace (another container)");
  }
  DTORCH_TEST_POINT("opening");
  owner_watch_ = WatchProcess(address.owner);
  if (!owner_watch_) {
    const int error = errno;
    std::string why = std::string(" cannot be watched: ") + std::strerror(error);
    if (error == ESRCH) {
      why = ProcIsOurs() ? " has ended"
                         : " cannot be found: /proc shows another PID namespace than this "
                           "process's; mount its own there (unshare --mount-proc)";
    }
    throw Unreachable("process " + std::to_string(address.owner.pid) + why);
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
  DTORCH_TEST_POINT("opened");
  ClaimLane();
}

Attachment::~Attachment() = default;

void Attachment::ClaimLane(uint32_t forked_from) {
  self_ = ThisProcess();
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw Unreachable(std::string("pipe: ") + std::strerror(errno));
  const Fd unused(ends[0]);  // the consumer opens another one
  alive_ = Fd(ends[1]);
  struct stat info{};
  (void)fstat(alive_.get(), &info);
  const uint64_t self = self_.ToWord();
  for (lane_ = 0; lane_ < kLanes; ++lane_) {
    uint64_t free = kFreeLane;
    if (meta_.lane(lane_).owner.compare_exchange_strong(free, self)) break;
  }
  if (lane_ == kLanes) {
    throw Unreachable("it has " + std::to_string(kLanes) +
                      " producer processes already; let some of them end");
  }
  DTORCH_TEST_POINT("lane claimed");
  meta_.lane(lane_).forked_from.store(forked_from);
  meta_.lane(lane_).alive_inode.store(info.st_ino);
  meta_.lane(lane_).alive.store(static_cast<uint32_t>(alive_.get()) + 1);
  auto& used = meta_.header().lanes_used;
  uint32_t seen = used.load();
  while (seen <= lane_ && !used.compare_exchange_weak(seen, lane_ + 1)) continue;
  // Before it holds anything: if it dies, that is noticed.
  meta_.header().new_lane.store(1);
  DTORCH_TEST_POINT("lane announced");
  Ring();

  region_ = meta_.header().next_region.fetch_add(1) % kRegions;
  meta_.lane(lane_).region.store(region_ + 1);
  const uint64_t at = kDataAt + uint64_t{region_} * kLaneBytes;
  lane_mapping_ = Mapping(memory_.get(), at, kLaneBytes);
  if (!lane_mapping_) throw Unreachable(std::string("mmap: ") + std::strerror(errno));
  lane_memory_ = LaneMemory(lane_mapping_.data(), &meta_.lane(lane_), memory_.get(), at);
}

bool Attachment::IsInert() const { return fork_generation_ != ForkGeneration(); }

void Attachment::BeforeFork() {
  mutex_.lock();
  lane_memory_.KeepLoans();
  if (held_ > 0) meta_.lane(lane_).forking.fetch_add(1);
}

void Attachment::AfterForkInParent() {
  if (held_ > 0) meta_.lane(lane_).forking.fetch_sub(1);
  mutex_.unlock();
}

void Attachment::AfterForkInChild(bool may_take_over) {
  // What it keeps is the parent's, and its lock may be held: leaked.
  new std::shared_ptr<Keepsake>(std::exchange(keepsake_, std::make_shared<Keepsake>()));
  // The parent's, which counts as alive until this process has taken over.
  const Fd parents_alive = std::move(alive_);
  try {
    if (held_ > 0 && may_take_over) {
      const uint32_t parents = lane_;
      inherits_loans_ = inherits_loans_ || lane_memory_.IsLending();
      inherited_.push_back(std::move(lane_mapping_));
      ClaimLane(inherits_loans_ ? parents + 1 : 0);
      const uint32_t used = std::min(meta_.header().slots_used.load(), kSlots);
      for (uint32_t slot = 0; slot < used; ++slot) {
        if (const uint32_t generation = meta_.hold(parents, slot).load()) {
          meta_.hold(lane_, slot).store(generation);
          // The consumer may be at the lanes, have passed this one, and find the parent's dropped.
          meta_.slot(slot).handovers.fetch_add(1);
        }
      }
      DTORCH_TEST_POINT("holds taken over");
      fork_generation_ = ForkGeneration();
    }
  } catch (const std::exception&) {
    alive_.Reset();  // should it have claimed a lane after all
  }
  mutex_.unlock();
}

bool Attachment::OwnerLives() const {
  pollfd ended{owner_watch_.get(), POLLIN, 0};
  return poll(&ended, 1, 0) == 0;
}

void Attachment::Hold(uint32_t slot, uint32_t generation) {
  if (IsInert()) throw Inert();
  std::lock_guard<std::mutex> lock(mutex_);
  Slot& place = meta_.slot(slot);
  auto& hold = meta_.hold(lane_, slot);
  uint32_t handed_over = generation;
  if (hold.load() == generation) {
    ++more_holds_[Key(slot, generation)];
    place.handed_over.compare_exchange_strong(handed_over, 0);  // it may have come back
    return;
  }
  // Of an old token nothing is left to hold; a newer one's hold must stay what it is.
  if (SlotWord::Unpack(place.word.load()).generation != generation) return;
  DTORCH_TEST_POINT("holding");
  if (hold.exchange(generation) == 0) ++held_;  // else one of an earlier generation went unnoticed
  DTORCH_TEST_POINT("hold stored");
  // After the hold: whoever sees these sees that. The slot may be in use again already.
  uint32_t held = place.held.load();
  while (IsLater(generation, held) && !place.held.compare_exchange_weak(held, generation)) continue;
  place.handed_over.compare_exchange_strong(handed_over, 0);
  DTORCH_TEST_POINT("held");
}

void Attachment::Drop(uint32_t slot, uint32_t generation) {
  if (IsInert()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto more = more_holds_.find(Key(slot, generation));
  if (more != more_holds_.end()) {
    if (--more->second == 0) more_holds_.erase(more);
    return;
  }
  if (meta_.hold(lane_, slot).load() != generation) return;
  --held_;
  // Whoever finds this process dead finds what it was about.
  auto& dropping = meta_.lane(lane_).dropping;
  dropping.store(slot + 1);
  DTORCH_TEST_POINT("dropping");
  uint32_t expected = generation;
  const bool held = meta_.hold(lane_, slot).compare_exchange_strong(expected, 0);
  DTORCH_TEST_POINT("hold dropped");
  if (held && IsPending(slot, generation)) Attend(slot);
  dropping.store(0);
}

void Attachment::HandOver(uint32_t slot, uint32_t generation) {
  Slot& place = meta_.slot(slot);
  const SlotWord word = SlotWord::Unpack(place.word.load());
  // What somebody has claimed may yet be given back.
  if (word.generation != generation || word.state == State::kFree) return;
  uint32_t seen = place.handed_over.load();
  while ((seen == 0 || IsLater(generation, seen)) &&
         !place.handed_over.compare_exchange_weak(seen, generation)) {
    continue;
  }
  DTORCH_TEST_POINT("handing over");
  place.handovers.fetch_add(1);  // after it: see Mailbox::BreakUnlessHeld
}

bool Attachment::IsPending(uint32_t slot, uint32_t generation) const {
  return meta_.slot(slot).word.load() == SlotWord{State::kPending, 0, generation}.Pack();
}

bool Attachment::IsCancelled(uint32_t slot, uint32_t generation) const {
  return meta_.slot(slot).word.load() == SlotWord{State::kFree, kCancelled, generation}.Pack();
}

bool Attachment::Claim(uint32_t slot, uint32_t generation) {
  if (IsInert()) throw Inert();
  uint64_t expected = SlotWord{State::kPending, 0, generation}.Pack();
  const bool claimed = meta_.slot(slot).word.compare_exchange_strong(
      expected, SlotWord{State::kClaimed, static_cast<uint16_t>(lane_), generation}.Pack());
  DTORCH_TEST_POINT("claimed");
  return claimed;
}

void Attachment::Ask(uint32_t slot, uint32_t generation, uint8_t device_type, int8_t device_index,
                     uint64_t bytes) {
  Slot& place = meta_.slot(slot);
  place.description.device_type = device_type;
  place.description.device_index = device_index;
  place.description.bytes = bytes;
  place.description.block = ++questions_;
  const auto lane = static_cast<uint16_t>(lane_);
  uint64_t claimed = SlotWord{State::kClaimed, lane, generation}.Pack();
  const uint64_t asking = SlotWord{State::kAsking, lane, generation}.Pack();
  if (!place.word.compare_exchange_strong(claimed, asking)) return;  // taken for dead
  DTORCH_TEST_POINT("asking");
  Attend(slot);
}

std::optional<std::string> Attachment::WaitForAnswer(uint32_t slot, uint32_t generation,
                                                     Deadline deadline) {
  // The consumer's death wakes nobody.
  constexpr int64_t kLookForOwnerMs = 50;
  Slot& place = meta_.slot(slot);
  const auto lane = static_cast<uint16_t>(lane_);
  const uint64_t claimed = SlotWord{State::kClaimed, lane, generation}.Pack();
  const uint64_t asking = SlotWord{State::kAsking, lane, generation}.Pack();
  const uint64_t answering = SlotWord{State::kAnswering, lane, generation}.Pack();
  // An answer that has begun is waited for: it is a few bytes. That it takes as long as this means
  // that the consumer was stopped in the middle of it, or that the memory was written over.
  constexpr int64_t kAnswerMs = 5000;
  std::optional<Deadline> answered;
  for (;;) {
    const uint32_t answers = place.answers.load();
    uint64_t word = place.word.load();
    if (word == claimed) {
      const uint64_t bytes = place.description.bytes;
      if (bytes > kInlineBytes) return std::nullopt;  // no answer of ours
      return std::string(reinterpret_cast<const char*>(place.description.value), bytes);
    }
    if (word != asking && word != answering) return std::nullopt;  // taken for dead
    const bool dead = !OwnerLives();
    if (word == asking && (dead || deadline.HasPassed())) {
      if (place.word.compare_exchange_strong(word, claimed)) return std::nullopt;
      continue;
    }
    if (dead) return std::nullopt;
    if (word == answering && !answered) answered = Deadline::AfterMs(kAnswerMs);
    if (word == answering && answered->HasPassed()) {
      Abandon(slot, generation);
      throw std::runtime_error("the process that waits for the promise stopped answering for " +
                               std::to_string(kAnswerMs / 1000) +
                               " s: expected where to put the value on its device");
    }
    const Deadline nap = word == asking ? deadline : *answered;
    FutexWait(place.answers, answers, nap.AtMostMs(kLookForOwnerMs), FutexScope::kShared);
  }
}

Attachment::Place Attachment::Prepare(uint32_t slot, const Value& value) {
  Description& description = meta_.slot(slot).description;
  const bool long_shape = value.dims > kInlineDims;
  description.payload = value.payload;
  description.dtype = value.dtype;
  description.device_type = value.device_type;
  description.device_index = value.device_index;
  description.dims = static_cast<uint8_t>(value.dims);
  description.bytes = value.bytes;
  const bool on_device = value.payload == Payload::kDeviceTensor;
  description.in_block = long_shape || (value.bytes > kInlineBytes && !on_device);
  description.block = 0;
  if (!description.in_block) {
    if (value.dims) std::memcpy(description.sizes, value.sizes, value.dims * sizeof(int64_t));
    return {description.value};
  }
  const uint64_t shape_bytes = value.dims * sizeof(int64_t);
  const uint64_t needed = ShapeOffset(value.bytes) + (long_shape ? shape_bytes : 0);
  uint64_t block = 0;
  bool in_place = false, cold = false;
  if (needed < kLaneBytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (value.data && (block = lane_memory_.FindLent(value.data, needed))) {
      in_place = lane_memory_.Share(block, LaneMemory::User::kConsumer);
    } else {
      const auto allocation = lane_memory_.Allocate(needed, LaneMemory::User::kConsumer);
      block = allocation.offset;
      cold = allocation.cold;
    }
  }
  if (block == 0) throw LaneIsFull(value.bytes);
  DTORCH_TEST_POINT("block taken");
  description.block = block;
  std::byte* at = lane_memory_.At(block);
  if (value.dims) {
    std::memcpy(long_shape ? reinterpret_cast<void*>(at + ShapeOffset(value.bytes))
                           : static_cast<void*>(description.sizes),
                value.sizes, shape_bytes);
  }
  return {in_place ? nullptr : at, block, cold};
}

void Attachment::FillCold(const Place& place, const void* data, uint64_t bytes) {
  const auto* from = static_cast<const std::byte*>(data);
  const uint64_t at = kDataAt + uint64_t{region_} * kLaneBytes + place.block;
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t written =
        pwrite(memory_.get(), from + done, bytes - done, static_cast<off_t>(at + done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      throw std::runtime_error("expected shared memory for a value of " + std::to_string(bytes) +
                               " bytes, the system has none left: " + std::strerror(errno));
    }
    done += static_cast<uint64_t>(written);
  }
}

void Attachment::WarmUp(const Place& place, uint64_t bytes) {
  const auto start = reinterpret_cast<uintptr_t>(place.to);
  const uintptr_t from = start / kPage * kPage;
  // Linux 5.14; before, the next value pays for it.
  if (bytes <= CacheLimit()) {
    (void)madvise(reinterpret_cast<void*>(from), start + bytes - from, MADV_POPULATE_WRITE);
  }
}

Attachment::Loan Attachment::Lend(const std::shared_ptr<Attachment>& self, uint64_t bytes) {
  // With room for any shape that the value may be given.
  const uint64_t needed = ShapeOffset(bytes) + kMaxDims * sizeof(int64_t);
  uint64_t block = 0;
  if (self->IsInert()) throw Inert();
  if (bytes < kLaneBytes && needed < kLaneBytes) {
    std::lock_guard<std::mutex> lock(self->mutex_);
    block = self->lane_memory_.Allocate(needed, LaneMemory::User::kLender).offset;
  }
  if (block == 0) throw LaneIsFull(bytes);
  std::byte* data = self->lane_memory_.At(block);
  return {data, std::shared_ptr<void>(data, [self, block, generation = ForkGeneration()](void*) {
            // What a child has inherited is its parent's; there it may be used again, here it is
            // not.
            if (generation != ForkGeneration()) return;
            std::lock_guard<std::mutex> lock(self->mutex_);
            self->lane_memory_.Free(block, LaneMemory::User::kLender);
          })};
}

Attachment::Stats Attachment::GetStats() {
  std::lock_guard<std::mutex> lock(mutex_);
  lane_memory_.TakeBackReturned();
  return {held_, lane_memory_.live_bytes(), lane_memory_.cached_bytes()};
}

void Attachment::Trim(uint64_t limit) {
  std::lock_guard<std::mutex> lock(mutex_);
  lane_memory_.TakeBackReturned();
  lane_memory_.Trim(limit);
}

bool Attachment::Publish(uint32_t slot, uint32_t generation) {
  Slot& place = meta_.slot(slot);
  const auto lane = static_cast<uint16_t>(lane_);
  uint64_t claimed = SlotWord{State::kClaimed, lane, generation}.Pack();
  if (!place.word.compare_exchange_strong(claimed,
                                          SlotWord{State::kReady, lane, generation}.Pack())) {
    return false;
  }
  DTORCH_TEST_POINT("published");
  SetReadyBit(slot);
  DTORCH_TEST_POINT("bit set");
  // Sequentially consistent, as the waiter's leaving and its look at the bit are.
  if (place.waiters.load() == 0) {
    Ring();
  } else {
    place.bell.fetch_add(1);
    DTORCH_TEST_POINT("bell increased");
    FutexWake(place.bell, INT_MAX, FutexScope::kShared);
  }
  return true;
}

void Attachment::FreeBlock(uint64_t block) {
  if (block == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  lane_memory_.Free(block, LaneMemory::User::kConsumer);
}

void Attachment::Abandon(uint32_t slot, uint32_t generation) {
  const auto lane = static_cast<uint16_t>(lane_);
  bool forsaken = false;
  // Whoever dropped it meanwhile saw it claimed; and if this process dies now, what it was about
  // shows, as in Drop().
  std::lock_guard<std::mutex> lock(mutex_);
  auto& dropping = meta_.lane(lane_).dropping;
  dropping.store(slot + 1);
  auto& word = meta_.slot(slot).word;
  for (uint64_t seen = word.load();;) {
    const SlotWord now = SlotWord::Unpack(seen);
    if (now.lane != lane || now.generation != generation) break;
    forsaken = now.state == State::kAnswering;
    if (!forsaken && now.state != State::kAsking && now.state != State::kClaimed) break;
    const SlotWord next = forsaken ? SlotWord{State::kForsaken, lane, generation}
                                   : SlotWord{State::kPending, 0, generation};
    if (word.compare_exchange_strong(seen, next.Pack())) break;
  }
  DTORCH_TEST_POINT("abandoned");
  if (forsaken || meta_.hold(lane_, slot).load() != generation) Attend(slot);
  dropping.store(0);
}

void Attachment::Attend(uint32_t slot) {
  SetReadyBit(slot);
  Ring();
}

void Attachment::SetReadyBit(uint32_t slot) {
  // Sequentially consistent, as the consumer's arming and its look at the summary are: either it
  // sees the bit, or we see it armed.
  meta_.ready()[slot / 64].fetch_or(uint64_t{1} << slot % 64);
  meta_.summary()[slot / 64 / 64].fetch_or(uint64_t{1} << slot / 64 % 64);
}

void Attachment::Ring() {
  RingIfArmed(meta_.header().armed, [this] {
    const char ring = 1;
    DTORCH_TEST_POINT("ringing");
    (void)!write(bell_.get(), &ring, 1);  // if the pipe is full, rings enough are waiting
    DTORCH_TEST_POINT("rung");
  });
}

}  // namespace dtorch::shm
