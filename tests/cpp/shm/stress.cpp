// Many threads of a consumer and of its producers at once, with a producer process that is killed
// and started anew, and forks in between; meant for ThreadSanitizer. Every promise must end, with
// the value that is its own, or broken.
//
//   stress SECONDS SEED

#include "dtorch/base/test_point.h"
#include "dtorch/shm/attachments.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fcntl.h>
#include <mutex>
#include <random>
#include <signal.h>
#include <spawn.h>
#include <string>
#include <string_view>

#include "consumer.h"
#include "value.h"
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

extern char** environ;

namespace dtorch {

namespace {

// What comes back from the consumer, by another mapping, ThreadSanitizer does not see come.
[[maybe_unused]] char published;
#ifdef __SANITIZE_THREAD__
void BeforePublish() { __tsan_release(&published); }
void OnBlockTaken() { __tsan_acquire(&published); }
#else
void BeforePublish() {}
void OnBlockTaken() {}
#endif

}  // namespace

// Other threads get on at every step of the protocol, now and then.
void OnTestPoint(const char* name) {
  if (std::string_view(name) == "block taken") OnBlockTaken();
  thread_local uint32_t passed = 0;
  if (++passed % 7 == 0) std::this_thread::yield();
}

namespace shm::test {
namespace {

using Random = std::mt19937_64;

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "stress: %s\n", what.c_str());
  std::abort();
}

uint64_t SeedFor(const Token& token) { return uint64_t{token.generation} << 32 | token.slot; }

// ---- Producers ----------------------------------------------------------------------------------

// Tokens on their way to a producer thread of this process.
class Queue {
 public:
  void Push(Token token) {
    std::lock_guard<std::mutex> lock(mutex_);
    tokens_.push_back(token);
    pushed_.notify_one();
  }
  bool Pop(Token& token) {
    std::unique_lock<std::mutex> lock(mutex_);
    pushed_.wait(lock, [this] { return closed_ || !tokens_.empty(); });
    if (tokens_.empty()) return false;
    token = tokens_.front();
    tokens_.pop_front();
    return true;
  }
  void Close() {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    pushed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable pushed_;
  std::deque<Token> tokens_;
  bool closed_ = false;
};

void Send(const std::shared_ptr<Attachment>& attachment, const Token& token, Random& random) {
  if (!attachment->OwnerLives()) return;
  static constexpr uint64_t kSizes[] = {8, 100, 129, 5000, 40000, 300000};
  const uint64_t bytes = kSizes[random() % std::size(kSizes)];
  Attachment::Loan loan{};
  if (bytes > kInlineBytes && random() % 4 == 0) loan = Attachment::Lend(attachment, bytes);
  if (loan.data) OnBlockTaken();
  std::vector<std::byte> own(loan.data ? 0 : bytes);
  std::byte* from = loan.data ? loan.data : own.data();
  Fill(from, 0, bytes, SeedFor(token));
  if (!attachment->Claim(token.slot, token.generation)) return;
  const std::vector<int64_t> sizes(random() % 4 ? 1 : 12, static_cast<int64_t>(bytes));
  Attachment::Value value;
  value.payload = Payload::kTensor;
  value.sizes = sizes.data();
  value.dims = sizes.size();
  value.bytes = bytes;
  value.data = from;
  const auto place = attachment->Prepare(token.slot, value);
  const bool cold = place.cold && bytes >= 16384;
  if (cold) {
    attachment->FillCold(place, from, bytes);
  } else if (place.to) {
    std::memcpy(place.to, from, bytes);
  }
  if (random() % 16 == 0) {
    attachment->FreeBlock(place.block);
    attachment->Abandon(token.slot, token.generation);
    return;
  }
  BeforePublish();
  if (!attachment->Publish(token.slot, token.generation)) Fail("a living producer's claim is gone");
  if (cold) attachment->WarmUp(place, bytes);
}

// Asks for memory of a device. What was claimed is published, or abandoned.
void SendThroughDevice(Attachment& attachment, const Token& token, Random& random) {
  const uint64_t bytes = 1000 + random() % 4;
  const auto slot = token.slot, generation = token.generation;
  if (!attachment.Claim(slot, generation)) return;
  attachment.Ask(slot, generation, /*device_type=*/1, /*device_index=*/0, bytes);
  if (random() % 8 == 0) return attachment.Abandon(slot, generation);
  const auto limit = Deadline::AfterMs(random() % 2 ? 0 : 1000);
  const auto answer = attachment.WaitForAnswer(slot, generation, limit);
  if (answer && *answer != (bytes % 2 ? "" : std::to_string(bytes))) Fail("another answer");
  if (!answer || answer->empty()) return attachment.Abandon(slot, generation);
  const int64_t size[] = {static_cast<int64_t>(bytes)};
  Attachment::Value value;
  value.payload = Payload::kDeviceTensor;
  value.sizes = size;
  value.dims = 1;
  value.bytes = bytes;
  attachment.Prepare(slot, value);
  if (!attachment.Publish(slot, generation)) Fail("a living producer's claim is gone");
}

// What a producer does with a token, and lets go of it.
void Produce(const Token& token, Random& random) {
  const auto attachment = AttachTo(token.mailbox);
  attachment->Hold(token.slot, token.generation);
  if (random() % 8 == 0) attachment->Hold(token.slot, token.generation);  // unpickled twice
  if (random() % 8 == 0) {  // on to somebody else, who is here as well
    attachment->HandOver(token.slot, token.generation);
    attachment->Hold(token.slot, token.generation);
    attachment->Drop(token.slot, token.generation);
  }
  if (random() % 8 == 0 && attachment->OwnerLives()) SendThroughDevice(*attachment, token, random);
  if (random() % 8 != 0) Send(attachment, token, random);
  if (random() % 32 == 0) attachment->Trim(random() % (1 << 20));
  if (random() % 32 == 0) attachment->GetStats();
  attachment->Drop(token.slot, token.generation);
  attachment->Drop(token.slot, token.generation);
}

// The other process: tokens come on stdin, a line each.
int RunPeer() {
  std::mutex mutex;
  auto work = [&](uint64_t seed) {
    Random random(seed);
    char line[256];
    for (;;) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        if (!std::fgets(line, sizeof(line), stdin)) return;
      }
      std::string text(line);
      text.pop_back();
      try {
        Produce(Token::FromText(text), random);
      } catch (const std::runtime_error&) {
        return;  // the consumer has ended
      }
    }
  };
  std::thread other(work, getpid());
  work(getpid() + 1);
  other.join();
  return 0;
}

