#pragma once

#include "dtorch/base/api.h"

#include <ATen/record_function.h>

#include <cstdint>
#include <memory>

// What torch.profiler shows of us. This file and its source are all that knows how: through torch's
// RecordFunction, as an operator is shown, so that every profiler of torch sees it.
namespace dtorch {

/// One end of an arrow from a step to the one that follows from it, in another thread: from setting
/// a value, say, to the completion that it causes. Torch draws such arrows between what has the
/// same sequence number, from forward to backward, if the later one knows the earlier one's thread.
/// Without an id: no arrow.
struct Flow {
  int64_t id = 0;
  uint64_t thread = 0;  // of torch's numbering; 0: of another process
};

/// A step of ours, for as long as it lives, in the thread that it lives in. If no profiler is on,
/// which costs a look at a thread-local list, it is nothing.
class DTORCH_API Span {
 public:
  /// `name`: with the prefix dtorch::, and for ever.
  explicit Span(const char* name) {
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      Begin(name, *std::move(callbacks), {});
    }
  }
  /// The step that `from` leads to.
  Span(const char* name, Flow from) {
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      Begin(name, *std::move(callbacks), from);
    }
  }
  ~Span() {
    if (record_) End();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  /// For an arrow that starts here; not of a step that one leads to. Torch goes by the ends of
  /// steps: this one has to end before what follows from it does. Hence a step of no length,
  /// Span("dtorch::ready").flow(), made before the other thread is told.
  Flow flow() const;
  explicit operator bool() const { return record_ != nullptr; }

 private:
  void Begin(const char* name, at::StepCallbacks&& callbacks, Flow from);
  void End();

  std::unique_ptr<at::RecordFunction> record_;
  uint64_t session_ = 0;
};

/// The flow of a step that is in two processes, of which each knows the same `key`.
Flow FlowBetweenProcesses(uint64_t key);

}  // namespace dtorch
