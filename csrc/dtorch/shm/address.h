#pragma once

#include "dtorch/base/api.h"
#include "dtorch/sys/process.h"

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace dtorch::shm {

/// Where a mailbox is, and how to know that it is still the one that was meant: pids and
/// descriptors are used again.
struct Address {
  ProcessId owner;
  uint64_t pid_namespace = 0;
  int memory_fd = -1;  // numbers in the owner
  int bell_fd = -1;
  std::array<uint8_t, 16> nonce{};

  bool operator==(const Address&) const = default;
};

/// One promise of a mailbox. What travels is its text: 106 characters without spaces.
struct Token {
  Address mailbox;
  uint32_t slot = 0;
  uint32_t generation = 0;
  bool has_value = true;  // a TensorPromise; false: a VoidPromise

  DTORCH_API std::string ToText() const;
  /// c10 is not known here: std::invalid_argument, which says what was expected.
  DTORCH_API static Token FromText(std::string_view text);
  /// A number that is hardly another promise's, the same in every process.
  uint64_t Key() const;
};

}  // namespace dtorch::shm
