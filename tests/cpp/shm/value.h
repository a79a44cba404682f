#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// Values that show whether they are whole: every word of one follows from its first and its place.
namespace dtorch::shm::test {

inline uint64_t WordAt(uint64_t seed, uint64_t index) {
  return seed ^ (index * 0x9e3779b97f4a7c15 & ~uint64_t{0xffffffff});
}

/// Writes bytes [from, to) of the value of `seed`; `from` is a multiple of 8.
inline void Fill(std::byte* value, uint64_t from, uint64_t to, uint64_t seed) {
  for (uint64_t at = from; at < to; at += 8) {
    const uint64_t word = WordAt(seed, at / 8);
    std::memcpy(value + at, &word, to - at < 8 ? to - at : 8);
  }
}

/// The seed of a value of at least 8 bytes.
inline uint64_t SeedOf(const std::byte* value) {
  uint64_t seed;
  std::memcpy(&seed, value, 8);
  return seed;
}

inline bool IsWhole(const std::byte* value, uint64_t bytes) {
  const uint64_t seed = SeedOf(value);
  for (uint64_t at = 0; at < bytes; at += 8) {
    const uint64_t word = WordAt(seed, at / 8);
    if (std::memcmp(value + at, &word, bytes - at < 8 ? bytes - at : 8) != 0) return false;
  }
  return true;
}

}  // namespace dtorch::shm::test
