#pragma once

#include "dtorch/base/api.h"
#include "dtorch/base/error.h"
#include "dtorch/future/waiter_list.h"
#include "dtorch/promise/reservation.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>

// How a promise leaves its process. The promise knows this interface only; each backend implements
// it in a folder of its own and registers itself when the library is loaded.
namespace dtorch {

/// The end that stays with the owner of a promise that other processes may fulfil: the source of
/// its future, which keeps it. Goes away when the future is complete, or nobody has it any more:
/// then the promise is taken back from wherever it has travelled. Thread-safe.
class DTORCH_API OwnerEnd : public Source {
 public:
  /// Text for another process. From now on the owner's own objects do not keep the promise alive.
  virtual std::string Token() = 0;

  /// Takes the promise back, for the owner to fulfil or cancel. False if a producer was faster.
  enum class Purpose { kFulfil, kCancel };
  virtual bool Retract(Purpose purpose) = 0;

  /// Whether it can still be fulfilled. Only looks; in a forked child, too.
  virtual bool IsPending() const = 0;

  /// The owner's own object has gone. Breaks the promise if it never left but by a fork, and no
  /// forked child has it either.
  virtual void OwnerDropped() = 0;

  /// The owner's process has unpickled a token of its own: it is a producer like any other, until
  /// each Hold() is followed by a Drop().
  virtual void Hold() = 0;
  virtual void Drop() = 0;
  /// Before a Drop(): what is said if that breaks the promise.
  virtual void Explain(std::string why) = 0;
  /// Behind a Hold(): it is passed on, and is not broken before whoever gets it has dropped it.
  virtual void HandOver() = 0;

  /// Behind a Hold(), for a value that is still to come: takes the promise. False if another one
  /// was faster. Then either Fulfil(), before the future is completed; or Abandon(), which leaves
  /// it to its other producers.
  virtual bool Claim() = 0;
  virtual void Fulfil() = 0;
  virtual void Abandon() = 0;
};

/// The end in a process that has unpickled the token, or has inherited the promise by a fork. Going
/// away unset it drops the promise, which breaks it if no other producer holds it. Thread-safe. In
/// a forked child it is an end of that child, from the fork on.
class DTORCH_API ProducerEnd {
 public:
  virtual ~ProducerEnd();
  /// For passing the promise on.
  virtual std::string Token() = 0;
  /// PromiseAlreadySatisfiedError, or BrokenPromiseError if the owner is gone. When it has
  /// returned, the value is safe, whatever becomes of this process.
  virtual void SetValue(const c10::IValue& value) = 0;
  virtual void SetError(const std::exception_ptr& error) = 0;
  /// For a value that is still to come, of an accelerator and of `device`; what arrives is on the
  /// device again, though the reservation takes it on the CPU. Throws what SetValue() does.
  virtual std::unique_ptr<Reservation> Reserve(std::optional<c10::Device> device) = 0;
  /// c10::TypeError, which says what to do, for a tensor that SetValue() refuses.
  virtual void CheckValue(const at::Tensor& value) const = 0;
  /// Only looks; in a forked child, too.
  virtual bool IsPending() const = 0;
  /// Empty; or who has to be asked for that, on another machine: it takes a round trip, and throws
  /// if it is not to be reached, from a forked child, say.
  virtual std::string WhoKnows() const { return {}; }

  /// Memory that a value can be computed straight into: SetValue() with the very tensor copies
  /// nothing.
  virtual at::Tensor Lend(at::IntArrayRef size, c10::ScalarType dtype) = 0;
};

/// Why an owner cannot be reached in some way; there may be another.
class DTORCH_API UnreachableError : public DTorchError {
 public:
  using DTorchError::DTorchError;
  ~UnreachableError() override;
};

class DTORCH_API Backend {
 public:
  virtual ~Backend();
  /// The owner's end of the promise of `future`, made if there is none: events from elsewhere
  /// complete the future then. nullptr if the future is complete. std::runtime_error, which says
  /// why, if the promise cannot leave the process.
  virtual std::shared_ptr<OwnerEnd> Export(const FuturePtr& future) = 0;

  /// What a token leads to: a future of this process and its end, or a producer's end.
  struct Imported {
    FuturePtr future;
    std::shared_ptr<OwnerEnd> owner_end;
    std::unique_ptr<ProducerEnd> producer_end;
  };
  /// UnreachableError, which says why, if this backend cannot reach the owner.
  virtual Imported Import(const std::string& token, bool has_value) = 0;
  /// Whether the token is of a promise of this process.
  virtual bool IsHome(const std::string& token) = 0;

  /// In a forked child: an end of the promise whose owner's end `inherited` was the parent's.
  virtual std::unique_ptr<ProducerEnd> Inherit(const OwnerEnd& inherited) = 0;
};

DTORCH_API void SetFileBackend(Backend* backend);
DTORCH_API Backend& FileBackend();

/// How a promise leaves its machine. The owner holds it in place of whoever has it far away, and
/// fulfils it on their behalf: to the file backend they are producers in the owner's own process.
class DTORCH_API Network {
 public:
  virtual ~Network();
  /// How other machines reach this process; empty if they cannot. DTorchError, which says why, if
  /// it was not to be made reachable.
  virtual std::string Name() = 0;
  /// An end that works through the owner, whose Name() is `peer`. UnreachableError, which says
  /// why, if there is no such one.
  virtual std::unique_ptr<ProducerEnd> Reach(const std::string& peer, const std::string& token,
                                             bool has_value) = 0;
  /// Nobody can fulfil it but through the network: it fails if that is shut down.
  virtual void Rely(std::weak_ptr<OwnerEnd> end) = 0;
};

DTORCH_API void SetNetwork(Network* network);
DTORCH_API Network* NetworkIfAny();

}  // namespace dtorch
