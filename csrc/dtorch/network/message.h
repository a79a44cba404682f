#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// What a producer far away says to the owner of a promise, and is told.
namespace dtorch::network {

enum class Verb : int64_t {
  kBeat,      // are you there?
  kHold,      // it was unpickled here. `number`: whether the sender can be asked to answer later
  kDrop,      // and has gone
  kHandOver,  // is about to be pickled on
  kLook,      // is it pending?
  kReserve,   // a value is under way; the reply's text is the reservation's number
  kSet,       // the value. `number`: the reservation, or 0
  kFail,      // `text`: an ErrorRecord. `number` as above
  kAbandon,   // `number`: the reservation
};

struct Request {
  Verb verb = Verb::kBeat;
  std::string sender;  // the worker's name
  std::string token;   // PromiseToken::local
  int64_t number = 0;
  std::string text;
  // Of a tensor: dtype, type and index of the device that it comes from, and its sizes. Its
  // elements are bytes, so that nobody on the way has to know the dtype: `bytes`,
  // which RPC sends from where they lie, or, if they are few, `text`, which takes it half the time.
  std::vector<int64_t> description;
  at::Tensor bytes;  // undefined: none
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
