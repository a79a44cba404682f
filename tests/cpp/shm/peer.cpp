// A process of the fault tests (tests/test_faults.py): a consumer or a producer, which does what it
// is told on stdin, a command a line, and answers a line on stdout. It can be told to stop or to
// kill itself at a named point of the library, or to have the thread that comes there wait.

#include "dtorch/base/test_point.h"
#include "dtorch/shm/attachments.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <dirent.h>
#include <fcntl.h>
#include <fstream>
#include <iostream>
#include <map>
#include <signal.h>
#include <sstream>
#include <string>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "consumer.h"
#include "value.h"

namespace dtorch {
namespace {

// One write, so that the lines of threads do not mix.
[[gnu::format(printf, 1, 2)]] void Say(const char* format, ...) {
  char line[512];
  va_list args;
  va_start(args, format);
  int size = vsnprintf(line, sizeof(line) - 1, format, args);
  va_end(args);
  line[size++] = '\n';
  if (write(1, line, static_cast<size_t>(size)) != size) _exit(3);
}

struct Trap {
  std::string point;
  std::atomic<int> countdown{0};
  int signal = 0;  // or the thread alone waits, for "resume"
  std::atomic<bool> paused{false};
} trap;

}  // namespace

void OnTestPoint(const char* name) {
  if (trap.countdown == 0 || trap.point != name || --trap.countdown != 0) return;
  if (trap.signal == 0) {
    trap.paused = true;
    Say("pausing");
    trap.paused.wait(true);
    return;
  }
  if (trap.signal == SIGSTOP) Say("stopping");
  kill(getpid(), trap.signal);
}

namespace shm::test {
namespace {

int CountDescriptors() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder)) ++count;
  closedir(folder);
  return count - 3;  // ".", ".." and the folder itself
}

int CountMappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:dtorch_ops") != std::string::npos;
  }
  return count;
}

// ---- The producer -----------------------------------------------------------------------------

const char* Set(Attachment& attachment, const Token& token, uint64_t bytes, uint64_t seed) {
  if (!attachment.OwnerLives()) return "orphaned";
  if (!attachment.Claim(token.slot, token.generation)) return "refused";
  std::vector<std::byte> value(bytes);
  Fill(value.data(), 0, bytes, seed);
  // A shape that is too long for the slot, for odd seeds.
  const std::vector<int64_t> sizes = [&] {
    std::vector<int64_t> made(seed % 2 ? 12 : 1, 1);
    made.front() = static_cast<int64_t>(bytes);
    return made;
  }();
  Attachment::Value description;
  description.payload = Payload::kTensor;
  description.sizes = sizes.data();
  description.dims = sizes.size();
  description.bytes = bytes;
  description.data = value.data();
  const auto place = attachment.Prepare(token.slot, description);
  const uint64_t half = bytes / 16 * 8;
  // As file/backend.cpp chooses, and stopped half-way.
  const bool cold = place.cold && bytes >= 16384;
  DTORCH_TEST_POINT("prepared");
  if (cold) {
    attachment.FillCold(place, value.data(), half);
  } else {
    std::memcpy(place.to, value.data(), half);
  }
  DTORCH_TEST_POINT("half written");
  if (cold) {
    attachment.FillCold({place.to + half, place.block + half, true}, value.data() + half,
                        bytes - half);
  } else {
    std::memcpy(place.to + half, value.data() + half, bytes - half);
  }
  DTORCH_TEST_POINT("written");
  if (!attachment.Publish(token.slot, token.generation)) return "given up";
  if (cold) attachment.WarmUp(place, bytes);
  return "set";
}

class Producer {
 public:
  void Do(const std::string& command, std::istream& args) {
    std::string text;
    args >> text;
    if (command == "stats") {
      const auto stats = attachment_ ? attachment_->GetStats() : Attachment::Stats{};
      Say("stats held=%llu live=%llu fds=%d maps=%d", static_cast<unsigned long long>(stats.held),
          static_cast<unsigned long long>(stats.live_bytes), CountDescriptors(), CountMappings());
      return;
    }
    const Token token = Token::FromText(text);
    // Of the last token's mailbox: the file backend's ends hold theirs as well.
    if (!attachment_ || attachment_->address() != token.mailbox) {
      attachment_ = AttachTo(token.mailbox);
    }
    if (command == "hold") {
      attachment_->Hold(token.slot, token.generation);
      Say("holds");
    } else if (command == "set") {
      uint64_t bytes = 0, seed = 0;
      args >> bytes >> seed;
      Say("%s", Set(*attachment_, token, bytes, seed));
    } else if (command == "pass") {
      attachment_->HandOver(token.slot, token.generation);
      Say("passed");
    } else if (command == "fork") {  // a child that fulfils the promise when this process has ended
      uint64_t bytes = 0, seed = 0;
      args >> bytes >> seed;
      int ends[2];
      if (pipe2(ends, O_CLOEXEC) != 0) return Say("error pipe");
      if (fork() != 0) return Say("forked");
      close(ends[1]);
      char unused;
      (void)!read(ends[0], &unused, 1);
      Say("child %s", Set(*attachment_, token, bytes, seed));
      _exit(0);
    } else if (command == "drop") {
      attachment_->Drop(token.slot, token.generation);
      if (attachment_->GetStats().held == 0) attachment_.reset();
      Say("dropped");
    } else {
      Say("error unknown command");
    }
  }

 private:
  std::shared_ptr<Attachment> attachment_;
};

