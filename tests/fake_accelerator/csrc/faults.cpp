#include "faults.h"

#include <deque>
#include <map>

#include "errors.h"

namespace fake {

namespace {

using Requests = std::map<std::string, std::deque<std::string>>;

Requests& tasks() {
  static Requests* const leaked = new Requests;
  return *leaked;
}

Requests& calls() {
  static Requests* const leaked = new Requests;
  return *leaked;
}

std::optional<std::string> Take(Requests& requests, const std::string& kind) {
  const auto found = requests.find(kind);
  if (found == requests.end() || found->second.empty()) return std::nullopt;
  std::string message = std::move(found->second.front());
  found->second.pop_front();
  return message;
}

}  // namespace

void FailNextLocked(const std::string& kind, const std::string& message) {
  tasks()[kind].push_back(message);
}

void FailCallLocked(const std::string& call, const std::string& message) {
  calls()[call].push_back(message);
}

std::optional<std::string> TakeTaskFaultLocked(const std::string& kind) {
  return Take(tasks(), kind);
}

void MayFailCallLocked(const std::string& call) {
  const std::optional<std::string> message = Take(calls(), call);
  if (!message) return;
  if (call == "alloc" || call == "pinned_alloc") ThrowOutOfMemory(*message);
  ThrowAcceleratorError(*message);
}

void ClearFaultsLocked() {
  tasks().clear();
  calls().clear();
}

}  // namespace fake
