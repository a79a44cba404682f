#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

// The bytes of a mailbox: what a producer process and the consumer process agree on. Nothing in
// here is a pointer. What is read from here was written by another process and is checked before
// it is used.
//
// A mailbox is one sparse memfd of the consumer:
//
//   header | summary | ready bits | lanes | slots | holds of every lane | regions of data
//
// A *slot* is the meeting point of one promise. A *lane* is claimed by one producer process: its
// holds say which promises it may still fulfil. A *region* is where it puts large values: each
// producer has a new one, which lives on when the lane is another's, as long as a value in it does.
// There is no lock in shared memory, so none can be left held.
namespace dtorch::shm {

inline constexpr uint64_t kMagic = 0x31786f6264746f72;  // "rotdbox1"
inline constexpr uint32_t kVersion = 6;

inline constexpr uint32_t kSlots = 1u << 20;    // promises that can be outstanding
inline constexpr uint32_t kLanes = 512;         // producer processes at a time
inline constexpr uint32_t kRegions = 1u << 20;  // and in all, until the first region is used again
inline constexpr uint64_t kLaneBytes = uint64_t{1} << 34;
inline constexpr uint16_t kCancelled = 1;    // in place of a lane in a free word: why it is free
inline constexpr uint16_t kAtHome = 0xffff;  // in place of one in a claimed word: the consumer
static_assert(kLanes <= kAtHome);

// The life of a slot, in the low byte of its word:
//
//                                        asking --> answering
//                                     Ask ^  |         |
//                                         |  v         v Answer
//   free --Allocate--> pending --Claim--> claimed --Publish--> ready --Take--> free
//                         |                  |                  |
//                         |                  |                  `--the claimant left--> forsaken
//                         |                  |--the claimant abandons it--> pending
//                         |                  `--the claimant died--> pending, or free if nobody
//                         |                                          else holds it (broken)
//                         |--ClaimAtHome--> claimed by the consumer --> free, or pending again
//                         |--the last holder went away--> free (broken)
//                         `--the owner fulfils or cancels it, or has dropped the future--> free
//
// Every move is one change of the whole word, which names the claimant's lane and the slot's
// generation, and a compare-and-swap where another process may move it meanwhile: no crash leaves a
// claim without an owner, and no stale token hits a slot that is used again. A producer makes the
// moves Claim, Ask and Publish; all others are the consumer's, but that a claimant may take its
// question back, and its claim. Between Claim and Publish the description is the claimant's; while
// it is answered, the consumer's. Whoever abandons its claim just then waits for nobody: it leaves
// it forsaken, and the consumer makes it pending when its answer is written, which nobody else may
// write to before. Its death while it asks is that of any claimant.
//
// What is asked for is memory of a device, which is the consumer's: the claimant copies the value
// there. The answer says where it is, as only that device's driver understands; or is empty, and
// the value goes through the host.
//
// Who is woken. A producer that has published sets the slot's ready bit. Then, if a thread of the
// consumer waits for this very slot (`waiters`), it rings the slot's bell, and that thread takes
// the value; else it rings the mailbox's, and the listening thread does. A thread that stops
// waiting lowers `waiters` and then looks at the ready bit: what was published meanwhile to a bell
// that nobody hears any more is passed on to the listening thread.
enum class State : uint8_t {
  kFree = 0,
  kPending = 1,
  kClaimed = 2,
  kReady = 3,
  kAsking = 4,
  kAnswering = 5,
  kForsaken = 6,
};

struct SlotWord {
  State state = State::kFree;
  uint16_t lane = 0;
  uint32_t generation = 0;

