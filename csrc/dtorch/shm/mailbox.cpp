#include "dtorch/shm/mailbox.h"

#include "dtorch/base/fork.h"
#include "dtorch/base/log.h"
#include "dtorch/base/test_point.h"
#include "dtorch/sys/futex.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace dtorch::shm {
namespace {

constexpr uint64_t kBellEvent = ~uint64_t{0};
constexpr uint64_t kStopEvent = ~uint64_t{1};
// How often it is tried again to watch a process, where that could not be done.
constexpr int kRetryMs = 50;
// How long a process that was killed in the middle of a fork counts as alive: its child takes over
// in a fraction of that.
constexpr std::chrono::milliseconds kForkGrace{40};
constexpr uint64_t kChildEvent = uint64_t{1} << 32;  // and the epoch

// What a child is to inherit of a pipe, in the thread that forks it.
thread_local Fd inherited_end;

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
    ThrowErrno("dtorch_ops: growing the shared memory for promises (sparse, 16 PiB)");
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
    // Dead, and nothing of it in use: the memory goes back to the system.
    DTORCH_TEST_POINT("freeing lane");
    if (retired_ && region_ != 0) Punch(RegionAt(), kLaneBytes);
  }

  // A block that a description names; nullptr if it is not inside of the region.
  std::byte* Block(uint64_t offset, uint64_t bytes) {
    if (offset % alignof(BlockHeader) != 0 || offset < sizeof(BlockHeader) ||
        offset >= kLaneBytes || bytes > kLaneBytes - offset || !HasRegion()) {
      return nullptr;
    }
    if (!mapping_) mapping_ = Mapping(memory_fd_, RegionAt(), kLaneBytes);
    return mapping_ ? mapping_.data() + offset : nullptr;
  }

  // To the producer, if there still is one.
  void GiveBack(uint64_t offset) {
    if (retired_) return;
    auto* header = reinterpret_cast<BlockHeader*>(mapping_.data() + offset) - 1;
    auto& returned = meta_.lane(index_).returned;
    uint64_t top = returned.load();
    do {
      header->next = top;
    } while (!returned.compare_exchange_weak(top, offset));
  }

  // The lane is free for another producer; the region stays while a value in it lives.
  void Retire() {
    HasRegion();
    retired_ = true;
    Punch(kHoldsAt + index_ * kHoldsBytes, kHoldsBytes);
    Lane& lane = meta_.lane(index_);
    lane.returned.store(0);
    lane.dropping.store(0);
    lane.region.store(0);
    lane.alive.store(0);
    lane.forking.store(0);
    lane.forked_from.store(0);
    lane.owner.store(kFreeLane);
  }
  ProcessId producer() const { return producer_; }
  Fd watch;  // of its descriptor, or else of
  bool watches_process = false;
  std::optional<std::chrono::steady_clock::time_point> grace;
  std::shared_ptr<ConsumerLane> forked_from;  // kept, for what it has lent
  std::shared_ptr<Keepsake> keepsake = std::make_shared<Keepsake>();

  void KeepAncestor(std::shared_ptr<ConsumerLane> lane) {
    for (const ConsumerLane* each = lane.get(); each; each = each->forked_from.get()) {
      if (each == this) return;  // a circle is somebody's lie
    }
    forked_from = std::move(lane);
  }

 private:
  const int memory_fd_;
  const Meta meta_;
  const uint32_t index_;
  const ProcessId producer_;
  Mapping mapping_;
  uint32_t region_ = 0;  // one more than the index; 0 if the producer has not named it yet
  bool retired_ = false;

  bool HasRegion() {
    if (region_ == 0) region_ = meta_.lane(index_).region.load();
    if (region_ > kRegions) region_ = 0;
    return region_ != 0;
  }
  uint64_t RegionAt() const { return kDataAt + uint64_t{region_ - 1} * kLaneBytes; }
  void Punch(uint64_t at, uint64_t bytes) const {
    fallocate(memory_fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at),
              static_cast<off_t>(bytes));
  }
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
    meta_.header().slots_used.store(index + 1);
    summary_used_.store(index / kSlotsOfSummaryWord + 1);
  } else {
    throw std::runtime_error("expected at most " + std::to_string(kSlots) +
                             " promises outstanding in other processes, all are taken: wait for "
                             "some of their futures first");
  }
  Local& local = locals_[index];
  if (++local.generation == 0) ++local.generation;
  local.outstanding = true;
  local.allocated_at = epoch_;
  local.holds_at_home = 0;
  local.handed_out = local.owner_dropped = local.held_at_home = local.unwanted = false;
  local.question = 0;
  Slot& slot = meta_.slot(index);
  slot.held.store(local.generation - 1);
  slot.handed_over.store(0);
  slot.word.store(SlotWord{State::kPending, 0, local.generation}.Pack());
  return {index, local.generation};
}

