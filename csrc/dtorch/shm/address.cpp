#include "dtorch/shm/address.h"

#include "dtorch/shm/layout.h"

#include <cstring>
#include <stdexcept>

namespace dtorch::shm {
namespace {

// "dtorch2-t-" or "dtorch2-v-", then these bytes as hexadecimal digits.
struct Packed {
  uint32_t pid, start;
  uint64_t pid_namespace;
  int32_t memory_fd, bell_fd;
  uint8_t nonce[16];
  uint32_t slot, generation;
};
static_assert(sizeof(Packed) == 48);

constexpr std::string_view kTensorPrefix = "dtorch2-t-";
constexpr std::string_view kVoidPrefix = "dtorch2-v-";
constexpr char kDigits[] = "0123456789abcdef";

int DigitValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

std::string Token::ToText() const {
  Packed packed{mailbox.owner.pid,
                mailbox.owner.start,
                mailbox.pid_namespace,
                mailbox.memory_fd,
                mailbox.bell_fd,
                {},
                slot,
                generation};
  std::memcpy(packed.nonce, mailbox.nonce.data(), sizeof(packed.nonce));
  std::string text(has_value ? kTensorPrefix : kVoidPrefix);
  const size_t start = text.size();
  text.resize(start + 2 * sizeof(packed));
  const auto* bytes = reinterpret_cast<const uint8_t*>(&packed);
  for (size_t i = 0; i < sizeof(packed); ++i) {
    text[start + 2 * i] = kDigits[bytes[i] >> 4];
    text[start + 2 * i + 1] = kDigits[bytes[i] & 15];
  }
  return text;
}

uint64_t Token::Key() const {
  uint64_t key = 0;
  std::memcpy(&key, mailbox.nonce.data(), sizeof key);
  key ^= uint64_t{generation} << 32 | slot;
  return (key * 0x9E3779B97F4A7C15u) >> 16;
}

Token Token::FromText(std::string_view text) {
  const bool tensor = text.substr(0, kTensorPrefix.size()) == kTensorPrefix;
  bool whole = (tensor || text.substr(0, kVoidPrefix.size()) == kVoidPrefix) &&
               text.size() == kTensorPrefix.size() + 2 * sizeof(Packed);
  Packed packed{};
  if (whole) {
    auto* bytes = reinterpret_cast<uint8_t*>(&packed);
    const char* digits = text.data() + kTensorPrefix.size();
    for (size_t i = 0; i < sizeof(packed); ++i) {
      const int high = DigitValue(digits[2 * i]), low = DigitValue(digits[2 * i + 1]);
      whole = whole && high >= 0 && low >= 0;
      bytes[i] = static_cast<uint8_t>(high << 4 | low);
    }
  }
  if (!whole || packed.slot >= kSlots || packed.generation == 0 || packed.memory_fd < 0 ||
      packed.bell_fd < 0) {
    throw std::invalid_argument(
        "token: expected what a promise's token says ('dtorch2-...'), got '" +
        std::string(text.substr(0, 64)) + "'");
  }
  Token token;
  token.mailbox.owner = {packed.pid, packed.start};
  token.mailbox.pid_namespace = packed.pid_namespace;
  token.mailbox.memory_fd = packed.memory_fd;
  token.mailbox.bell_fd = packed.bell_fd;
  std::memcpy(token.mailbox.nonce.data(), packed.nonce, sizeof(packed.nonce));
  token.slot = packed.slot;
  token.generation = packed.generation;
  token.has_value = tensor;
  return token;
}

}  // namespace dtorch::shm
