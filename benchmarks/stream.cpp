// Many small tensors from one process to another, written in C++ on both sides. Called by
// file_stream.py, which sends the tokens over and checks what arrives.
//
// The clock is read in here: what it costs to call this from Python is not in the figure.

#include "dtorch/dtorch.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace {

// That of CLOCK_MONOTONIC, which is the same in both processes.
int64_t Nanoseconds() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Waiting {
  std::vector<dtorch::TensorFuture> futures;
  std::vector<at::Tensor> values;
  std::string tokens;  // one a line
};

struct Holding {
  std::vector<dtorch::TensorPromise> promises;
  std::vector<at::Tensor> values;
};

}  // namespace

// ---- The consumer ----

extern "C" Waiting* StreamMake(uint64_t count) {
  auto* waiting = new Waiting;
  for (uint64_t i = 0; i < count; ++i) {
    dtorch::TensorPromise promise;
    waiting->futures.push_back(promise.GetFuture());
    waiting->tokens += promise.Token() + '\n';
  }
  waiting->values.reserve(count);
  return waiting;
}

extern "C" const char* StreamTokens(const Waiting* waiting) { return waiting->tokens.c_str(); }

/// Waits for all. The instant at which the last was there, in nanoseconds.
extern "C" int64_t StreamTake(Waiting* waiting) {
  for (auto& future : waiting->futures) waiting->values.push_back(future.Get());
  return Nanoseconds();
}

/// Copies what has come, one after the other, and ends it.
extern "C" void StreamFinish(Waiting* waiting, std::byte* to) {
  for (const auto& value : waiting->values) {
    std::memcpy(to, value.const_data_ptr(), value.nbytes());
    to += value.nbytes();
  }
  delete waiting;
}

// ---- The producer ----

/// What will be set are `size` bytes for each, one after the other from `bytes` on.
extern "C" Holding* StreamHold(const char* tokens, uint8_t* bytes, int64_t size) {
  auto* holding = new Holding;
  std::istringstream lines(tokens);
  for (std::string token; std::getline(lines, token); bytes += size) {
    holding->promises.push_back(dtorch::TensorPromise::FromToken(token));
    holding->values.push_back(at::from_blob(bytes, {size}, at::kByte));
  }
  return holding;
}

/// Sets all. The instant at which it began, in nanoseconds.
extern "C" int64_t StreamSet(const Holding* holding) {
  const int64_t began = Nanoseconds();
  for (size_t i = 0; i < holding->promises.size(); ++i) {
    holding->promises[i].SetValue(holding->values[i]);
  }
  return began;
}

extern "C" void StreamDrop(Holding* holding) { delete holding; }
