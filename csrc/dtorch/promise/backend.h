#pragma once

#include "dtorch/base/api.h"

#include <ATen/core/ivalue.h>

#include <exception>
#include <memory>
#include <string>

// How a promise leaves its process. The promise knows this interface only; each backend implements
// it in a folder of its own and registers itself when the library is loaded.
namespace dtorch {

class PromiseState;

/// The end that stays with the owner of a promise whose token was made. Thread-safe.
class DTORCH_API OwnerEnd {
 public:
  virtual ~OwnerEnd();
  virtual std::string Token() = 0;
  /// Takes the promise back, for the owner to fulfil. False if a producer was faster.
  virtual bool Retract() = 0;
};

/// The end in a process that has unpickled the token. Going away unset it drops the promise, which
/// breaks it if no other producer holds it. Thread-safe.
class DTORCH_API ProducerEnd {
 public:
  virtual ~ProducerEnd();
  /// For passing the promise on.
  virtual std::string Token() = 0;
  /// PromiseAlreadySatisfiedError, or BrokenPromiseError if the owner is gone. When it has
  /// returned, the value is safe, whatever becomes of this process.
  virtual void SetValue(const c10::IValue& value) = 0;
  virtual void SetError(const std::exception_ptr& error) = 0;
  virtual bool IsPending() = 0;
};

class DTORCH_API Backend {
 public:
  virtual ~Backend();
  /// Lets the promise be fulfilled from elsewhere; events from there complete it.
  virtual std::unique_ptr<OwnerEnd> Export(c10::intrusive_ptr<PromiseState> promise) = 0;

  /// What a token leads to: the promise itself where it comes from this process, else an end.
  struct Imported {
    c10::intrusive_ptr<PromiseState> promise;
    std::unique_ptr<ProducerEnd> end;
  };
  /// std::runtime_error, which says why, if this backend cannot reach the owner.
  virtual Imported Import(const std::string& token, bool has_value) = 0;
};

DTORCH_API void SetFileBackend(Backend* backend);
DTORCH_API Backend& FileBackend();

}  // namespace dtorch
