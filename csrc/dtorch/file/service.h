#pragma once

#include "dtorch/promise/promise_state.h"
#include "dtorch/shm/mailbox.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace dtorch::file {

/// This process as a consumer: its mailbox, the promises that are outstanding in it, and the
/// threads that complete them.
///
/// Leader and followers: a thread that is about to complete futures, whose callbacks may block on
/// other futures, first sees to it that another one listens. At rest one thread sleeps; none polls.
/// Made by the first token; lives until the process ends. Thread-safe.
class Service {
 public:
  /// Of this process: a forked child has one of its own.
  static Service& Get();
  /// nullptr if no token was made yet.
  static Service* GetIfAny();

  std::unique_ptr<OwnerEnd> Export(c10::intrusive_ptr<PromiseState> promise);

  /// The promise that `token`, of this very mailbox, names; null if it is not outstanding.
  c10::intrusive_ptr<PromiseState> Find(const shm::Token& token);

  const shm::Address& address() const { return mailbox_.address(); }
  shm::Mailbox::Stats GetStats() { return mailbox_.GetStats(); }

 private:
  class End;

  void StartThread();
  void Run();
  void Deliver(shm::Mailbox::Event event);
  c10::intrusive_ptr<PromiseState> Forget(shm::Mailbox::Place place);
  void StopAtExit();

  shm::Mailbox mailbox_;
  std::mutex mutex_;  // guards the table
  // By slot and generation: a slot may be used again before its last event was delivered.
  std::unordered_map<uint64_t, c10::intrusive_ptr<PromiseState>> promises_;
  std::atomic<int> listening_{0};  // threads that sleep, or are about to
  std::atomic<bool> stopping_{false};
};

}  // namespace dtorch::file