void Mailbox::Free(Place place) {
  locals_[place.slot].outstanding = false;
  locals_[place.slot].memory.reset();
  free_.push_back(place.slot);
}

Mailbox::Local* Mailbox::Find(Place place) {
  Local& local = locals_[place.slot];
  return local.outstanding && local.generation == place.generation ? &local : nullptr;
}

bool Mailbox::Retract(Place place, bool cancelled) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!Find(place)) return false;
  uint64_t expected = SlotWord{State::kPending, 0, place.generation}.Pack();
  const uint16_t why = cancelled ? kCancelled : 0;
  const uint64_t free = SlotWord{State::kFree, why, place.generation}.Pack();
  if (!meta_.slot(place.slot).word.compare_exchange_strong(expected, free)) return false;
  Free(place);
  return true;
}

void Mailbox::GiveUp(Place place) {
  if (Retract(place)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (Local* local = Find(place)) local->unwanted = true;  // claimed: when that is over, either way
}

void Mailbox::HandOut(Place place) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Local* local = Find(place)) local->handed_out = true;
}

void Mailbox::OwnerDropped(Place place) {
  std::lock_guard<std::mutex> lock(mutex_);
  Local* local = Find(place);
  if (!local || std::exchange(local->owner_dropped, true) || local->handed_out) return;
  Attend(place.slot);
}

void Mailbox::HoldAtHome(Place place) {
  std::lock_guard<std::mutex> lock(mutex_);
  Local* local = Find(place);
  if (!local) return;
  ++local->holds_at_home;
  local->held_at_home = true;
  uint32_t handed_over = place.generation;
  meta_.slot(place.slot).handed_over.compare_exchange_strong(handed_over, 0);
}

void Mailbox::DropAtHome(Place place) {
  std::lock_guard<std::mutex> lock(mutex_);
  Local* local = Find(place);
  if (local && local->holds_at_home > 0 && --local->holds_at_home == 0) Attend(place.slot);
}

void Mailbox::HandOverAtHome(Place place) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!Find(place)) return;
  meta_.slot(place.slot).handed_over.store(place.generation);
  meta_.slot(place.slot).handovers.fetch_add(1);
}

bool Mailbox::ClaimAtHome(Place place) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t pending = SlotWord{State::kPending, 0, place.generation}.Pack();
  const uint64_t claimed = SlotWord{State::kClaimed, kAtHome, place.generation}.Pack();
  return Find(place) && meta_.slot(place.slot).word.compare_exchange_strong(pending, claimed);
}

void Mailbox::FulfilAtHome(Place place) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!Find(place)) return;
  meta_.slot(place.slot).word.store(SlotWord{State::kFree, 0, place.generation}.Pack());
  Free(place);
}

void Mailbox::AbandonAtHome(Place place) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!Find(place)) return;
  // Back first, so that a holder that drops it now sees that it is pending, and says so.
  meta_.slot(place.slot).word.store(SlotWord{State::kPending, 0, place.generation}.Pack());
  Attend(place.slot);
}

