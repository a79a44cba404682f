#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

// Texts behind each other in one, each with its length before it: what travels to another process.
namespace dtorch {

/// `Bytes`: a string, or a vector of char.
template <typename Bytes>
void AppendField(Bytes& bytes, std::string_view field) {
  const uint64_t size = field.size();
  const auto* const begin = reinterpret_cast<const char*>(&size);
  bytes.insert(bytes.end(), begin, begin + sizeof(size));
  bytes.insert(bytes.end(), field.begin(), field.end());
}

/// Takes the first one off `bytes`. False if there is none that is whole.
inline bool TakeField(std::string_view& bytes, std::string_view& field) {
  uint64_t size = 0;
  if (bytes.size() < sizeof(size)) return false;
  std::memcpy(&size, bytes.data(), sizeof(size));
  bytes.remove_prefix(sizeof(size));
  if (bytes.size() < size) return false;
  field = bytes.substr(0, size);
  bytes.remove_prefix(size);
  return true;
}

}  // namespace dtorch
