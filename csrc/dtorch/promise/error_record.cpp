#include "dtorch/promise/error_record.h"

#include "dtorch/base/error.h"

#include <cstdint>
#include <cstring>

namespace dtorch {
namespace {

ErrorCodec codec;

constexpr std::string ErrorRecord::* kFields[] = {&ErrorRecord::module, &ErrorRecord::type_name,
                                                  &ErrorRecord::message, &ErrorRecord::traceback,
                                                  &ErrorRecord::arguments};

}  // namespace

std::string ErrorRecord::ToBytes() const {
  std::string bytes;
  for (auto field : kFields) {
    const uint64_t size = (this->*field).size();
    bytes.append(reinterpret_cast<const char*>(&size), sizeof(size));
    bytes += this->*field;
  }
  return bytes;
}

bool ErrorRecord::FromBytes(std::string_view bytes, ErrorRecord& record) {
  for (auto field : kFields) {
    uint64_t size = 0;
    if (bytes.size() < sizeof(size)) return false;
    std::memcpy(&size, bytes.data(), sizeof(size));
    bytes.remove_prefix(sizeof(size));
    if (bytes.size() < size) return false;
    record.*field = bytes.substr(0, size);
    bytes.remove_prefix(size);
  }
  return bytes.empty();
}

void SetErrorCodec(const ErrorCodec& value) { codec = value; }

ErrorRecord EncodeError(const std::exception_ptr& error) {
  ErrorRecord record;
  if (codec.encode && codec.encode(error, record)) return record;
  record.type_name = "RuntimeError";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    record.message = e.what();
  } catch (...) {
    record.message = "an exception that is no std::exception";
  }
  return record;
}

std::exception_ptr DecodeError(const ErrorRecord& record) {
  if (codec.decode) return codec.decode(record);
  return std::make_exception_ptr(RemoteError(record.type_name, record.message, record.traceback));
}

}  // namespace dtorch
