#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

// The streams that work of ours runs on. All are taken from torch's pool of high priority, once:
// what is left of it is the user's. Thread-safe.
namespace dtorch {

/// The current stream of an accelerator. An error if it records a graph: what it is given then does
/// not happen until that is replayed. `op` is for the message.
c10::Stream CurrentStream(c10::Device device, const char* op);

/// Where copies run, on `device`, that wait for `stream`. Each stream has its own, so that no
/// stream's work holds up another one's copies.
c10::Stream SideStream(const c10::Stream& stream, c10::Device device);

/// Where copies from the host run, which wait for nothing.
c10::Stream UploadStream(c10::Device device);

/// One that is never given any work.
c10::Stream IdleStream(c10::Device device);

}  // namespace dtorch
