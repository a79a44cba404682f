#include "dtorch/future/collect.h"

#include "dtorch/future/complete.h"
#include "dtorch/future/outcome.h"
#include "dtorch/future/sleeper.h"

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <utility>

namespace dtorch {
namespace {

FuturePtr MakeResult(c10::TypePtr type, const std::vector<FuturePtr>& members) {
  // A list of futures has no storage to be ordered: each of them orders its own.
  const auto list = type->cast<c10::ListType>();
  const bool of_futures = list && list->getElementType()->kind() == c10::TypeKind::FutureType;
  std::vector<c10::Device> devices;
  for (const FuturePtr& member : members) {
    if (of_futures) break;
    devices.insert(devices.end(), member->devices().begin(), member->devices().end());
  }
  auto result = c10::make_intrusive<c10::ivalue::Future>(std::move(type), std::move(devices));
  const bool promised = std::any_of(members.begin(), members.end(), [](const FuturePtr& member) {
    return OriginOf(member) != Origin::kAnything;
  });
  PrepareForWaiters(result, promised ? Origin::kPromised : Origin::kAnything);
  return result;
}

// Watches the members of a group until the group's result is settled, then lets go of all of them:
// a member that stays pending for ever does not keep what was collected.
//
// Kept alive by the members in whose lists it is linked.
class Collector : public std::enable_shared_from_this<Collector> {
 public:
  Collector(const std::vector<FuturePtr>& members, FuturePtr result) : result_(std::move(result)) {
    for (const FuturePtr& member : members) members_.emplace_back(*this, member.get());
  }
  virtual ~Collector() = default;

  void Start() {
    SetSource(result_, std::make_shared<Observed>(weak_from_this()));
    for (Member& member : members_) {
      if (settled_) break;
      // Held by the caller.
      if (!member.LinkTo(FuturePtr::reclaim_copy(member.pending), shared_from_this())) {
        member.Wake();
      }
    }
    // Members that were linked after, or while, another thread settled the result.
    started_ = true;
    if (settled_) UnlinkAll();
  }

  // The result's: tells when somebody has lost interest.
  class Observed final : public Source {
   public:
    explicit Observed(std::weak_ptr<Collector> collector) : collector_(std::move(collector)) {}
    void OnRelease() override {
      if (const auto collector = collector_.lock()) collector->LetGo();
    }
    void Poll() override {}  // the members tell
    std::unique_ptr<Alarm> Listen() override { return nullptr; }

   private:
    const std::weak_ptr<Collector> collector_;
  };

  void LetGo() {
    // Ours: nobody else has one, and nobody can come by one.
    if (result_.use_count() > 1 || HasObservers(result_)) return;
    if (!settled_.exchange(true)) UnlinkAll();
  }

 protected:
  struct Member final : Waiter, Waker {
    Member(Collector& collector, c10::ivalue::Future* future)
        : collector(collector), pending(future) {}

    std::shared_ptr<Waker> Notify() noexcept override {
      return std::shared_ptr<Waker>(collector.shared_from_this(), this);
    }
    bool RunsCallbacks() const override { return true; }
    void Wake() override {
      completed = FuturePtr::reclaim_copy(pending);
      collector.OnComplete(*this);
    }

    Collector& collector;
    // Not owned: a future that nobody completes would keep itself alive, through its list. Used
    // only where it is completing, or held by another.
    c10::ivalue::Future* const pending;
    FuturePtr completed;
  };

  // Called once for each member, in the thread that completes it.
  virtual void OnComplete(Member& member) = 0;

  void Settle(std::exception_ptr error, const std::function<c10::IValue()>& value) {
    if (settled_.exchange(true)) return;
    if (started_) UnlinkAll();
    if (error) {
      CompleteWithError(result_, std::move(error), Nesting::kDeferIfDeep);
    } else {
      CompleteWithValue(result_, value(), Nesting::kDeferIfDeep);
    }
  }

  std::deque<Member>& members() { return members_; }

 private:
  void UnlinkAll() {
    const auto self = shared_from_this();
    for (Member& member : members_) member.Unlink();
  }

  const FuturePtr result_;
  std::deque<Member> members_;  // a deque, since a Waiter cannot move
  std::atomic<bool> settled_{false};
  std::atomic<bool> started_{false};
};

class AllCollector final : public Collector {
 public:
  AllCollector(const std::vector<FuturePtr>& futures, c10::TypePtr list_element, FuturePtr result)
      : Collector(futures, std::move(result)),
        list_element_(std::move(list_element)),
        pending_(futures.size()) {}

 private:
  void OnComplete(Member& member) override {
    auto error = ErrorOf(member.completed);
    if (pending_.fetch_sub(1) != 1 && !error) return;
    Settle(std::move(error), [this] {
      c10::impl::GenericList list(list_element_);
      for (Member& each : members()) list.push_back(each.completed);
      return c10::IValue(std::move(list));
    });
  }

  const c10::TypePtr list_element_;
  std::atomic<size_t> pending_;
};

class AnyCollector final : public Collector {
 public:
  using Collector::Collector;

 private:
  void OnComplete(Member& member) override {
    Settle(ErrorOf(member.completed), [&] { return ValueOf(member.completed); });
  }
};

class ReadCollector final : public Collector {
 public:
  ReadCollector(const FuturePtr& future, FuturePtr result, ReadFunction read)
      : Collector({future}, std::move(result)), read_(std::move(read)) {}

 private:
  void OnComplete(Member& member) override {
    c10::IValue value;
    std::exception_ptr error;
    try {
      value = read_(member.completed);
    } catch (const std::exception&) {
      error = std::current_exception();
    }
    Settle(std::move(error), [&] { return std::move(value); });
  }

  const ReadFunction read_;
};

}  // namespace

FuturePtr CollectAll(const std::vector<FuturePtr>& futures, const c10::TypePtr& element_type) {
  const c10::TypePtr member_type = c10::FutureType::create(element_type);
  const c10::TypePtr result_type = c10::ListType::create(member_type);
  if (futures.empty()) {
    return MakeCompletedFuture(result_type, c10::impl::GenericList(member_type));
  }
  FuturePtr result = MakeResult(result_type, futures);
  std::make_shared<AllCollector>(futures, member_type, result)->Start();
  return result;
}

FuturePtr CollectAny(const std::vector<FuturePtr>& futures, const c10::TypePtr& element_type) {
  TORCH_CHECK_VALUE(!futures.empty(),
                    "collect_any: expected at least one future, got an empty list, of which "
                    "nothing can ever complete");
  FuturePtr result = MakeResult(element_type, futures);
  std::make_shared<AnyCollector>(futures, result)->Start();
  return result;
}

FuturePtr CollectRead(const FuturePtr& future, const c10::TypePtr& type, ReadFunction read) {
  FuturePtr result = MakeResult(type, {future});
  std::make_shared<ReadCollector>(future, result, std::move(read))->Start();
  return result;
}

}  // namespace dtorch
