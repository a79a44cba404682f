#include "dtorch/promise/backend.h"

namespace dtorch {
namespace {
Backend* file_backend = nullptr;
Network* network = nullptr;
}  // namespace

ProducerEnd::~ProducerEnd() = default;
Backend::~Backend() = default;
Network::~Network() = default;
UnreachableError::~UnreachableError() = default;

void SetFileBackend(Backend* backend) { file_backend = backend; }
Backend& FileBackend() { return *file_backend; }

void SetNetwork(Network* made) { network = made; }
Network* NetworkIfAny() { return network; }

}  // namespace dtorch
