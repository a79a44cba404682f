#include "python/errors.h"

#include "dtorch/base/error.h"
#include "dtorch/promise/error_record.h"

#include "python/gil.h"

#include <torch/csrc/Exceptions.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace py = pybind11;

namespace dtorch::python {
namespace {

// What dtorch_ops.errors registers. Leaked on purpose: errors are read until the very end.
struct Registered {
  PyObject* dtorch_error = PyExc_RuntimeError;
  PyObject* broken_promise = PyExc_RuntimeError;
  PyObject* already_satisfied = PyExc_RuntimeError;
  PyObject* already_retrieved = PyExc_RuntimeError;
  PyObject* cancelled = PyExc_RuntimeError;
  PyObject* preserve = nullptr;  // exception -> what is kept of it
  PyObject* revive = nullptr;    // what was kept -> a fresh exception
  PyObject* encode = nullptr;    // what was kept -> the texts of an ErrorRecord
  PyObject* decode = nullptr;    // these -> what is kept
};
Registered registered;

std::string Describe(py::handle exception) {
  std::string text = Py_TYPE(exception.ptr())->tp_name;
  PyObject* message = Parked([&] { return PyObject_Str(exception.ptr()); });
  const char* utf8 = message ? PyUnicode_AsUTF8(message) : nullptr;
  if (utf8 && *utf8) text += std::string(": ") + utf8;
  Py_XDECREF(message);
  PyErr_Clear();  // an exception whose __str__ raises is still an exception
  return text;
}

class PythonError final : public std::exception {
 public:
  PythonError(py::handle kept, std::string what)
      : kept_(std::make_shared<SharedRef>(kept.ptr())), what_(std::move(what)) {}
  const char* what() const noexcept override { return what_.c_str(); }

  PyObject* kept() const { return kept_->get(); }

  void SetError() const {
    PyObject* fresh = CallOneArg(registered.revive, kept_->get());
    if (!fresh) return;  // the error that says why is set
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(fresh)), fresh);
    Py_DECREF(fresh);
  }

 private:
  std::shared_ptr<SharedRef> kept_;
  std::string what_;
};

// Our own errors, here and in whatever torch binds: false if `error` is none of ours.
bool TrySetError(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PythonError& e) {
    e.SetError();
  } catch (const BrokenPromiseError& e) {
    PyErr_SetString(registered.broken_promise, e.what());
  } catch (const PromiseAlreadySatisfiedError& e) {
    PyErr_SetString(registered.already_satisfied, e.what());
  } catch (const FutureAlreadyRetrievedError& e) {
    PyErr_SetString(registered.already_retrieved, e.what());
  } catch (const CancelledError& e) {
    PyErr_SetString(registered.cancelled, e.what());
  } catch (const DTorchError& e) {
    PyErr_SetString(registered.dtorch_error, e.what());
  } catch (const TimeoutError& e) {
    PyErr_SetString(PyExc_TimeoutError, e.what());
  } catch (...) {
    return false;
  }
  return true;
}

bool Encode(const std::exception_ptr& error, ErrorRecord& record) {
  try {
    std::rethrow_exception(error);
  } catch (const PythonError& python_error) {
    GilAcquire gil;
    if (!gil) return false;
    const auto texts =
        py::reinterpret_steal<py::object>(CallOneArg(registered.encode, python_error.kept()));
    if (!texts) {
      PyErr_Clear();
      return false;
    }
    std::tie(record.module, record.type_name, record.message, record.traceback, record.arguments) =
        texts.cast<std::tuple<std::string, std::string, std::string, std::string, std::string>>();
    return true;
  } catch (...) {
    return false;
  }
}

std::exception_ptr Decode(const ErrorRecord& record) {
  const RemoteError fallback(record.type_name, record.message, record.traceback);
  GilAcquire gil;
  if (!gil) return std::make_exception_ptr(fallback);
  try {
    const auto text = [](const std::string& utf8) {
      return py::reinterpret_steal<py::object>(
          PyUnicode_DecodeUTF8(utf8.data(), static_cast<Py_ssize_t>(utf8.size()), "replace"));
    };
    const py::object kept = py::handle(registered.decode)(
        text(record.module), text(record.type_name), text(record.message), text(record.traceback),
        text(record.arguments));
    return std::make_exception_ptr(
        PythonError(kept, record.message.empty() ? record.type_name
                                                 : record.type_name + ": " + record.message));
  } catch (const py::error_already_set&) {
    return std::make_exception_ptr(fallback);
  }
}

void SetAnyError(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (py::builtin_exception& e) {
    e.set_error();
  } catch (...) {
    torch::translate_exception_to_python(error);
  }
}

}  // namespace

std::exception_ptr MakePythonError(py::handle exception) {
  std::string what = Describe(exception);
  PyObject* kept = CallOneArg(registered.preserve, exception.ptr());
  if (!kept) {  // an exception that cannot be looked at is an error all the same
    PyErr_Clear();
    return std::make_exception_ptr(std::runtime_error(what));
  }
  return std::make_exception_ptr(
      PythonError(py::reinterpret_steal<py::object>(kept), std::move(what)));
}

std::exception_ptr TakePythonError() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace) PyException_SetTraceback(value, trace);
  std::exception_ptr error = MakePythonError(value);
  Parked([&] {  // it may have a finalizer
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
  });
  return error;
}

std::exception_ptr ErrorInObject(PyObject* value) {
  GilAcquire gil;
  if (!gil || !PyExceptionInstance_Check(value)) return nullptr;
  return MakePythonError(value);
}

void SetPythonErrorFromCurrent() {
  const std::exception_ptr error = std::current_exception();
  if (!TrySetError(error)) SetAnyError(error);
}

void BindErrors(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr error) {
    if (error && !TrySetError(error)) std::rethrow_exception(error);
  });
  m.def(
      "register_errors",
      [](py::object dtorch_error, py::object broken_promise, py::object already_satisfied,
         py::object already_retrieved, py::object cancelled, py::object preserve, py::object revive,
         py::object encode, py::object decode) {
        registered = {dtorch_error.release().ptr(),
                      broken_promise.release().ptr(),
                      already_satisfied.release().ptr(),
                      already_retrieved.release().ptr(),
                      cancelled.release().ptr(),
                      preserve.release().ptr(),
                      revive.release().ptr(),
                      encode.release().ptr(),
                      decode.release().ptr()};
        SetErrorCodec({Encode, Decode});
      },
      py::kw_only(), py::arg("dtorch_error"), py::arg("broken_promise"),
      py::arg("already_satisfied"), py::arg("already_retrieved"), py::arg("cancelled"),
      py::arg("preserve"), py::arg("revive"), py::arg("encode"), py::arg("decode"));
}

}  // namespace dtorch::python
