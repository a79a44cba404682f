#pragma once

#include <optional>
#include <string>

// What a test has asked to go wrong. With the machine's lock held.
//
// Two kinds: a task that fails when the device runs it, long after the call that queued it has
// returned; and a call that fails at once.
namespace fake {

/// The next task named `kind` fails when it runs: "kernel", "copy" or "event". Several requests
/// of one kind are for one task after the other.
void FailNextLocked(const std::string& kind, const std::string& message);

/// The next call named `call` throws: "kernel", "copy", "event", "wait", "stream", "alloc",
/// "pinned_alloc", "query_event", "synchronize_event", "synchronize_stream", "synchronize_device".
void FailCallLocked(const std::string& call, const std::string& message);

/// Takes the request for a task that is queued now.
std::optional<std::string> TakeTaskFaultLocked(const std::string& kind);

/// Throws if the call is to fail.
void MayFailCallLocked(const std::string& call);

void ClearFaultsLocked();

}  // namespace fake