// Asks the listening thread to look at a slot, as a producer does.
void Mailbox::Attend(uint32_t slot) {
  meta_.ready()[slot / 64].fetch_or(uint64_t{1} << slot % 64);
  meta_.summary()[slot / 64 / 64].fetch_or(uint64_t{1} << slot / 64 % 64);
  Ring();
}

void Mailbox::Ring() {
  RingIfArmed(meta_.header().armed, [this] { WakeAnother(); });
}

void Mailbox::WakeAnother() {
  const char ring = 1;
  (void)!write(bell_write_.get(), &ring, 1);  // if it is full, rings enough are waiting
}

void Mailbox::Arm() {
  if (looking_out_.load() > 0) return;  // the last of them does it
  uint32_t number = ++armed_count_;
  if (number == 0) number = ++armed_count_;
  meta_.header().armed.store(number);
  DTORCH_TEST_POINT("armed");
}

void Mailbox::BeginLookOut() {
  looking_out_.fetch_add(1);
  meta_.header().armed.store(0);
}

void Mailbox::EndLookOut() {
  looking_out_.fetch_sub(1);
  Arm();
  DTORCH_TEST_POINT("looked out");
  // Sequentially consistent, as a producer's setting of the bit and its look at `armed` are.
  if (HasNews()) WakeAnother();
}

bool Mailbox::HasNews() const {
  const uint32_t used = summary_used_.load();
  for (uint32_t i = 0; i < used; ++i) {
    if (meta_.summary()[i].load() != 0) return true;
  }
  return meta_.header().new_lane.load() != 0 || HasMore();
}

void Mailbox::BeginWait(Place place) {
  std::lock_guard<std::mutex> lock(mutex_);
  meta_.slot(place.slot).waiters.store(++locals_[place.slot].waiters);
}

void Mailbox::EndWait(Place place) {
  Slot& slot = meta_.slot(place.slot);
  DTORCH_TEST_POINT("waiter going");
  {
    std::lock_guard<std::mutex> lock(mutex_);
    slot.waiters.store(--locals_[place.slot].waiters);
  }
  DTORCH_TEST_POINT("waiter gone");
  // Sequentially consistent, as the producer's setting of the bit and its look at the waiters are.
  const uint64_t bits = meta_.ready()[place.slot / 64].load();
  if (bits >> place.slot % 64 & 1) Ring();
}

bool Mailbox::IsReady(Place place) const {
  const SlotWord word = SlotWord::Unpack(meta_.slot(place.slot).word.load());
  return word.state == State::kReady && word.generation == place.generation;
}

bool Mailbox::IsPending(Place place) const {
  return meta_.slot(place.slot).word.load() ==
         SlotWord{State::kPending, 0, place.generation}.Pack();
}

bool Mailbox::NeedsDevice(Place place) const {
  const Description& description = meta_.slot(place.slot).description;
  return description.payload == Payload::kDeviceTensor || description.device_type != 0;
}

std::optional<Mailbox::Event> Mailbox::CollectOne(Place place) {
  std::vector<Event> events;
  std::lock_guard<std::mutex> lock(mutex_);
  if (Find(place) && IsReady(place)) {
    meta_.ready()[place.slot / 64].fetch_and(~(uint64_t{1} << place.slot % 64));
    Look(place.slot, events);
  }
  if (events.empty()) return std::nullopt;
  return std::move(events.front());
}

uint32_t Mailbox::LanesUsed() const { return std::min(meta_.header().lanes_used.load(), kLanes); }

bool Mailbox::IsHeld(Place place) const {
  if (locals_[place.slot].holds_at_home > 0) return true;
  for (uint32_t lane = 0; lane < LanesUsed(); ++lane) {
    const uint64_t owner = meta_.lane(lane).owner.load();
    if (owner == kFreeLane) continue;
    if (meta_.hold(lane, place.slot).load() == place.generation) return true;
  }
  return false;
}

