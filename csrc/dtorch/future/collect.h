#pragma once

#include "dtorch/base/api.h"
#include "dtorch/future/waiter_list.h"

#include <functional>
#include <vector>

// Groups. The members keep a group until it is complete; but if all who hold its result drop that
// (ReleaseFuture), and nobody waits for it nor has hung a callback on it, the group is given up,
// and leaves nothing on its members.
namespace dtorch {

/// A future of the list of `futures`, complete when all are. The first error of any completes it
/// with that error at once, while the rest still run. Of an empty list: complete, and empty.
/// `element_type` is what the futures hold. No member is consumed or altered.
DTORCH_API FuturePtr CollectAll(const std::vector<FuturePtr>& futures,
                                const c10::TypePtr& element_type);

/// A future of the value or the error of whichever of `futures` completes first; of those that are
/// complete already, the first in the list. c10::ValueError for an empty list.
DTORCH_API FuturePtr CollectAny(const std::vector<FuturePtr>& futures,
                                const c10::TypePtr& element_type);

/// A future of what `read` makes of `future` when that is complete, in the thread that completes
/// it. What it throws is the error. Dropped without having been called if nobody wants the result.
using ReadFunction = std::function<c10::IValue(const FuturePtr& future)>;
DTORCH_API FuturePtr CollectRead(const FuturePtr& future, const c10::TypePtr& type,
                                 ReadFunction read);

}  // namespace dtorch