class PeerProcess {
 public:
  explicit PeerProcess(const char* program) : program_(program) { Start(); }
  ~PeerProcess() { Kill(); }

  void Push(const Token& token) {
    const std::string line = token.ToText() + "\n";
    std::lock_guard<std::mutex> lock(mutex_);
    (void)!write(to_, line.data(), line.size());  // if it is full, the token is lost
  }
  void Restart() {
    std::lock_guard<std::mutex> lock(mutex_);
    Kill();
    Start();
  }

 private:
  void Start() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) Fail("pipe");
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[0], 0);
    std::string role = "peer";
    char* argv[] = {const_cast<char*>(program_), role.data(), nullptr};
    if (posix_spawn(&pid_, program_, &actions, nullptr, argv, environ) != 0) Fail("posix_spawn");
    posix_spawn_file_actions_destroy(&actions);
    close(ends[0]);
    to_ = ends[1];
  }
  void Kill() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    close(to_);
  }

  const char* const program_;
  std::mutex mutex_;
  pid_t pid_ = 0;
  int to_ = -1;
};

// ---- The consumer -------------------------------------------------------------------------------

struct Counts {
  std::atomic<uint64_t> made{0}, values{0}, through_device{0}, broken{0}, dropped{0};
} counts;

void OnEnd(Consumer::Promise& promise) {
  if (promise.end == Consumer::End::kBroken) {
    ++counts.broken;
    return;
  }
  const Received& received = promise.received;
  if (promise.end == Consumer::End::kDefect) Fail(received.defect);
  if (received.payload == Payload::kDeviceTensor) {
    if (*static_cast<uint64_t*>(received.memory.get()) != received.bytes) Fail("another memory");
    ++counts.through_device;
    return;
  }
  if (SeedOf(received.data()) != SeedFor(promise.token)) Fail("the value of another promise");
  if (!IsWhole(received.data(), received.bytes)) Fail("a torn value");
  ++counts.values;
}

