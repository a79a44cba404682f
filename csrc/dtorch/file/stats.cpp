#include "dtorch/file/stats.h"

#include "dtorch/file/service.h"
#include "dtorch/shm/attachments.h"

namespace dtorch::file {

Stats GetStats() {
  Stats stats;
  if (Service* service = Service::GetIfAny()) {
    const shm::Mailbox::Stats mailbox = service->GetStats();
    stats.outstanding = mailbox.outstanding;
    stats.unclaimed = mailbox.unclaimed;
    stats.producers = mailbox.producers;
    stats.received_bytes = mailbox.received_bytes;
    stats.memory_bytes = mailbox.memory_bytes;
  }
  for (const auto& attachment : shm::AllAttachments()) {
    const shm::Attachment::Stats lane = attachment->GetStats();
    ++stats.consumers;
    stats.held += lane.held;
    stats.live_bytes += lane.live_bytes;
    stats.cached_bytes += lane.cached_bytes;
  }
  return stats;
}

void Trim() {
  for (const auto& attachment : shm::AllAttachments()) attachment->Trim(0);
}

}  // namespace dtorch::file
