#pragma once

#include "dtorch/base/api.h"

#include <stdexcept>
#include <string>

// The errors that the plugin itself raises. Each has a Python class of the same name; wrong
// arguments are c10::TypeError / c10::ValueError instead, as everywhere in PyTorch.
//
// A message says what was expected, what came, and what to do.
namespace dtorch {

class DTORCH_API DTorchError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  ~DTorchError() override;  // out of line: one typeinfo for all libraries that catch it
};

/// All who could set the value are gone; or, for whoever sets it, the process that waits is.
class DTORCH_API BrokenPromiseError : public DTorchError {
 public:
  using DTorchError::DTorchError;
  ~BrokenPromiseError() override;
};

/// The promise has been fulfilled, cancelled or broken before.
class DTORCH_API PromiseAlreadySatisfiedError : public DTorchError {
 public:
  using DTorchError::DTorchError;
  ~PromiseAlreadySatisfiedError() override;
};

/// A second Get() on one handle.
class DTORCH_API FutureAlreadyRetrievedError : public DTorchError {
 public:
  using DTorchError::DTorchError;
  ~FutureAlreadyRetrievedError() override;
};

/// The owner of the promise has called Cancel(). `concurrent.futures.CancelledError` in Python.
class DTORCH_API CancelledError : public DTorchError {
 public:
  using DTorchError::DTorchError;
  ~CancelledError() override;
};

/// The producer, in another process, has set an exception whose type cannot be rebuilt here.
class DTORCH_API RemoteError : public DTorchError {
 public:
  RemoteError(std::string type_name, std::string message, std::string traceback);
  ~RemoteError() override;
  const std::string& type_name() const { return type_name_; }
  const std::string& message() const { return message_; }
  const std::string& traceback() const { return traceback_; }

 private:
  std::string type_name_, message_, traceback_;
};

/// A time limit has passed; the future can still be waited for. The builtin `TimeoutError` in
/// Python, hence not a DTorchError.
class DTORCH_API TimeoutError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  ~TimeoutError() override;
};

}  // namespace dtorch
