#include "python/groups.h"

#include "dtorch/base/error.h"
#include "dtorch/future/collect.h"
#include "dtorch/future/completion_queue.h"
#include "dtorch/future/wait.h"
#include "dtorch/ops/tracing.h"

#include "python/errors.h"
#include "python/future.h"
#include "python/gil.h"

#include <ATen/core/jit_type.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

namespace dtorch::python {
namespace {

namespace py = pybind11;

c10::TypePtr ElementType(const std::vector<FuturePtr>& futures) {
  return futures.empty() ? c10::TypePtr(c10::AnyType::get()) : futures.front()->elementType();
}

py::list ListOf(py::handle iterable) {
  PyObject* list = PySequence_List(iterable.ptr());
  if (!list) throw py::error_already_set();
  return py::reinterpret_steal<py::list>(list);
}

// The members, as a collector is to see them: where Python reads something else than the native
// value, a future of what Python reads.
std::vector<FuturePtr> Members(const py::list& list) {
  std::vector<FuturePtr> members = FuturesFromSequence(list, "futures");
  for (size_t i = 0; i < members.size(); ++i) {
    if (!IsReadSpecially(list[i])) continue;
    const py::object handle =
        py::handle(reinterpret_cast<PyObject*>(HandleType(HandleKind::kFuture)))(list[i]);
    members[i] =
        CollectRead(members[i], c10::PyObjectType::get(),
                    [reissue = Reissuer(handle.ptr())](const FuturePtr& future) -> c10::IValue {
                      GilAcquire gil;
                      if (!gil) throw DTorchError("the interpreter has ended");
                      return Parked([&] {
                        try {
                          return ValueFromObject(ReadComplete(reissue(future)));
                        } catch (const py::error_already_set&) {
                          SetPythonErrorFromCurrent();
                          std::rethrow_exception(TakePythonError());
                        }
                      });
                    });
  }
  return members;
}

py::object PyCollectAll(py::object futures) {
  const py::list list = ListOf(futures);
  const auto members = Members(list);
  return NewGroupHandle(CollectAll(members, ElementType(members)), list);
}

// The class that all of them have, or Future.
HandleKind CommonKind(const py::list& list) {
  for (const HandleKind kind : {HandleKind::kTensorFuture, HandleKind::kVoidFuture}) {
    const auto is_of_kind = [&](py::handle item) {
      return PyObject_TypeCheck(item.ptr(), HandleType(kind)) != 0;
    };
    if (std::all_of(list.begin(), list.end(), is_of_kind)) return kind;
  }
  return HandleKind::kFuture;
}

py::object PyCollectAny(py::object futures) {
  const py::list list = ListOf(futures);
  const auto members = Members(list);
  const FuturePtr result = CollectAny(members, ElementType(members));
  TraceCollect("dtorch::collect_any", members, result);
  return NewHandle(CommonKind(list), result);
}

py::list PyWaitAll(py::object futures, py::object timeout_ms) {
  const Deadline deadline = DeadlineFromObject(timeout_ms.ptr());
  const py::list list = ListOf(futures);
  CompletionQueue queue(FuturesFromSequence(list, "futures"), /*of_thread=*/true);
  py::list values(list.size());
  while (const size_t pending = queue.remaining()) {
    const std::optional<size_t> index = queue.Pop(deadline);
    if (!index) throw TimeoutError(TimeoutMessage(pending, queue.size()));
    values[*index] = ReadComplete(list[*index]);
  }
  return values;
}

// A CompletionQueue with one deadline for all of it.
class TimedCompletionQueue {
 public:
  TimedCompletionQueue(py::object futures, py::object timeout_ms)
      : deadline_(DeadlineFromObject(timeout_ms.ptr())),
        queue_(FuturesFromSequence(futures, "futures")) {}

  // The next index, or None when all were told.
  std::optional<size_t> Pop() {
    const auto index = queue_.Pop(deadline_);
    const size_t remaining = queue_.remaining();
    if (!index && remaining > 0) throw TimeoutError(TimeoutMessage(remaining, queue_.size()));
    return index;
  }

  std::optional<double> SecondsLeft() const {
    if (deadline_.IsNever()) return std::nullopt;
    return std::chrono::duration<double>(deadline_.when() - Deadline::Clock::now()).count();
  }

 private:
  const Deadline deadline_;
  CompletionQueue queue_;
};

}  // namespace

void BindGroups(py::module_& m) {
  m.def("collect_all", &PyCollectAll);
  m.def("collect_any", &PyCollectAny);
  m.def("wait_all", &PyWaitAll);

  py::class_<TimedCompletionQueue>(m, "CompletionQueue")
      .def(py::init<py::object, py::object>())
      .def("pop", &TimedCompletionQueue::Pop)
      .def("seconds_left", &TimedCompletionQueue::SecondsLeft);
}

}  // namespace dtorch::python
