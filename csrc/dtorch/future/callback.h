#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/waiter_list.h"

#include <ATen/core/ivalue.h>

#include <memory>
#include <utility>

namespace dtorch {

/// Scope of a callback of a complete future: of each of its devices a stream of its own is current,
/// ordered behind the value. Nothing is thrown.
class DTORCH_API CallbackStreams {
 public:
  explicit CallbackStreams(c10::ivalue::Future& future);
  ~CallbackStreams();
  CallbackStreams(const CallbackStreams&) = delete;
  CallbackStreams& operator=(const CallbackStreams&) = delete;

 private:
  struct Guards;
  std::unique_ptr<Guards> guards_;  // null if there are no devices
};

/// Hangs `callback`, a void(Future&), on `future`, as addCallback() does, but it is called whatever
/// the devices say: one that has failed refuses even to name a stream, and whoever waits for what
/// the callback makes would wait for ever.
template <typename F>
void AddCallback(const FuturePtr& future, F callback) {
  future->addCallback(
      [callback = std::move(callback)](c10::ivalue::Future& complete) {
        const CallbackStreams streams(complete);
        callback(complete);
      },
      /*uses_future=*/false);
}

}  // namespace dtorch
