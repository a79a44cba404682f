#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// What a producer far away says to the owner of a promise, and is told.
namespace dtorch::network {

/// What stands for a process in a token and in a request: its name in torch.distributed.rpc, and
/// where its agent listens (agent.h). The same process initialised anew is another peer.
struct Peer {
  std::string name;
  std::string address;

  std::string ToText() const { return name + '@' + address; }
  static Peer FromText(const std::string& text);  // c10::ValueError if it is none
};

enum class Verb : int64_t {
  kBeat,      // are you there? Answered when `number` milliseconds have passed: peers.h
  kFreight,   // the reply's text: where large values are taken
  kHold,      // it was unpickled here
  kDrop,      // and has gone
  kHandOver,  // is about to be pickled on
  kLook,      // is it pending?
  kReserve,   // a value is under way, or in here. `number`: one that the sender has not used yet
  kSet,       // the value, or that the one in the reservation counts. `number`: that one's, or 0
  kFail,      // `text`: an ErrorRecord. `number` as above
  kAbandon,   // `number`: the reservation
};

struct Request {
  Verb verb = Verb::kBeat;
  std::string sender;  // a Peer
  std::string token;   // PromiseToken::local
  int64_t number = 0;
  std::string text;
  // Of a tensor: dtype, type and index of the device that it comes from, and its sizes. Its
  // elements are bytes, so that nobody on the way has to know the dtype.
  std::vector<int64_t> description;
  at::Tensor bytes;  // undefined: none

  /// Whether `bytes` are too many to go with the text of a message: they travel beside it, as they
  /// lie, which takes a handshake.
  bool HasFreight() const;
  /// The text. Takes `bytes` along, which then are here no more, unless they are freight.
  std::vector<char> Pack();
  /// False if it is none that this version of dtorch_ops has packed.
  static bool Unpack(std::string_view packed, Request& request);
};

struct Reply {
  enum class Status : char {
    kDone = 'd',
    kSatisfied = 's',  // it was fulfilled, cancelled or broken before
    kElsewhere = 'e',  // no promise of the process that was asked
    kRefused = 'r',
  };
  Status status = Status::kDone;
  std::string text;

  std::string ToText() const { return static_cast<char>(status) + text; }
  static Reply FromText(const std::string& from) {
    if (from.empty()) return {Status::kRefused, "the answer was empty"};
    return {static_cast<Status>(from[0]), from.substr(1)};
  }
};

}  // namespace dtorch::network
