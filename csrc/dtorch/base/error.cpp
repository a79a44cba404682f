#include "dtorch/base/error.h"

namespace dtorch {

DTorchError::~DTorchError() = default;
BrokenPromiseError::~BrokenPromiseError() = default;
PromiseAlreadySatisfiedError::~PromiseAlreadySatisfiedError() = default;
FutureAlreadyRetrievedError::~FutureAlreadyRetrievedError() = default;
CancelledError::~CancelledError() = default;
TimeoutError::~TimeoutError() = default;

}  // namespace dtorch