void Mailbox::BreakUnlessHeld(Place place, std::vector<Event>& events) {
  Slot& slot = meta_.slot(place.slot);
  // Whoever takes over a promise holds it before it clears `handed_over`, which therefore is read
  // before the holds; and what is handed over after that shows in the count.
  const uint32_t handovers = slot.handovers.load();
  const bool wanted = !locals_[place.slot].unwanted;
  if (wanted && (slot.handed_over.load() == place.generation || IsHeld(place) ||
                 slot.handovers.load() != handovers)) {
    return;
  }
  DTORCH_TEST_POINT("breaking");
  uint64_t pending = SlotWord{State::kPending, 0, place.generation}.Pack();
  const uint64_t free = SlotWord{State::kFree, 0, place.generation}.Pack();
  if (!slot.word.compare_exchange_strong(pending, free)) return;
  Free(place);
  events.push_back({place, /*broken=*/true, {}, {}});
}

void Mailbox::Take(Place place, uint32_t lane_index, std::vector<Event>& events) {
  Slot& slot = meta_.slot(place.slot);
  // Copied out once; from here on the producer's writes change nothing.
  Description description;
  std::memcpy(&description, &slot.description, sizeof(description));
  slot.word.store(SlotWord{State::kFree, 0, place.generation}.Pack());
  Received received;
  received.memory = std::move(locals_[place.slot].memory);
  Free(place);
  DTORCH_TEST_POINT("taken");

  received.payload = description.payload;
  received.dtype = description.dtype;
  received.device_type = description.device_type;
  received.device_index = description.device_index;
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
  } else if (description.payload == Payload::kDeviceTensor) {
    if (!received.memory || description.in_block || shape_bytes) {
      received.defect = "it names memory of a device that it was not given";
    }
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
    if (description.dims) {
      std::memcpy(received.sizes.data(), shape, description.dims * sizeof(int64_t));
    }
    if (description.in_block) {
      received.block = block;
      ++received_blocks_;
      received_bytes_ += description.bytes;
      received.keep = std::shared_ptr<void>(
          block, [this, lane, offset = description.block, bytes = description.bytes, epoch = epoch_,
                  generation = ForkGeneration()](void*) {
            // What a child has inherited is its parent's to give back.
            if (generation == ForkGeneration()) GiveBack(lane, offset, bytes, epoch);
          });
    } else {
      std::memcpy(received.in_slot.data(), description.value, kInlineBytes);
    }
  }
  events.push_back({place, /*broken=*/false, std::move(received), {}});
}

void Mailbox::HearQuestion(Place place, uint32_t lane, std::vector<Event>& events) {
  // Looked at for another reason, it may be found again.
  if (lane >= kLanes || !Watch(lane)) return;
  Local& local = locals_[place.slot];
  const Description& description = meta_.slot(place.slot).description;
  const uint64_t number = description.block;
  if (local.question != 0 && std::exchange(local.question_number, number) == number) return;
  local.question_number = number;
  local.question = ++questions_;
  local.memory.reset();  // of an earlier claim
  Question question{local.question,          lane,
                    description.device_type, description.device_index,
                    description.bytes,       lanes_[lane]->keepsake};
  events.push_back({place, /*broken=*/false, {}, std::move(question)});
}

