// Overwrites the shared memory at random, as a peer gone mad would, while both ends work on it.
// Each end must go on: with an error, a defect, a wrong value or none; never with a crash, an
// endless loop, an access outside of the lane, or an allocation of whatever size the memory says.
//
//   corruption MUTATIONS SEED [WORLD]    (the last repeats one world alone)

#include "dtorch/base/test_point.h"
#include "dtorch/shm/attachment.h"
#include "dtorch/shm/mailbox.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <signal.h>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <thread>
#include <type_traits>
#include <unistd.h>
#include <vector>

#include "value.h"

namespace {

constexpr size_t kLargestAllocation = size_t{64} << 20;

// ---- Mappings with guards -----------------------------------------------------------------------

constexpr size_t kGuard = size_t{1} << 20;

struct Known {
  std::byte* data = nullptr;
  size_t size = 0;
  uint64_t offset = 0;
};
constinit Known mappings[64];
constinit std::mutex mappings_mutex;

void* Map(void* at, size_t size, int prot, int flags, int fd, off_t offset) {
  return reinterpret_cast<void*>(syscall(SYS_mmap, at, size, prot, flags, fd, offset));
}

// Whether [data, data + bytes) lies in one lane, as mapped here.
bool LiesInLane(const std::byte* data, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mappings_mutex);
  for (const Known& each : mappings) {
    if (each.data && each.offset >= dtorch::shm::kDataAt && data >= each.data &&
        data <= each.data + each.size) {
      return bytes <= static_cast<uint64_t>(each.data + each.size - data);
    }
  }
  return false;
}

}  // namespace

