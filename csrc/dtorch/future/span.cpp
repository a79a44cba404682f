#include "dtorch/future/span.h"

#include <torch/csrc/profiler/orchestration/observer.h>

#include <atomic>
#include <utility>

namespace dtorch {
namespace {

// Sequence numbers of ours are of no operator: autograd counts its from 0. Torch keeps 48 bits.
constexpr int64_t kOurs = int64_t{1} << 46;
constexpr int64_t kBetweenProcesses = int64_t{1} << 45;

int64_t NextId() {
  static std::atomic<int64_t> next{1};
  return kOurs + next.fetch_add(1, std::memory_order_relaxed);
}

// The profiler that records this thread, or nullptr.
template <typename Base, typename Visit>
auto VisitProfiler(const Visit& visit) {
  if constexpr (requires { Base::getTLS(); }) {  // torch 2.14 and later
    if (const auto of_all = Base::getGlobal()) return visit(of_all.get());
    return visit(Base::getTLS());
  } else {
    return visit(Base::get());
  }
}

// Which run of a profiler this thread is recorded by; 0 if by none that records the ends of steps.
// The number of its callback is of no other run.
uint64_t Session() {
  struct Peek : torch::profiler::impl::ProfilerStateBase {
    static constexpr auto Handle() { return &Peek::handle_; }
  };
  const auto handle_of = [](const auto* profiler) {
    return profiler ? profiler->*Peek::Handle() : uint64_t{0};
  };
  return VisitProfiler<torch::profiler::impl::ProfilerStateBase>(handle_of);
}

}  // namespace

void Span::Begin(const char* name, at::StepCallbacks&& callbacks, Flow from) {
  session_ = Session();
  record_ = std::make_unique<at::RecordFunction>(std::move(callbacks));
  if (from.thread) record_->setForwardThreadId(from.thread);
  record_->before(name, from.id ? from.id : NextId());
}

void Span::End() {
  // A profiler of all threads may have been stopped meanwhile, and another one started. What the
  // step would write its end to went with the first; torch sees to it if none is on.
  if (Session() != session_) (void)record_.release();
}

Flow Span::flow() const {
  if (!record_) return {};
  return {record_->seqNr(), record_->threadId()};
}

Flow FlowBetweenProcesses(uint64_t key) {
  return {kOurs | kBetweenProcesses | static_cast<int64_t>(key & (kBetweenProcesses - 1))};
}

}  // namespace dtorch