void Own(Consumer& consumer, Queue& queue, PeerProcess& peer, uint64_t seed,
         const std::atomic<bool>& over) {
  Random random(seed);
  std::vector<Consumer::PromisePtr> kept;
  auto take_back = [&](const Consumer::PromisePtr& promise) {
    if (promise->end == Consumer::End::kNone && consumer.Drop(promise, random() % 2)) {
      ++counts.dropped;
    }
  };
  while (!over) {
    auto promise = consumer.Make(OnEnd);
    ++counts.made;
    auto& mailbox = consumer.mailbox();
    const auto place = promise->place();
    if (random() % 16 == 0) {  // never leaves this process
      if (random() % 2) {
        mailbox.HoldAtHome(place);
        mailbox.DropAtHome(place);
      } else {
        mailbox.OwnerDropped(place);
      }
    } else {
      mailbox.HandOut(place);
      mailbox.OwnerDropped(place);
      for (uint64_t producers = 1 + random() % 2; producers > 0; --producers) {
        if (random() % 2) {
          queue.Push(promise->token);
        } else {
          peer.Push(promise->token);
        }
      }
    }
    if (random() % 4 == 0 && mailbox.ClaimAtHome(place)) {
      if (random() % 2) std::this_thread::yield();
      mailbox.AbandonAtHome(place);
    }
    std::vector<std::thread> waiters;
    const auto limit = [&] { return Deadline::AfterMs(static_cast<int64_t>(random() % 4)); };
    if (random() % 8 == 0) {
      waiters.emplace_back([&, deadline = limit()] { consumer.Wait(promise, deadline, [] {}); });
    }
    if (random() % 8 == 0) {
      waiters.emplace_back([&, deadline = limit(), takes = random() % 2 == 0] {
        consumer.LookOut(promise, deadline, takes);
      });
    }
    if (random() % 2) consumer.LookOut(promise, Deadline::AfterMs(1), random() % 4 != 0);
    if (random() % 2) consumer.Wait(promise, limit(), [] {});
    for (auto& waiter : waiters) waiter.join();
    if (random() % 32 == 0) mailbox.GetStats();
    kept.push_back(std::move(promise));
    if (kept.size() > 64) {
      // Some are not waited for any more; some values are dropped late.
      const size_t index = random() % kept.size();
      take_back(kept[index]);
      kept.erase(kept.begin() + static_cast<ptrdiff_t>(index));
    }
  }
}

// What the library's own handlers do.
void Fork(Mailbox& mailbox) {
  mailbox.BeforeFork();
  const pid_t pid = fork();
  if (pid == 0) {
    mailbox.AfterForkInChild();
    _exit(0);
  }
  mailbox.AfterForkInParent();
  waitpid(pid, nullptr, 0);
}

int Run(const char* program, int seconds, uint64_t seed) {
  signal(SIGPIPE, SIG_IGN);
  Consumer consumer(2);
  Queue queue;
  PeerProcess peer(program);
  std::atomic<bool> over{false};

  std::vector<std::thread> owners, producers;
  for (uint64_t i = 0; i < 2; ++i) {
    owners.emplace_back([&, i] { Own(consumer, queue, peer, seed + i, over); });
  }
  for (uint64_t i = 0; i < 2; ++i) {
    producers.emplace_back([&, i] {
      Random random(seed + 100 + i);
      for (Token token; queue.Pop(token);) Produce(token, random);
    });
  }
  const auto end = Deadline::AfterMs(seconds * int64_t{1000});
  for (int round = 1; !end.HasPassed(); ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    consumer.mailbox().GetStats();
    consumer.mailbox().WakeAnother();
    for (const auto& each : AllAttachments()) each->Trim(1 << 20);
    SetCacheLimit(round % 2 ? 1 << 16 : 1 << 30);
    if (round % 5 == 0) Fork(consumer.mailbox());
    if (round % 20 == 0) peer.Restart();
  }
  over = true;
  for (auto& owner : owners) owner.join();
  queue.Close();
  for (auto& producer : producers) producer.join();
  peer.Restart();  // what the last one held is broken

  // What is left was never unpickled, or was on its way to somebody when its last producer died.
  const Mapping mapping(consumer.mailbox().address().memory_fd, 0, kMetaBytes);
  const auto limit = Deadline::AfterMs(20000);
  for (const auto& promise : consumer.Outstanding()) {
    const auto [index, generation] = promise->place();
    const Slot& slot = Meta(mapping.data()).slot(index);
    while (promise->end == Consumer::End::kNone && slot.held == generation &&
           slot.handed_over != generation) {
      if (limit.HasPassed()) Fail("a promise without end");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (consumer.Drop(promise)) ++counts.dropped;
  }
  while (consumer.mailbox().GetStats().outstanding != 0) {
    if (limit.HasPassed()) Fail("slots that are not free");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const uint64_t ended = counts.values + counts.through_device + counts.broken + counts.dropped;
  std::printf("made=%llu values=%llu through_device=%llu broken=%llu dropped=%llu\n",
              static_cast<unsigned long long>(counts.made),
              static_cast<unsigned long long>(counts.values),
              static_cast<unsigned long long>(counts.through_device),
              static_cast<unsigned long long>(counts.broken),
              static_cast<unsigned long long>(counts.dropped));
  if (ended != counts.made) Fail("promises that ended twice, or never");
  return 0;
}

}  // namespace
}  // namespace shm::test
}  // namespace dtorch

int main(int argc, char** argv) {
  using namespace dtorch::shm::test;
  if (argc == 2 && std::string(argv[1]) == "peer") return RunPeer();
  if (argc != 3) {
    std::fprintf(stderr, "usage: stress SECONDS SEED\n");
    return 2;
  }
  return Run("/proc/self/exe", std::atoi(argv[1]), std::strtoull(argv[2], nullptr, 10));
}