void Mailbox::Answer(Place place, const Question& question, std::string_view text,
                     std::shared_ptr<void> memory) {
  std::shared_ptr<void> unused = std::move(memory);  // dropped behind the lock
  std::lock_guard<std::mutex> lock(mutex_);
  const Local* local = Find(place);
  if (!local || local->question != question.id) return;
  Slot& slot = meta_.slot(place.slot);
  const auto lane = static_cast<uint16_t>(question.lane);
  uint64_t asking = SlotWord{State::kAsking, lane, place.generation}.Pack();
  uint64_t answering = SlotWord{State::kAnswering, lane, place.generation}.Pack();
  if (!slot.word.compare_exchange_strong(asking, answering)) return;  // it waits no more
  // From here on the description is ours. It may be the next question of the same lane, which has
  // not been heard yet.
  const bool is_this_one = slot.description.block == local->question_number;
  if (is_this_one) {
    if (text.size() > kInlineBytes) text = {};
    slot.description.bytes = text.size();
    if (!text.empty()) std::memcpy(slot.description.value, text.data(), text.size());
  }
  DTORCH_TEST_POINT("answering");
  const uint64_t claimed = SlotWord{State::kClaimed, lane, place.generation}.Pack();
  // Forsaken meanwhile, it is for Look() to see to: the claimant says so.
  if (!slot.word.compare_exchange_strong(answering, is_this_one ? claimed : asking)) return;
  if (is_this_one && !text.empty()) locals_[place.slot].memory = std::move(unused);
  slot.answers.fetch_add(1);
  FutexWake(slot.answers, INT_MAX, FutexScope::kShared);
}

void Mailbox::Look(uint32_t index, std::vector<Event>& events) {
  if (index >= locals_.size() || !locals_[index].outstanding) return;
  const Place place{index, locals_[index].generation};
  SlotWord word = SlotWord::Unpack(meta_.slot(index).word.load());
  if (word.generation != place.generation) return;
  if (word.state == State::kForsaken) {  // and whatever was being answered is written
    uint64_t forsaken = word.Pack();
    word = {State::kPending, 0, place.generation};
    locals_[index].question = 0;
    locals_[index].memory.reset();
    meta_.slot(index).word.compare_exchange_strong(forsaken, word.Pack());
  }
  if (word.state == State::kReady) {
    Take(place, word.lane, events);
    return;
  }
  if (word.state == State::kAsking) {
    HearQuestion(place, word.lane, events);
    return;
  }
  if (word.state != State::kPending) return;
  // Never out of this process but by a fork: the owner's own object keeps it, and every child.
  const Local& local = locals_[index];
  const bool had_producers =
      meta_.slot(index).held.load() == place.generation || local.held_at_home;
  const bool left_to_nobody =
      local.owner_dropped && !local.handed_out && !ChildHasSeen(local.allocated_at);
  if (had_producers || left_to_nobody || local.unwanted) BreakUnlessHeld(place, events);
}

bool Mailbox::ChildHasSeen(uint32_t epoch) const {
  return std::any_of(children_.begin(), children_.end(),
                     [&](const Child& child) { return child.epoch > epoch; });
}

void Mailbox::OnChildrenEnded(std::vector<Event>& events) {
  if (ended_children_.empty()) return;
  for (const uint32_t epoch : std::exchange(ended_children_, {})) {
    std::erase_if(children_, [&](const Child& child) { return child.epoch == epoch; });
  }
  for (uint32_t index = 0; index < locals_.size(); ++index) {
    if (locals_[index].owner_dropped) Look(index, events);
  }
  std::erase_if(deferred_, [&](const DeferredBlock& block) {
    if (ChildHasSeen(block.epoch)) return false;
    block.lane->GiveBack(block.offset);
    return true;
  });
}

void Mailbox::GiveBack(const std::shared_ptr<ConsumerLane>& lane, uint64_t offset, uint64_t bytes,
                       uint32_t epoch) {
  received_bytes_ -= bytes;
  std::lock_guard<std::mutex> lock(mutex_);
  --received_blocks_;
  if (ChildHasSeen(epoch)) {
    deferred_.push_back({epoch, lane, offset});
  } else {
    lane->GiveBack(offset);
  }
}

bool Mailbox::Watch(uint32_t index) {
  if (lanes_[index]) return true;
  const uint64_t word = meta_.lane(index).owner.load();
  if (word == kFreeLane) return false;
  const auto producer = ProcessId::FromWord(word);
  lanes_[index] = std::make_shared<ConsumerLane>(memory_.get(), meta_, index, producer);
  Log(LogLevel::kInfo, "file", "process ", producer.pid, " is attached");
  TryWatchProcess(index);
  return true;
}