// ---- The consumer -----------------------------------------------------------------------------

class ConsumerPeer {
 public:
  ~ConsumerPeer() {
    for (auto& thread : waiters_) thread.join();
  }

  void Do(const std::string& command, std::istream& args) {
    if (command == "make") {
      const int id = ++last_id_;
      auto promise = consumer_.Make([id](Consumer::Promise& ended) { Tell(id, ended); });
      consumer_.mailbox().HandOut(promise->place());
      promises_.emplace(id, promise);
      Say("made %d %s", id, promise->token.ToText().c_str());
    } else if (command == "wait") {
      int id = 0;
      int64_t ms = 0;
      args >> id >> ms;
      waiters_.emplace_back([this, id, promise = promises_.at(id), ms] {
        const auto deadline = ms < 0 ? Deadline::Never() : Deadline::AfterMs(ms);
        if (!consumer_.Wait(promise, deadline, [id] { Say("waiting %d", id); })) Say("late %d", id);
      });
    } else if (command == "idle") {  // once whoever has something to say rings
      const Mapping mapping(consumer_.mailbox().address().memory_fd, 0, kPage);
      while (Meta(mapping.data()).header().armed.load() == 0) std::this_thread::yield();
      Say("idle");
    } else if (command == "unwant") {
      int id = 0;
      args >> id;
      Say("unwanted %d", consumer_.Drop(promises_.at(id)));
    } else if (command == "forget") {  // the values too; each must be what it was when it came
      int spoiled = 0;
      for (const auto& [id, promise] : promises_) {
        spoiled += !IsGood(*promise);
        // The thread that has found it may still have the promise.
        if (promise->end != Consumer::End::kNone) promise->received = {};
      }
      promises_.clear();
      Say("spoiled %d", spoiled);
    } else if (command == "settle") {  // once this many producers are left
      uint64_t producers = 0;
      args >> producers;
      const Deadline limit = Deadline::AfterMs(10000);
      while (consumer_.mailbox().GetStats().producers != producers && !limit.HasPassed()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      const auto stats = consumer_.mailbox().GetStats();
      Say("stats outstanding=%llu unclaimed=%llu producers=%llu received=%llu memory=%llu fds=%d "
          "maps=%d",
          static_cast<unsigned long long>(stats.outstanding),
          static_cast<unsigned long long>(stats.unclaimed),
          static_cast<unsigned long long>(stats.producers),
          static_cast<unsigned long long>(stats.received_bytes),
          static_cast<unsigned long long>(stats.memory_bytes), CountDescriptors(), CountMappings());
    } else {
      Say("error unknown command");
    }
  }

 private:
  static bool IsGood(const Consumer::Promise& promise) {
    const Received& received = promise.received;
    if (promise.end != Consumer::End::kValue) return true;
    const auto bytes = static_cast<int64_t>(received.bytes);
    std::vector<int64_t> sizes(received.sizes.size(), 1);
    if (bytes < 8 || sizes.empty()) return false;
    sizes.front() = bytes;
    return received.sizes == sizes && IsWhole(received.data(), received.bytes);
  }

  static void Tell(int id, const Consumer::Promise& promise) {
    const Received& received = promise.received;
    if (promise.end == Consumer::End::kBroken) {
      Say("broken %d", id);
    } else if (promise.end == Consumer::End::kDefect) {
      Say("torn %d %s", id, received.defect.c_str());
    } else if (!IsGood(promise)) {
      Say("torn %d wrong bytes", id);
    } else {
      Say("value %d %llu %llu", id, static_cast<unsigned long long>(received.bytes),
          static_cast<unsigned long long>(SeedOf(received.data())));
    }
  }

  Consumer consumer_;
  std::map<int, Consumer::PromisePtr> promises_;
  std::vector<std::thread> waiters_;
  int last_id_ = 0;
};

template <typename Role>
int Run() {
  Role role;
  std::vector<int> taken;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream args(line);
    std::string command;
    args >> command;
    try {
      if (command == "at") {
        std::string how;
        int count = 0;
        trap.countdown = 0;
        args >> how >> count;
        std::getline(args >> std::ws, trap.point);
        trap.signal = how == "stop" ? SIGSTOP : how == "kill" ? SIGKILL : 0;
        trap.countdown = count;
        Say("ready");
      } else if (command == "resume") {
        trap.paused = false;
        trap.paused.notify_all();
      } else if (command == "leave") {  // all descriptors but so many are taken
        int spare = 0;
        args >> spare;
        for (int fd : taken) close(fd);
        taken.clear();
        const rlimit limit{256, 256};
        setrlimit(RLIMIT_NOFILE, &limit);
        if (spare >= 0) {
          for (int fd; (fd = dup(0)) >= 0;) taken.push_back(fd);
          for (; spare > 0; --spare, taken.pop_back()) close(taken.back());
        }
        Say("left");
      } else {
        role.Do(command, args);
      }
    } catch (const std::exception& error) {
      Say("error %s", error.what());
    }
  }
  _exit(0);  // threads may still wait
}

}  // namespace
}  // namespace shm::test
}  // namespace dtorch

int main(int argc, char** argv) {
  const std::string role = argc > 1 ? argv[1] : "";
  if (role == "producer") return dtorch::shm::test::Run<dtorch::shm::test::Producer>();
  if (role == "consumer") return dtorch::shm::test::Run<dtorch::shm::test::ConsumerPeer>();
  std::fprintf(stderr, "usage: peer producer|consumer\n");
  return 2;
}
