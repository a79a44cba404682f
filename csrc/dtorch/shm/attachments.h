#pragma once

#include "dtorch/base/api.h"
#include "dtorch/shm/address.h"
#include "dtorch/shm/attachment.h"

#include <memory>
#include <vector>

// The attachments of this process, one for each that waits for it. They are kept while the other
// process lives, whether or not they hold anything: the lane stays ours, and its memory warm. A
// thread of ours sleeps until one of the others ends, and lets go of what belonged to it.
//
// Around a fork all of them are locked, in the parent until the child has taken over what it holds:
// the holds that the child finds are those of the fork. Thread-safe.
namespace dtorch::shm {

/// The attachment to `address`, made if there is none. std::runtime_error, which says why, if the
/// memory cannot be reached: another PID namespace, a process that has gone, no permission.
DTORCH_API std::shared_ptr<Attachment> AttachTo(const Address& address);

/// All whose other process lives.
DTORCH_API std::vector<std::shared_ptr<Attachment>> AllAttachments();

}  // namespace dtorch::shm
