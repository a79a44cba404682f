#include "dtorch/base/host.h"

namespace dtorch {
namespace {
Host host;  // constant-initialised: usable from any static initialiser
}

void SetHost(const Host& value) { host = value; }
const Host& GetHost() { return host; }

}  // namespace dtorch