  uint64_t Pack() const {
    return uint64_t{generation} << 32 | uint64_t{lane} << 8 | static_cast<uint64_t>(state);
  }
  static SlotWord Unpack(uint64_t word) {
    return {static_cast<State>(word & 0xff), static_cast<uint16_t>(word >> 8),
            static_cast<uint32_t>(word >> 32)};
  }
};

enum class Payload : uint8_t {
  kNothing = 0,
  kTensor = 1,
  kError = 2,
  kDeviceTensor = 3,  // its bytes are in memory that the consumer has given the claimant
};

inline constexpr size_t kMaxDims = 64;
inline constexpr size_t kInlineDims = 8;
inline constexpr size_t kInlineBytes = 128;

// What a producer publishes. Small values lie in the slot itself. Large ones, and shapes of more
// dimensions than fit, lie in a block of the producer's lane: first the bytes, then the shape.
struct Description {
  Payload payload;
  uint8_t dtype;
  uint8_t dims;
  uint8_t in_block;     // whether the bytes are in the lane
  uint8_t device_type;  // where the value is wanted; the bytes are here. 0 is the CPU
  int8_t device_index;
  uint16_t padding;
  uint64_t block;  // offset in the lane's data; 0 is none. In a question, which one of the lane's
  uint64_t bytes;  // of the value; in an answer, of the answer, which lies in `value`
  int64_t sizes[kInlineDims];
  alignas(16) std::byte value[kInlineBytes];
};

// Where in a block a long shape lies: behind the value.
constexpr uint64_t ShapeOffset(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

struct alignas(64) Slot {
  std::atomic<uint64_t> word;
  std::atomic<uint32_t> held;         // the last generation that a producer has unpickled
  std::atomic<uint32_t> handed_over;  // a producer has pickled it on, and nobody has unpickled that
  std::atomic<uint32_t> handovers;    // how often that has happened, in all generations
  std::atomic<uint32_t> bell;         // a counter, and the futex on which its waiters sleep
  std::atomic<uint32_t> waiters;      // threads of the consumer; written by the consumer alone
  std::atomic<uint32_t> answers;      // a counter, and the futex on which the claimant sleeps
  Description description;
};
static_assert(sizeof(Slot) == 256);

// Whether generation `a` is a later one of the same slot than `b`.
constexpr bool IsLater(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) > 0; }

/// Rings the consumer that may sleep, with `write` if it is armed. Disarmed only then, and only if
/// it was not armed anew meanwhile: a ringer that dies in between has kept nobody from ringing.
template <typename Write>
void RingIfArmed(std::atomic<uint32_t>& armed, const Write& write) {
  uint32_t seen = armed.load();
  if (seen == 0) return;
  write();
  armed.compare_exchange_strong(seen, 0);
}

struct alignas(64) Lane {
  std::atomic<uint64_t> owner;     // ProcessId::ToWord, written before any claim; or as below
  std::atomic<uint64_t> returned;  // blocks that the consumer gives back: a stack, by offset
  std::atomic<uint32_t> region;    // one more than the index of its data; 0 is none yet
  std::atomic<uint32_t> dropping;  // one more than the slot whose hold is being dropped; 0 is none
  // One more than the number of the owner's descriptor that is open for as long as it is a producer
  // (see WatchDescriptor); 0 is none yet. Its inode is written before.
  std::atomic<uint32_t> alive;
  std::atomic<uint32_t> forking;  // forks whose children have not taken over the holds yet
  // One more than the lane whose owner has forked this one's, if memory that it had lent may be
  // looked at here.
  std::atomic<uint32_t> forked_from;
  std::atomic<uint64_t> alive_inode;
};
static_assert(sizeof(Lane) == 64);

inline constexpr uint64_t kFreeLane = 0;

struct Header {
  uint64_t magic;
  uint32_t version;
  uint32_t slots;
  uint32_t lanes;
  uint32_t padding;
  uint64_t lane_bytes;
  uint8_t nonce[16];
  std::atomic<uint32_t> armed;  // the consumer sleeps, or is about to: ring. Another number
                                // each time, so that a late ringer disarms nothing newer
  std::atomic<uint32_t> next_region;
  std::atomic<uint32_t> new_lane;    // a lane was claimed since the consumer has looked
  std::atomic<uint32_t> lanes_used;  // lanes with this index and above were never claimed
  std::atomic<uint32_t> slots_used;  // the same of slots
};

// In front of every block of a lane; the value starts right behind it.
struct alignas(64) BlockHeader {
  uint64_t bytes;  // behind the header
  uint64_t next;   // in the stack of returned blocks; 0 is the end
};
static_assert(sizeof(BlockHeader) == 64);

inline constexpr uint64_t kPage = 4096;
inline constexpr uint64_t kSummaryAt = kPage;  // a bit for each word of ready bits
inline constexpr uint32_t kSlotsOfSummaryWord = 64 * 64;
inline constexpr uint64_t kReadyAt = kSummaryAt + kPage;
inline constexpr uint64_t kLanesAt = kReadyAt + kSlots / 8;
inline constexpr uint64_t kSlotsAt = kLanesAt + kLanes * sizeof(Lane);
inline constexpr uint64_t kHoldsAt = kSlotsAt + kSlots * sizeof(Slot);
inline constexpr uint64_t kHoldsBytes = kSlots * sizeof(uint32_t);  // of one lane
inline constexpr uint64_t kMetaBytes = kHoldsAt + kLanes * kHoldsBytes;
inline constexpr uint64_t kDataAt = uint64_t{1} << 34;
inline constexpr uint64_t kTotalBytes = kDataAt + kRegions * kLaneBytes;

static_assert(kSlots / 64 / 64 * 8 <= kPage);
static_assert(kLanesAt % kPage == 0 && kSlotsAt % kPage == 0 && kHoldsAt % kPage == 0);
static_assert(kMetaBytes <= kDataAt);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// The parts of a mapping of the first kMetaBytes.
class Meta {
 public:
  Meta() = default;
  explicit Meta(std::byte* base) : base_(base) {}

  Header& header() const { return *At<Header>(0); }
  std::atomic<uint64_t>* summary() const { return At<std::atomic<uint64_t>>(kSummaryAt); }
  std::atomic<uint64_t>* ready() const { return At<std::atomic<uint64_t>>(kReadyAt); }
  Lane& lane(uint32_t index) const { return At<Lane>(kLanesAt)[index]; }
  Slot& slot(uint32_t index) const { return At<Slot>(kSlotsAt)[index]; }
  /// The generation in which a lane holds a slot; 0 is never.
  std::atomic<uint32_t>& hold(uint32_t lane, uint32_t slot) const {
    return At<std::atomic<uint32_t>>(kHoldsAt + lane * kHoldsBytes)[slot];
  }

 private:
  template <typename T>
  T* At(uint64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  std::byte* base_ = nullptr;
};

}  // namespace dtorch::shm