// Shared mappings of files lie between pages that nobody may touch.
extern "C" void* mmap(void* at, size_t size, int prot, int flags, int fd, off_t offset) noexcept {
  if (at || fd < 0 || !(flags & MAP_SHARED)) return Map(at, size, prot, flags, fd, offset);
  void* room = Map(nullptr, size + 2 * kGuard, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return room;
  void* data =
      Map(static_cast<std::byte*>(room) + kGuard, size, prot, flags | MAP_FIXED, fd, offset);
  if (data == MAP_FAILED) return data;
  std::lock_guard<std::mutex> lock(mappings_mutex);
  for (Known& each : mappings) {
    if (each.data) continue;
    each = {static_cast<std::byte*>(data), size, static_cast<uint64_t>(offset)};
    return data;
  }
  std::abort();
}

extern "C" int munmap(void* at, size_t size) noexcept {
  {
    std::lock_guard<std::mutex> lock(mappings_mutex);
    for (Known& each : mappings) {
      if (each.data != at) continue;
      each = {};
      at = static_cast<std::byte*>(at) - kGuard;
      size += 2 * kGuard;
      break;
    }
  }
  return static_cast<int>(syscall(SYS_munmap, at, size));
}

#ifdef __SANITIZE_ADDRESS__
extern "C" const char* __asan_default_options() {
  return "max_allocation_size_mb=64:allocator_may_return_null=0:detect_leaks=1";
}
#else
// Not inlined: the compiler would see a mismatch of malloc and delete.
[[gnu::noinline]] void* operator new(size_t size) {
  if (size > kLargestAllocation) std::abort();
  if (void* made = std::malloc(size)) return made;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* made) noexcept { std::free(made); }
[[gnu::noinline]] void operator delete(void* made, size_t) noexcept { std::free(made); }
#endif

namespace dtorch {

void OnTestPoint(const char*) {}

namespace shm::test {
namespace {

constexpr uint32_t kMutationsInAWorld = 64;
constexpr uint32_t kSecondsForAWorld = 20;

char where[256] = "the start";

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "corruption: %s, in %s\n", what, where);
  std::abort();
}

void OnSignal(int signal) {
  (void)!write(2, where, std::strlen(where));
  (void)!write(2, signal == SIGALRM ? ": endless\n" : ": crashed\n", 10);
  ::signal(signal, SIG_DFL);
  raise(signal == SIGALRM ? SIGABRT : signal);
}

struct Counts {
  std::atomic<uint64_t> mutations{0};
  uint64_t values = 0, wrong = 0, errors = 0, defects = 0, broken = 0, thrown = 0;
} counts;

using Random = std::mt19937_64;

uint64_t Below(Random& random, uint64_t limit) { return random() % limit; }

// One mailbox, two producers of it, all in this process, and a hand that writes into it.
class World {
 public:
  explicit World(uint64_t seed)
      : random_(seed),
        meta_mapping_(mailbox_.address().memory_fd, 0, kMetaBytes),
        lanes_mapping_(mailbox_.address().memory_fd, kDataAt, 2 * kLaneBytes),
        meta_(meta_mapping_.data()) {
    for (auto& producer : producers_) producer = std::make_shared<Attachment>(mailbox_.address());
  }
  ~World() {
    CollectAll();
    received_.clear();
  }

  void Live(uint32_t steps, bool scribble_meanwhile) {
    std::atomic<bool> over{false};
    std::thread scribbler;
    if (scribble_meanwhile) {
      scribbler = std::thread([this, &over, seed = random_()] {
        Random random(seed);
        for (uint32_t i = 0; i < kMutationsInAWorld && !over; ++i) {
          Mutate(random);
          for (int pause = 0; pause < 200 && !over; ++pause) std::this_thread::yield();
        }
      });
    }
    for (uint32_t step = 0; step < steps; ++step) {
      Step();
      if (!scribble_meanwhile && step % 2) Mutate(random_);
      Read();
    }
    over = true;
    if (scribbler.joinable()) scribbler.join();
  }

 private:
  struct Promise {
    Mailbox::Place place;
    int producer;
  };

  // ---- What the two ends do ---------------------------------------------------------------------

  void Step() {
    try {
      Act();
    } catch (const std::runtime_error&) {
      ++counts.thrown;  // which it says to whoever calls: the lane is full, say
    }
  }

  void Act() {
    if (promises_.size() < 6 || Below(random_, 4) == 0) {
      if (promises_.size() >= 64) promises_.erase(promises_.begin());
      const Promise made{mailbox_.Allocate(), static_cast<int>(Below(random_, 2))};
      mailbox_.HandOut(made.place);
      promises_.push_back(made);
      producer(made).Hold(made.place.slot, made.place.generation);
    }
    const size_t index = Below(random_, promises_.size());
    const Promise chosen = promises_[index];
    const auto [slot, generation] = chosen.place;
    focus_ = slot;
    switch (Below(random_, 10)) {
      case 0:
      case 1:
      case 2:
        Send(chosen);
        break;
      case 3:
        producer(chosen).Drop(slot, generation);
        break;
      case 4:
        producer(chosen).HandOver(slot, generation);
        mailbox_.HoldAtHome(chosen.place);
        if (Below(random_, 2) == 0 && mailbox_.ClaimAtHome(chosen.place)) {
          Mutate(random_);
          mailbox_.AbandonAtHome(chosen.place);
        }
        mailbox_.DropAtHome(chosen.place);
        break;
      case 5:
        if (Below(random_, 2) == 0 && mailbox_.ClaimAtHome(chosen.place)) {
          Mutate(random_);
          mailbox_.FulfilAtHome(chosen.place);
        } else {
          mailbox_.Retract(chosen.place, Below(random_, 2) == 0);
        }
        promises_.erase(promises_.begin() + static_cast<ptrdiff_t>(index));
        break;
      case 6:
        Mutate(random_);
        mailbox_.BeginWait(chosen.place);
        if (auto event = mailbox_.CollectOne(chosen.place)) Check(*std::move(event));
        mailbox_.EndWait(chosen.place);
        break;
      case 7:
        mailbox_.OwnerDropped(chosen.place);
        producer(chosen).Trim(Below(random_, 1 << 20));
        break;
      case 8:
        received_.clear();  // their blocks go back
        break;
      case 9:
        mailbox_.BeginLookOut();
        Mutate(random_);
        if (mailbox_.HasNews()) {
          if (auto event = mailbox_.Collect()) mailbox_.PutBack(*std::move(event));
        }
        mailbox_.EndLookOut();
        break;
    }
  }

  void Send(const Promise& promise) {
    auto& attachment = producer(promise);
    const auto [slot, generation] = promise.place;
    if (!attachment.Claim(slot, generation)) return;
    static constexpr uint64_t kSizes[] = {0, 8, 100, 128, 129, 3000, 20000, 300000};
    const uint64_t bytes = kSizes[Below(random_, std::size(kSizes))];
    std::vector<int64_t> sizes(Below(random_, 3) ? 1 : 1 + Below(random_, kMaxDims), 1);
    sizes[Below(random_, sizes.size())] = static_cast<int64_t>(bytes);
    Attachment::Value value;
    value.payload = Payload::kTensor;
    value.sizes = sizes.data();
    value.dims = sizes.size();
    value.bytes = bytes;
    Attachment::Loan loan{};
    if (bytes > kInlineBytes && Below(random_, 4) == 0) {
      loan = Attachment::Lend(producers_[promise.producer], bytes);
      value.data = loan.data;
    }
    Attachment::Place place;
    try {
      place = attachment.Prepare(slot, value);
    } catch (const std::runtime_error&) {
      attachment.Abandon(slot, generation);
      throw;
    }
    std::byte* to = place.to ? place.to : loan.data;
    if (to) Fill(to, 0, bytes, random_());
    if (Below(random_, 2)) Mutate(random_);
    if (Below(random_, 16) == 0) {
      attachment.FreeBlock(place.block);
      attachment.Abandon(slot, generation);
    } else {
      attachment.Publish(slot, generation);
    }
  }

  void Read() {
    CollectAll();
    const auto stats = mailbox_.GetStats();
    if (stats.outstanding > kSlots || stats.producers > kLanes) Fail("impossible statistics");
    mailbox_.Sleep(0);
    mailbox_.HasMore();
    for (const auto& each : producers_) {
      each->GetStats();
      each->OwnerLives();
    }
    for (const Promise& each : promises_) {
      producer(each).IsPending(each.place.slot, each.place.generation);
      producer(each).IsCancelled(each.place.slot, each.place.generation);
      mailbox_.IsReady(each.place);
    }
    if (received_.size() > 8) received_.erase(received_.begin());
  }

  void CollectAll() {
    for (int told = 0; auto event = mailbox_.Collect(); ++told) {
      if (told > 1000) Fail("events without end");
      Check(*std::move(event));
    }
  }

  // ---- What the consumer is given ---------------------------------------------------------------

  // As codec.cpp: what is not refused is a tensor, whose every element can be read.
  void Check(Mailbox::Event event) {
    if (event.broken) {
      ++counts.broken;
      return;
    }
    if (event.question) {
      const bool has_memory = Below(random_, 2) == 0;
      mailbox_.Answer(event.place, *event.question, has_memory ? "memory" : "",
                      std::make_shared<int>());
      return;
    }
    Received& received = event.received;
    if (!received.defect.empty()) {
      ++counts.defects;
      return;
    }
    if (received.payload == Payload::kDeviceTensor) {
      if (!received.memory) Fail("a value without memory of a device");
      return;
    }
    if (received.block && !received.keep) Fail("a value without memory");
    if (received.sizes.size() > kMaxDims) Fail("a value of too many dimensions");
    if (reinterpret_cast<uintptr_t>(received.block) % 64 != 0) Fail("a value that is not aligned");
    if (received.block ? !LiesInLane(received.block, received.bytes)
                       : received.bytes > kInlineBytes) {
      Fail("a value that leaves its memory");
    }
    const bool is_whole = received.bytes >= 8 && received.bytes < (8 << 20) &&
                          IsWhole(received.data(), received.bytes);
    Touch(received);
    uint64_t bytes = uint64_t{1} << (received.dtype % 5);
    bool possible = received.payload == Payload::kTensor && received.dtype < 45;
    for (const int64_t size : received.sizes) {
      possible = possible && size >= 0 &&
                 !__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes);
    }
    if (!possible || bytes != received.bytes) {
      ++counts.errors;
    } else if (is_whole || bytes == 0) {
      ++counts.values;
    } else {
      ++counts.wrong;
    }
    received_.push_back(std::move(received));
  }

  // All of it; of what is very large the ends, since a page that is read takes memory.
  static void Touch(const Received& received) {
    constexpr uint64_t kEnds = 1 << 20;
    volatile std::byte* data =
        received.block ? received.block : const_cast<std::byte*>(received.in_slot.data());
    for (uint64_t at = 0; at < received.bytes; ++at) {
      data[at] = data[at];
      if (at == kEnds && received.bytes > 2 * kEnds) at = received.bytes - kEnds;
    }
  }

  // ---- The hand ---------------------------------------------------------------------------------

  template <typename T>
  static void Write(Random& random, T& word) {
    using Bits = std::conditional_t<sizeof(T) == 1, uint8_t,
                                    std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
    static_assert(sizeof(Bits) == sizeof(T));
    auto* at = reinterpret_cast<Bits*>(&word);
    Bits bits = __atomic_load_n(at, __ATOMIC_RELAXED);
    switch (Below(random, 8)) {
      case 0:
        bits = 0;
        break;
      case 1:
        bits = static_cast<Bits>(~Bits{0});
        break;
      case 2:
        bits = static_cast<Bits>(random());
        break;
      case 3:
        bits = static_cast<Bits>(bits ^ Bits{1} << Below(random, 8 * sizeof(T)));
        break;
      case 4:
        bits = static_cast<Bits>(Bits{1} << Below(random, 8 * sizeof(T)));
        break;
      case 5:
        bits = static_cast<Bits>(bits + 1 - 2 * Below(random, 2));
        break;
      case 6:
        bits = static_cast<Bits>(kLaneBytes - Below(random, 4) * 64);
        break;
      case 7:
        bits = static_cast<Bits>(Below(random, 1 << 16) * 64);
        break;
    }
    __atomic_store_n(at, bits, __ATOMIC_RELAXED);
  }

  std::byte* LaneData(uint64_t lane) { return lanes_mapping_.data() + lane * kLaneBytes; }

  void Mutate(Random& random) {
    ++counts.mutations;
    Slot& slot =
        meta_.slot(Below(random, 2) ? focus_.load() : static_cast<uint32_t>(Below(random, 8)));
    Description& description = slot.description;
    Header& header = meta_.header();
    const auto lane_index = static_cast<uint32_t>(Below(random, 2));
    Lane& lane = meta_.lane(lane_index);
    // A block that may be in use, or any.
    const uint64_t block = Below(random, 4) ? description.block % kLaneBytes / 64 * 64
                                            : Below(random, kLaneBytes / 64) * 64;
    auto& block_header = *reinterpret_cast<BlockHeader*>(
        LaneData(lane_index) + (block >= sizeof(BlockHeader) ? block - sizeof(BlockHeader) : 0));
    switch (Below(random, 34)) {
      case 0:
        return Write(random, slot.word);
      case 1: {  // ready, as if it were published
        SlotWord word = SlotWord::Unpack(slot.word.load());
        word.state = State::kReady;
        word.lane = static_cast<uint16_t>(Below(random, 4) ? lane_index : random());
        slot.word.store(word.Pack());
        return SetBits(random, slot);
      }
      case 2: {
        SlotWord word = SlotWord::Unpack(slot.word.load());
        word.state = static_cast<State>(Below(random, 6));
        slot.word.store(word.Pack());
        return SetBits(random, slot);
      }
      case 3: {
        SlotWord word = SlotWord::Unpack(slot.word.load());
        word.generation += static_cast<uint32_t>(Below(random, 3)) - 1;
        return slot.word.store(word.Pack());
      }
      case 4:
        return Write(random, slot.held);
      case 5:
        return Write(random, slot.handed_over);
      case 6:
        return Write(random, slot.handovers);
      case 7:
        return Write(random, slot.bell);
      case 8:
        return Write(random, slot.waiters);
      case 9:
        return Write(random, description.payload);
      case 10:
        return Write(random, description.dtype);
      case 11:
        return Write(random, description.dims);
      case 12:
        return Write(random, description.in_block);
      case 13:
      case 14:
        return Write(random, description.block);
      case 15:
      case 16:
        return Write(random, description.bytes);
      case 17:
        return Write(random, description.sizes[Below(random, kInlineDims)]);
      case 18:
        return Write(random, lane.owner);
      case 19:
        if (Below(random, 2)) return lane.returned.store(block);
        return Write(random, lane.returned);
      case 20:
        return Write(random, lane.dropping);
      case 21:
        return Write(random, header.armed);
      case 22:
        return Write(random, header.new_lane);
      case 23:
        return Write(random, header.lanes_used);
      case 24:
        return Write(random, meta_.summary()[Below(random, kSlots / 64 / 64)]);
      case 25:
        return Write(random, meta_.ready()[Below(random, 4) ? 0 : Below(random, kSlots / 64)]);
      case 26:
        return Write(random, meta_.hold(lane_index, static_cast<uint32_t>(Below(random, 8))));
      case 27:  // a link, to itself or to another block
        if (Below(random, 2)) {
          block_header.next = block;
          return lane.returned.store(block);
        }
        return Write(random, block_header.next);
      case 28:
        return Write(random, block_header.bytes);
      case 29:
        return Write(random, lane.alive);
      case 30:
        return Write(random, lane.alive_inode);
      case 31:
        return Write(random, lane.forking);
      case 32:
        if (Below(random, 2)) return lane.forked_from.store(Below(random, 4));
        return Write(random, lane.forked_from);
      case 33: {  // some bytes, anywhere
        std::byte* at = Below(random, 2)   ? reinterpret_cast<std::byte*>(&slot)
                        : Below(random, 2) ? LaneData(lane_index) + block / 2
                                           : meta_mapping_.data() + kLanesAt;
        for (uint64_t i = Below(random, 64); i > 0; --i) {
          at[Below(random, sizeof(Slot))] = static_cast<std::byte>(random());
        }
        return;
      }
    }
  }

  void SetBits(Random& random, Slot& slot) {
    if (Below(random, 2)) return;
    const auto index = static_cast<uint32_t>(&slot - &meta_.slot(0));
    meta_.ready()[index / 64].fetch_or(uint64_t{1} << index % 64);
    meta_.summary()[0].fetch_or(1);
  }

  Attachment& producer(const Promise& promise) { return *producers_[promise.producer]; }

  Random random_;
  Mailbox mailbox_;
  Mapping meta_mapping_, lanes_mapping_;
  Meta meta_;
  std::shared_ptr<Attachment> producers_[2];
  std::atomic<uint32_t> focus_{0};  // the slot that is worked on
  std::vector<Promise> promises_;
  std::vector<Received> received_;
};

int Run(uint64_t mutations, uint64_t seed, int64_t only) {
  for (const int each : {SIGALRM, SIGSEGV, SIGBUS}) {
#ifdef __SANITIZE_ADDRESS__
    if (each != SIGALRM) continue;
#endif
    signal(each, OnSignal);
  }
  for (uint64_t number = 0; counts.mutations < mutations; ++number) {
    if (only >= 0) number = static_cast<uint64_t>(only);
    std::snprintf(where, sizeof(where), "world %llu of seed %llu",
                  static_cast<unsigned long long>(number), static_cast<unsigned long long>(seed));
    alarm(kSecondsForAWorld);
    World(seed * 1000003 + number).Live(kMutationsInAWorld, number % 4 == 3);
    if (only >= 0) break;
  }
  std::printf(
      "mutations=%llu values=%llu wrong=%llu errors=%llu defects=%llu broken=%llu thrown=%llu\n",
      static_cast<unsigned long long>(counts.mutations.load()),
      static_cast<unsigned long long>(counts.values), static_cast<unsigned long long>(counts.wrong),
      static_cast<unsigned long long>(counts.errors),
      static_cast<unsigned long long>(counts.defects),
      static_cast<unsigned long long>(counts.broken),
      static_cast<unsigned long long>(counts.thrown));
  return 0;
}

}  // namespace
}  // namespace shm::test
}  // namespace dtorch

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: corruption MUTATIONS SEED [WORLD]\n");
    return 2;
  }
  return dtorch::shm::test::Run(std::strtoull(argv[1], nullptr, 10),
                                std::strtoull(argv[2], nullptr, 10),
                                argc > 3 ? std::strtoll(argv[3], nullptr, 10) : -1);
}
