// A consumer that is stopped in the middle of its answer to a claimant that asks for memory of a
// device. Both are in this process; the thread that answers is held where a process would be
// stopped.
//
//   asking abandon | drop | wait

#include "dtorch/base/test_point.h"
#include "dtorch/shm/attachment.h"
#include "dtorch/shm/attachments.h"
#include "dtorch/shm/mailbox.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <semaphore>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

namespace {

std::binary_semaphore in_the_middle(0), may_go_on(0);

}  // namespace

namespace dtorch {

void OnTestPoint(const char* name) {
  if (std::string_view(name) != "answering") return;
  in_the_middle.release();
  may_go_on.acquire();
}

namespace shm::test {
namespace {

void Expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "asking: expected that %s\n", what);
  std::abort();
}

class Scene {
 public:
  Scene() : place_(mailbox_.Allocate()), producer_(AttachTo(mailbox_.address())) {
    mailbox_.HandOut(place_);
    producer_->Hold(place_.slot, place_.generation);
    Expect(producer_->Claim(place_.slot, place_.generation), "a pending promise can be claimed");
    producer_->Ask(place_.slot, place_.generation, /*device_type=*/1, /*device_index=*/0, 100);
    auto event = mailbox_.Collect();
    Expect(event && event->question, "the question is heard");
    answerer_ = std::thread([this, question = *event->question] {
      mailbox_.Answer(place_, question, "memory", memory_);
    });
    in_the_middle.acquire();
  }

  void GoOn() {
    may_go_on.release();
    answerer_.join();
  }

  void Abandon() { producer_->Abandon(place_.slot, place_.generation); }
  void Drop() { producer_->Drop(place_.slot, place_.generation); }
  auto Wait() {
    return producer_->WaitForAnswer(place_.slot, place_.generation, Deadline::AfterMs(0));
  }
  bool Claims() { return producer_->Claim(place_.slot, place_.generation); }
  auto Collect() { return mailbox_.Collect(); }
  bool HasMemory() const { return memory_.use_count() > 1; }

 private:
  Mailbox mailbox_;
  const Mailbox::Place place_;
  const std::shared_ptr<Attachment> producer_;
  const std::shared_ptr<void> memory_ = std::make_shared<int>();
  std::thread answerer_;
};

// Another claimant must not write its value to where the answer is still being written.
void CheckThatItIsThere(Scene& scene) {
  Expect(!scene.Claims(), "nobody claims what is still being answered");
  scene.GoOn();
  Expect(!scene.Collect(), "a promise that is held is not broken");
  Expect(!scene.HasMemory(), "memory that nobody asks for any more goes");
  Expect(scene.Claims(), "it can be claimed again");
}

void RunAbandon() {
  Scene scene;
  scene.Abandon();
  CheckThatItIsThere(scene);
}

void RunDrop() {
  Scene scene;
  scene.Abandon();
  scene.Drop();
  scene.GoOn();
  const auto event = scene.Collect();
  Expect(event && event->broken, "what nobody holds is broken");
}

void RunWait() {
  Scene scene;
  std::string error;
  try {
    scene.Wait();
  } catch (const std::runtime_error& thrown) {
    error = thrown.what();
  }
  Expect(error.find("stopped answering") != std::string::npos, "the claimant gives up");
  CheckThatItIsThere(scene);
}

}  // namespace
}  // namespace shm::test
}  // namespace dtorch

int main(int argc, char** argv) {
  const std::string_view what = argc == 2 ? argv[1] : "";
  if (what == "abandon") {
    dtorch::shm::test::RunAbandon();
  } else if (what == "drop") {
    dtorch::shm::test::RunDrop();
  } else if (what == "wait") {
    dtorch::shm::test::RunWait();
  } else {
    std::fprintf(stderr, "usage: asking abandon | drop | wait\n");
    return 2;
  }
}
