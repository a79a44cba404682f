#include "errors.h"

#include <c10/util/Exception.h>

namespace fake {

namespace {
constexpr int32_t kErrorCode = 700;  // what CUDA calls an illegal address
}

void ThrowAcceleratorError(const std::string& message) {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, kErrorCode,
                              "fake accelerator error: " + message);
}

void ThrowOutOfMemory(const std::string& message) {
  throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__},
                              "fake accelerator out of memory: " + message);
}

}  // namespace fake
