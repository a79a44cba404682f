#include "dtorch/base/error.h"

#include <utility>

namespace dtorch {

DTorchError::~DTorchError() = default;
BrokenPromiseError::~BrokenPromiseError() = default;
PromiseAlreadySatisfiedError::~PromiseAlreadySatisfiedError() = default;
FutureAlreadyRetrievedError::~FutureAlreadyRetrievedError() = default;
CancelledError::~CancelledError() = default;
TimeoutError::~TimeoutError() = default;

RemoteError::RemoteError(std::string type_name, std::string message, std::string traceback)
    : DTorchError(type_name + ": " + message),
      type_name_(std::move(type_name)),
      message_(std::move(message)),
      traceback_(std::move(traceback)) {}
RemoteError::~RemoteError() = default;

}  // namespace dtorch
