#pragma once

#include "dtorch/base/api.h"

#include <cstdint>

// What this process has in shared memory, in both roles.
namespace dtorch::file {

struct Stats {
  // As a consumer: its promises, which others fulfil.
  uint64_t outstanding = 0;     // promises that may be fulfilled from another process
  uint64_t unclaimed = 0;       // of these, those whose token nobody has unpickled
  uint64_t producers = 0;       // processes that have attached themselves
  uint64_t received_bytes = 0;  // of tensors received that live, the smallest left out
  uint64_t memory_bytes = 0;  // of its mailbox in all, with what producers keep for the next value
  // As a producer, of other processes' promises.
  uint64_t consumers = 0;     // processes that it is attached to
  uint64_t held = 0;          // promises that it may fulfil
  uint64_t live_bytes = 0;    // of values sent that the consumers still have, and of memory lent
  uint64_t cached_bytes = 0;  // that it keeps for the next values: what Trim() gives back
};

DTORCH_API Stats GetStats();

/// Gives memory that is kept for the next values back to the system.
DTORCH_API void Trim();

}  // namespace dtorch::file
