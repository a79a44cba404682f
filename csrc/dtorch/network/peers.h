#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/waiter_list.h"

#include <cstdint>
#include <functional>
#include <string>

// Who is there. The owner of promises watches each worker that holds some:
//
//     owner --AskLater--> worker, which answers when a quarter of the limit has passed
//           <-----------'                 or when it leaves
//
// over and over, so that one question is always out: if the worker dies its connection does, and
// the question fails at once. If it is stopped, or the network loses what is said, no answer comes
// in time. The other way round the worker hears the owner's questions, and needs none of its own.
// An answer takes no thread and not Python's lock, so that a worker that is merely slow is there.
// Of a worker without Python the owner asks once a second, and is answered at once.
namespace dtorch::network {

/// After how long without a sign a peer is given up. For this process alone. 30 s at first.
DTORCH_API void SetLostAfterMs(int64_t ms);
DTORCH_API int64_t GetLostAfterMs();

/// Asks `worker` for as long as `is_wanted` says so; `on_lost` is called once, with what has
/// happened, if it is not there any more. Both are called in threads of RPC's.
void Watch(const std::string& worker, bool answers_later, std::function<bool()> is_wanted,
           std::function<void(const std::string& why)> on_lost);

/// Another process asks. The answer, which is complete when the time has passed, or at Stop().
DTORCH_API FuturePtr AnswerLater(const std::string& sender, int64_t after_ms);
/// It has said something.
void HeardFrom(const std::string& sender);

/// Blocks until `reply` of `worker` is there, however long that takes as long as there are signs of
/// the worker. BrokenPromiseError if there were none for too long. Interruptible.
void WaitFor(const FuturePtr& reply, const std::string& worker);

/// Scope in which this thread may block in WaitFor(). What comes in takes a thread of RPC's pool,
/// replies too: if all of them waited for one, none would ever come. So the last few of the pool's
/// threads do not get one.
class MayBlock {
 public:
  MayBlock();
  ~MayBlock();
  MayBlock(const MayBlock&) = delete;
  MayBlock& operator=(const MayBlock&) = delete;
  explicit operator bool() const { return may_; }

 private:
  const bool counts_;
  bool may_ = true;
};

/// RPC is about to be shut down: answers everybody, and asks nobody any more.
void StopAnswering();

}  // namespace dtorch::network
