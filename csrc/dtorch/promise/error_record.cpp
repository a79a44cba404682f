#include "dtorch/promise/error_record.h"

#include "dtorch/base/error.h"
#include "dtorch/base/fields.h"

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>

namespace dtorch {
namespace {

ErrorCodec codec;

constexpr std::string ErrorRecord::* kFields[] = {&ErrorRecord::module, &ErrorRecord::type_name,
                                                  &ErrorRecord::message, &ErrorRecord::traceback,
                                                  &ErrorRecord::arguments};

}  // namespace

std::string ErrorRecord::ToBytes() const {
  std::string bytes;
  for (auto field : kFields) AppendField(bytes, this->*field);
  return bytes;
}

bool ErrorRecord::FromBytes(std::string_view bytes, ErrorRecord& record) {
  for (auto field : kFields) {
    std::string_view taken;
    if (!TakeField(bytes, taken)) return false;
    record.*field = taken;
  }
  return bytes.empty();
}

void SetErrorCodec(const ErrorCodec& value) { codec = value; }

namespace {

// As a Python process would name it.
struct TypeName {
  const char* module;
  const char* name;
};

template <typename Error>
bool Is(const std::exception& error) {
  return dynamic_cast<const Error*>(&error) != nullptr;
}

TypeName TypeNameOf(const std::exception& error) {
  constexpr char kBuiltins[] = "builtins", kOurs[] = "dtorch_ops.errors";
  if (Is<c10::OutOfMemoryError>(error)) return {"torch", "OutOfMemoryError"};
  if (Is<c10::NotImplementedError>(error)) return {kBuiltins, "NotImplementedError"};
  if (Is<c10::IndexError>(error)) return {kBuiltins, "IndexError"};
  if (Is<c10::ValueError>(error)) return {kBuiltins, "ValueError"};
  if (Is<c10::TypeError>(error)) return {kBuiltins, "TypeError"};
  if (Is<BrokenPromiseError>(error)) return {kOurs, "BrokenPromiseError"};
  if (Is<PromiseAlreadySatisfiedError>(error)) return {kOurs, "PromiseAlreadySatisfiedError"};
  if (Is<FutureAlreadyRetrievedError>(error)) return {kOurs, "FutureAlreadyRetrievedError"};
  if (Is<CancelledError>(error)) return {"concurrent.futures._base", "CancelledError"};
  if (Is<DTorchError>(error)) return {kOurs, "DTorchError"};
  if (Is<TimeoutError>(error)) return {kBuiltins, "TimeoutError"};
  if (Is<std::bad_alloc>(error)) return {kBuiltins, "MemoryError"};
  return {kBuiltins, "RuntimeError"};
}

std::string JsonString(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      json += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", c);
      json += escaped;
    } else {
      json += c;
    }
  }
  return json + "\"";
}

}  // namespace

ErrorRecord EncodeError(const std::exception_ptr& error) {
  ErrorRecord record;
  if (codec.encode && codec.encode(error, record)) return record;
  try {
    std::rethrow_exception(error);
  } catch (const RemoteError& e) {  // on its way further
    record.type_name = e.type_name();
    record.message = e.message();
    record.traceback = e.traceback();
    return record;
  } catch (const std::exception& e) {
    const auto [module, name] = TypeNameOf(e);
    record.module = module;
    record.type_name = name;
    record.message = TextOf(e);
    // args, what the class is made of, and attributes (dtorch_ops/errors.py).
    const std::string text = JsonString(record.message);
    record.arguments = "[[" + text + "],[" + text + "],{}]";
  } catch (...) {
    record.type_name = "RuntimeError";
    record.message = "an exception that is no std::exception";
  }
  return record;
}

std::exception_ptr DecodeError(const ErrorRecord& record) {
  if (codec.decode) return codec.decode(record);
  return std::make_exception_ptr(RemoteError(record.type_name, record.message, record.traceback));
}

std::string TextOf(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch ? of_torch->what_without_backtrace() : error.what();
}

}  // namespace dtorch
