#pragma once

#include "dtorch/base/api.h"

#include <exception>
#include <string>
#include <string_view>

namespace dtorch {

/// An error on its way to another process: text alone, nothing that runs when it is read.
struct ErrorRecord {
  std::string module;     // of the Python type; empty for a C++ error
  std::string type_name;  // qualified
  std::string message;
  std::string traceback;
  std::string arguments;  // of the Python exception, as JSON; empty if they cannot be

  std::string ToBytes() const;
  /// False if `bytes` is none.
  static bool FromBytes(std::string_view bytes, ErrorRecord& record);
};

/// The binding that knows Python exceptions installs both. `encode` may return false: no Python
/// exception. `decode` makes what the future fails with.
struct ErrorCodec {
  bool (*encode)(const std::exception_ptr& error, ErrorRecord& record) = nullptr;
  std::exception_ptr (*decode)(const ErrorRecord& record) = nullptr;
};
DTORCH_API void SetErrorCodec(const ErrorCodec& codec);

ErrorRecord EncodeError(const std::exception_ptr& error);
std::exception_ptr DecodeError(const ErrorRecord& record);

/// What it says, without a C++ stack.
std::string TextOf(const std::exception& error);

}  // namespace dtorch
