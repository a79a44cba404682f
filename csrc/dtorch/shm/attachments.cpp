#include "dtorch/shm/attachments.h"

#include "dtorch/base/fork.h"
#include "dtorch/base/log.h"
#include "dtorch/base/test_point.h"
#include "dtorch/sys/fd.h"
#include "dtorch/sys/thread.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <mutex>
#include <sys/epoll.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace dtorch::shm {
namespace {

struct Table {
  std::mutex mutex;
  std::vector<std::shared_ptr<Attachment>> attachments;
  Fd owners;  // an epoll of the processes that wait; null while no thread looks at it

  // Without a thread to be had for it the next look finds who has ended.
  void Watch(const Attachment& attachment) {
    if (!owners) {
      Fd made(epoll_create1(EPOLL_CLOEXEC));
      if (!made) return;
      try {
        StartThread([this, epoll = made.get()] { ForgetTheDead(epoll); }, "dtorch_owners");
      } catch (const std::system_error&) {
        return;
      }
      owners = std::move(made);
    }
    // Once each: one that has ended may be kept for a while by whoever uses it.
    epoll_event ended{EPOLLIN | EPOLLONESHOT, {}};
    epoll_ctl(owners.get(), EPOLL_CTL_ADD, attachment.owner_watch(), &ended);
  }

  std::vector<std::shared_ptr<Attachment>> Living() {
    std::vector<std::shared_ptr<Attachment>> dead;  // dropped behind the lock
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& each : attachments) {
      if (!each->OwnerLives()) dead.push_back(std::move(each));
    }
    std::erase(attachments, nullptr);
    return attachments;
  }

  void ForgetTheDead(int epoll) {
    for (;;) {
      epoll_event ended{};
      if (epoll_wait(epoll, &ended, 1, -1) < 0 && errno != EINTR) return;
      DTORCH_TEST_POINT("owner ended");
      (void)Living();
    }
  }
};

Table& Attachments();

}  // namespace

struct ForkOfAttachments {
  static void Prepare() {
    Table& table = Attachments();
    table.mutex.lock();
    bool holds = false;
    for (const auto& each : table.attachments) {
      each->BeforeFork();
      holds = holds || each->held_ > 0;
    }
    int ends[2];
    // Without descriptors to be had for it the parent does not wait, and the child takes nothing
    // over: the parent's holds may be gone by then.
    if (!holds || pipe2(ends, O_CLOEXEC) != 0) return;
    child_works = Fd(ends[0]);
    working = Fd(ends[1]);
  }

  static void InParent() {
    working.Reset();
    if (child_works) {
      DTORCH_TEST_POINT("forked");
      char unused;
      while (read(child_works.get(), &unused, 1) < 0 && errno == EINTR) continue;  // until it ends
      child_works.Reset();
    }
    Table& table = Attachments();
    for (const auto& each : table.attachments) each->AfterForkInParent();
    table.mutex.unlock();
  }

  static void InChild() {
    child_works.Reset();
    Table& table = Attachments();
    for (const auto& each : table.attachments)
      each->AfterForkInChild(/*may_take_over=*/static_cast<bool>(working));
    // Whatever still uses them keeps them.
    std::erase_if(table.attachments, [](const auto& each) { return each->IsInert(); });
    working.Reset();         // the parent goes on
    table.owners.Reset();    // the parent's thread looks at it
#ifndef __SANITIZE_THREAD__  // it ends a forked child that starts a thread
    for (const auto& each : table.attachments) table.Watch(*each);
#endif
    table.mutex.unlock();
  }

 private:
  static thread_local Fd child_works, working;  // the ends of a pipe
};

thread_local Fd ForkOfAttachments::child_works, ForkOfAttachments::working;

namespace {

Table& Attachments() {
  // Leaked on purpose: its thread and tensors may outlive everything.
  static auto* table = [] {
    auto* made = new Table;
    OnFork({ForkOfAttachments::Prepare, ForkOfAttachments::InParent, ForkOfAttachments::InChild});
    return made;
  }();
  return *table;
}

// When the library is loaded: a fork beside the first use would find the handlers half registered.
const bool registered [[maybe_unused]] = (Attachments(), true);

}  // namespace

std::shared_ptr<Attachment> AttachTo(const Address& address) {
  Table& table = Attachments();
  std::lock_guard<std::mutex> lock(table.mutex);
  for (const auto& each : table.attachments) {
    if (each->address() == address) return each;
  }
  auto attachment = std::make_shared<Attachment>(address);
  Log(LogLevel::kInfo, "file", "attached to process ", address.owner.pid);
  table.attachments.push_back(attachment);
  table.Watch(*attachment);
  return attachment;
}

std::vector<std::shared_ptr<Attachment>> AllAttachments() { return Attachments().Living(); }

}  // namespace dtorch::shm
