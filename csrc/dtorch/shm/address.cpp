#include "dtorch/shm/address.h"

#include "dtorch/shm/layout.h"

#include <cinttypes>
#include <cstdio>
#include <stdexcept>

namespace dtorch::shm {
namespace {

constexpr char kFormat[] =
    "dtorch1-%c-%" PRIu32 "-%" PRIu32 "-%" PRIu64 "-%d-%d-%32[0-9a-f]-%" PRIu32 "-%" PRIu32 "%n";

}  // namespace

std::string Token::ToText() const {
  char nonce[33];
  for (size_t i = 0; i < mailbox.nonce.size(); ++i) {
    std::snprintf(nonce + 2 * i, 3, "%02x", mailbox.nonce[i]);
  }
  char text[256];
  std::snprintf(text, sizeof(text),
                "dtorch1-%c-%" PRIu32 "-%" PRIu32 "-%" PRIu64 "-%d-%d-%s-%" PRIu32 "-%" PRIu32,
                has_value ? 't' : 'v', mailbox.owner.pid, mailbox.owner.start,
                mailbox.pid_namespace, mailbox.memory_fd, mailbox.bell_fd, nonce, slot, generation);
  return text;
}

Token Token::FromText(const std::string& text) {
  Token token;
  char kind = 0;
  char nonce[33] = {};
  int length = -1;
  const int fields = std::sscanf(text.c_str(), kFormat, &kind, &token.mailbox.owner.pid,
                                 &token.mailbox.owner.start, &token.mailbox.pid_namespace,
                                 &token.mailbox.memory_fd, &token.mailbox.bell_fd, nonce,
                                 &token.slot, &token.generation, &length);
  const bool whole = fields == 9 && length == static_cast<int>(text.size());
  if (!whole || (kind != 't' && kind != 'v') || nonce[31] == 0 || token.slot >= kSlots ||
      token.generation == 0 || token.mailbox.memory_fd < 0 || token.mailbox.bell_fd < 0) {
    throw std::invalid_argument(
        "token: expected what a promise's token says ('dtorch1-...'), got '" + text.substr(0, 64) +
        "'");
  }
  token.has_value = kind == 't';
  for (size_t i = 0; i < token.mailbox.nonce.size(); ++i) {
    unsigned byte = 0;
    std::sscanf(nonce + 2 * i, "%2x", &byte);
    token.mailbox.nonce[i] = static_cast<uint8_t>(byte);
  }
  return token;
}

}  // namespace dtorch::shm
