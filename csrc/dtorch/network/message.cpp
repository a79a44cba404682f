#include "dtorch/network/message.h"

#include "dtorch/base/fields.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace dtorch::network {
namespace {

constexpr int64_t kVersion = 2;
constexpr int64_t kFewBytes = 1 << 20;

struct Head {
  int64_t version = kVersion;
  int64_t verb = 0;
  int64_t number = 0;
  int64_t has_bytes = 0;
};

std::string_view BytesOf(const std::vector<int64_t>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(numbers[0])};
}
std::string_view BytesOf(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

// TRANSPORT://HOST:PORT, where the host may be a number in brackets.
bool IsAddress(std::string_view text) {
  const size_t scheme = text.find("://");
  const size_t port = text.rfind(':');
  if (scheme == std::string_view::npos || port <= scheme + 3 || port + 1 >= text.size()) {
    return false;
  }
  const auto all_of = [&](size_t from, size_t to, const char* others, bool letters) {
    return std::all_of(text.begin() + from, text.begin() + to, [&](char c) {
      const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
      return (c >= '0' && c <= '9') || (letters && letter) ||
             (c != 0 && std::strchr(others, c) != nullptr);
    });
  };
  return all_of(0, scheme, "_", true) && all_of(scheme + 3, port, "_-.:[]%", true) &&
         all_of(port + 1, text.size(), "", false);
}

}  // namespace

Peer Peer::FromText(const std::string& text) {
  const size_t at = text.find('@');
  const bool is_whole = at != std::string::npos && at > 0 && IsAddress(text.substr(at + 1));
  TORCH_CHECK_VALUE(is_whole,
                    "token: expected the name of a worker of torch.distributed.rpc and its "
                    "address, as NAME@uv://HOST:PORT, got '",
                    text.substr(0, 200),
                    "': was it cut off, or changed, or made by another version of dtorch_ops?");
  return {text.substr(0, at), text.substr(at + 1)};
}

bool Request::HasFreight() const {
  return bytes.defined() && (!bytes.is_cpu() || bytes.numel() > kFewBytes);
}

std::vector<char> Request::Pack() {
  at::Tensor few;
  if (!HasFreight()) few = std::exchange(bytes, {});
  const Head head{.verb = static_cast<int64_t>(verb),
                  .number = number,
                  .has_bytes = static_cast<int64_t>(few.defined())};
  const auto* const begin = reinterpret_cast<const char*>(&head);
  const std::string_view fields[] = {sender, token, text, BytesOf(description),
                                     few.defined() ? BytesOf(few) : std::string_view()};
  size_t size = sizeof(head);
  for (const auto& field : fields) size += sizeof(uint64_t) + field.size();
  std::vector<char> packed;
  packed.reserve(size);
  packed.insert(packed.end(), begin, begin + sizeof(head));
  for (const auto& field : fields) AppendField(packed, field);
  return packed;
}

bool Request::Unpack(std::string_view packed, Request& request) {
  Head head;
  if (packed.size() < sizeof(head)) return false;
  std::memcpy(&head, packed.data(), sizeof(head));
  packed.remove_prefix(sizeof(head));
  std::string_view sender, token, text, numbers, few;
  if (head.version != kVersion || !TakeField(packed, sender) || !TakeField(packed, token) ||
      !TakeField(packed, text) || !TakeField(packed, numbers) || !TakeField(packed, few) ||
      !packed.empty() || numbers.size() % sizeof(request.description[0]) != 0) {
    return false;
  }
  request.verb = static_cast<Verb>(head.verb);
  request.number = head.number;
  request.sender = sender;
  request.token = token;
  request.text = text;
  request.description.resize(numbers.size() / sizeof(request.description[0]));
  if (!numbers.empty()) std::memcpy(request.description.data(), numbers.data(), numbers.size());
  if (head.has_bytes != 0) {
    // Memory of their own, and aligned for any dtype.
    request.bytes = at::empty({static_cast<int64_t>(few.size())}, at::kByte);
    if (!few.empty()) std::memcpy(request.bytes.mutable_data_ptr(), few.data(), few.size());
  }
  return true;
}

}  // namespace dtorch::network
