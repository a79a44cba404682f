#include "dtorch/promise/backend.h"

namespace dtorch {
namespace {
Backend* file_backend = nullptr;
}

ProducerEnd::~ProducerEnd() = default;
Backend::~Backend() = default;

void SetFileBackend(Backend* backend) { file_backend = backend; }
Backend& FileBackend() { return *file_backend; }

}  // namespace dtorch
