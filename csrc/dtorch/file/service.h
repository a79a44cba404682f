#pragma once

#include "dtorch/promise/backend.h"
#include "dtorch/shm/mailbox.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace dtorch::file {

/// This process as a consumer: its mailbox, the promises that are outstanding in it, and the
/// threads that complete their futures.
///
/// Leader and followers: a thread that is about to complete futures, whose callbacks may block on
/// other futures, first sees to it that another one listens. At rest one thread sleeps; none polls.
/// Where one value follows another faster than a thread is woken, the thread that waits for them
/// looks out for a moment before it sleeps, and completes what runs no callbacks.
/// Made by the first token; lives until the process ends. Thread-safe.
class Service {
 public:
  /// Of this process: a forked child has one of its own.
  static Service& Get();
  /// nullptr if no token was made yet.
  static Service* GetIfAny();

  /// Once, when the library is loaded.
  static void RegisterForkHandlers();

  /// The end of the promise of `future`, which is made its source; nullptr if it is complete.
  std::shared_ptr<OwnerEnd> Export(const FuturePtr& future);

  /// What `token`, of this very mailbox, names: the future and its end; null if not outstanding.
  Backend::Imported Find(const shm::Token& token);

  /// The token of an end that Export() has made, in this process or in the one that it was forked
  /// from.
  static shm::Token TokenOf(const OwnerEnd& end);

  const shm::Address& address() const { return mailbox_.address(); }
  shm::Mailbox::Stats GetStats() { return mailbox_.GetStats(); }

 private:
  class End;

  void StartListening();
  void Run();
  void LookOut(End& end);
  bool DeliverNext();
  void Deliver(shm::Mailbox::Event event);
  void Answer(shm::Mailbox::Event event);
  // `takes`: it is out of its slot.
  std::string WhyBroken(shm::Mailbox::Place place);
  FuturePtr FutureAt(shm::Mailbox::Place place, bool& has_value, bool takes = true);
  void StopAtExit();

  shm::Mailbox mailbox_;
  struct Outstanding {
    End* end;  // owned by the future, whose source it is
    FuturePtr future;
    bool taken = false;  // out of its slot
  };

  std::mutex mutex_;  // guards the table; taken before the locks of waiter lists
  // By slot and generation: a slot may be used again before its last event was delivered.
  std::unordered_map<uint64_t, Outstanding> outstanding_;
  std::unordered_map<uint64_t, std::string> explained_;  // OwnerEnd::Explain
  std::atomic<bool> look_out_{false};                    // the last wait was short
  std::atomic<int> listening_{0};                        // threads that sleep, or are about to
  std::atomic<bool> stopping_{false};
};

}  // namespace dtorch::file