void Mailbox::TryWatchProcess(uint32_t index) {
  ConsumerLane& lane = *lanes_[index];
  const uint32_t alive = meta_.lane(index).alive.load();
  if (alive != 0) {
    lane.watch = WatchDescriptor(lane.producer(), static_cast<int>(alive - 1),
                                 meta_.lane(index).alive_inode.load());
  }
  lane.watches_process = !lane.watch && (alive == 0 || errno == EACCES || errno == EPERM);
  if (lane.watches_process) lane.watch = WatchProcess(lane.producer());
  if (lane.watch) {
    epoll_event event{EPOLLIN | EPOLLONESHOT, {.u64 = index}};
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, lane.watch.get(), &event);
  } else if (errno == ESRCH) {
    ended_.push_back(index);  // it has ended already
  } else {
    unwatched_.push_back(index);  // no descriptor to be had, say: it may live
  }
  unwatched_count_.store(unwatched_.size());
}

void Mailbox::WatchNewLanes() {
  if (meta_.header().new_lane.exchange(0) == 0) return;
  for (uint32_t index = 0; index < LanesUsed(); ++index) {
    if (!Watch(index)) continue;
    // It may have been seen before it was announced.
    ConsumerLane& lane = *lanes_[index];
    if (lane.watches_process && meta_.lane(index).alive.load() != 0) TryWatchProcess(index);
    const uint32_t from = meta_.lane(index).forked_from.load();
    if (from != 0 && from <= kLanes && !lane.forked_from) lane.KeepAncestor(lanes_[from - 1]);
  }
}

bool Mailbox::IsInFork(uint32_t index) {
  if (meta_.lane(index).forking.load() == 0) return false;
  const auto now = std::chrono::steady_clock::now();
  auto& grace = lanes_[index]->grace;
  if (!grace) grace = now + kForkGrace;
  return now < *grace;
}

void Mailbox::OnDeath(uint32_t lane, std::vector<Event>& events) {
  DTORCH_TEST_POINT("death seen");
  Log(LogLevel::kInfo, "file", "process ", lanes_[lane]->producer().pid, " has ended");
  const uint32_t dropping = meta_.lane(lane).dropping.load();
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
      continue;
    }
    const bool claimed =
        word.lane == lane && (word.state == State::kClaimed || word.state == State::kAsking ||
                              word.state == State::kForsaken);
    if (claimed) {
      locals_[index].question = 0;
      locals_[index].memory.reset();
      // Back first, so that a holder that drops it now sees that it is pending, and says so.
      uint64_t expected = word.Pack();
      meta_.slot(index).word.compare_exchange_strong(
          expected, SlotWord{State::kPending, 0, place.generation}.Pack());
      DTORCH_TEST_POINT("claim given back");
    }
    if (claimed || held || index + 1 == dropping) BreakUnlessHeld(place, events);
  }
  lanes_[lane]->watch.Reset();
  lanes_[lane]->keepsake.reset();
  lanes_[lane]->Retire();
  lanes_[lane] = nullptr;  // its blocks may keep it for a while
}

std::optional<Mailbox::Event> Mailbox::Collect() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (found_.empty()) Scan();
  if (found_.empty()) return std::nullopt;
  std::optional<Event> event(std::move(found_.front()));
  found_.pop_front();
  found_count_.store(found_.size());
  return event;
}

void Mailbox::PutBack(Event event) {
  std::lock_guard<std::mutex> lock(mutex_);
  found_.push_front(std::move(event));
  found_count_.store(found_.size());
}

void Mailbox::Scan() {
  std::vector<Event> events;
  WatchNewLanes();
  auto* summary = meta_.summary();
  for (uint32_t i = 0; i < summary_used_.load(); ++i) {
    if (summary[i].load(std::memory_order_relaxed) == 0) continue;
    uint64_t words = summary[i].exchange(0);
    for (; words; words &= words - 1) {
      const uint32_t word = i * 64 + static_cast<uint32_t>(std::countr_zero(words));
      uint64_t bits = meta_.ready()[word].exchange(0);
      for (; bits; bits &= bits - 1) {
        Look(word * 64 + static_cast<uint32_t>(std::countr_zero(bits)), events);
      }
    }
  }
  OnChildrenEnded(events);
  for (const uint32_t lane : std::exchange(unwatched_, {})) {
    if (lanes_[lane]) TryWatchProcess(lane);
  }
  if (!ended_.empty()) WatchNewLanes();  // a child may look at what the dead have lent
  for (const uint32_t lane : std::exchange(ended_, {})) {
    // Asked again: the lane may be another process's by now.
    if (!lanes_[lane]) continue;
    pollfd ended{lanes_[lane]->watch.get(), POLLIN, 0};
    if (lanes_[lane]->watch && poll(&ended, 1, 0) != 1) continue;
    if (IsInFork(lane)) {
      unwatched_.push_back(lane);
      unwatched_count_.store(unwatched_.size());
    } else {
      OnDeath(lane, events);
    }
  }
  // Armed before the last look at the bits: whoever sets one after that look rings.
  Arm();
  for (Event& event : events) found_.push_back(std::move(event));
}

bool Mailbox::Sleep(int timeout_ms) {
  Arm();
  if (HasNews()) return true;
  if (unwatched_count_.load() > 0 && (timeout_ms < 0 || timeout_ms > kRetryMs)) {
    epoll_event event{};
    // Woken or not: there is somebody to look after.
    if (epoll_wait(epoll_.get(), &event, 1, kRetryMs) == 1) OnEvent(event.data.u64);
    return true;
  }
  epoll_event event{};
  const int events = epoll_wait(epoll_.get(), &event, 1, timeout_ms);
  if (events != 1) return events != 0;
  OnEvent(event.data.u64);
  return true;
}

void Mailbox::OnEvent(uint64_t event) {
  if (event == kStopEvent) return;
  if (event == kBellEvent) {
    char rings[64];
    while (read(bell_read_.get(), rings, sizeof(rings)) == sizeof(rings)) continue;
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto& ended = event & kChildEvent ? ended_children_ : ended_;
  ended.push_back(static_cast<uint32_t>(event));
}

void Mailbox::BeforeFork() {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool promises = std::any_of(locals_.begin(), locals_.end(), [](const Local& local) {
    return local.outstanding && !local.handed_out;
  });
  if (!promises && received_blocks_ == 0) return;
  int ends[2];
  // Without it the child is no producer until it touches a promise.
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return;
  const uint32_t epoch = ++epoch_;
  epoll_event ended{EPOLLIN | EPOLLONESHOT, {.u64 = kChildEvent | epoch}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, ends[0], &ended);
  children_.push_back({epoch, Fd(ends[0])});
  inherited_end = Fd(ends[1]);
}

void Mailbox::AfterForkInParent() { inherited_end.Reset(); }

void Mailbox::AfterForkInChild() {
  inherited_end.Release();  // stays open until this process ends
  for (Fd* fd : {&memory_, &bell_read_, &bell_write_, &stop_, &epoll_}) fd->Reset();
  for (Child& child : children_) child.alive.Reset();
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
    const Local& local = locals_[index];
    const bool held = meta_.slot(index).held.load() == local.generation || local.held_at_home;
    stats.unclaimed += local.handed_out && !held;
  }
  for (const auto& lane : lanes_) stats.producers += lane != nullptr;
  stats.received_bytes = received_bytes_.load();
  struct stat info{};
  if (fstat(memory_.get(), &info) == 0) {
    stats.memory_bytes = static_cast<uint64_t>(info.st_blocks) * 512;
  }
  return stats;
}

}  // namespace dtorch::shm
