#include "dtorch/network/stand_ins.h"

#include "dtorch/base/error.h"
#include "dtorch/base/fork.h"
#include "dtorch/base/log.h"
#include "dtorch/future/complete.h"
#include "dtorch/network/peers.h"
#include "dtorch/network/rpc.h"
#include "dtorch/promise/error_record.h"
#include "dtorch/promise/promise_state.h"
#include "dtorch/promise/sendable.h"
#include "dtorch/promise/token.h"
#include "dtorch/promise/unseen.h"
#include "dtorch/shm/address.h"
#include "dtorch/sys/thread.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace dtorch::network {
namespace {

using PromisePtr = c10::intrusive_ptr<PromiseState>;

constexpr char kComponent[] = "network";  // of what is logged

class NotHere : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A value that is under way.
struct Reserved {
  PromisePtr promise;
  std::unique_ptr<Reservation> reservation;
  std::vector<int64_t> description;  // of what has come with the reservation
  at::Tensor bytes;                  // undefined: nothing has
};

// What is held and reserved here for one peer.
struct StandIns {
  std::unordered_multimap<std::string, PromisePtr> held;
  std::unordered_map<int64_t, Reserved> reserved;
  bool IsEmpty() const { return held.empty() && reserved.empty(); }
};

struct Table {
  std::mutex mutex;  // what it guards is dropped behind it
  std::unordered_map<std::string, StandIns> peers;
  std::vector<std::weak_ptr<OwnerEnd>> relying;
};
Table* all = new Table;  // leaked on purpose: RPC's threads may outlive everything
Table& GetTable() { return *all; }

bool HasValue(const std::string& token) { return shm::Token::FromText(token).has_value; }

void CheckHome(const std::string& token) {
  if (!FileBackend().IsHome(token)) throw NotHere("the promise is of another process");
}

PromisePtr Make(const std::string& token) {
  CheckHome(token);
  const PromiseToken local{token, {}, false};
  if (HasValue(token)) return c10::make_intrusive<TensorPromiseState>(local);
  return c10::make_intrusive<VoidPromiseState>(local);
}

PromisePtr FindIfHeld(const Request& request) {
  Table& table = GetTable();
  std::lock_guard<std::mutex> lock(table.mutex);
  const auto peer = table.peers.find(request.sender);
  if (peer == table.peers.end()) return nullptr;
  const auto it = peer->second.held.find(request.token);
  return it == peer->second.held.end() ? nullptr : it->second;
}

PromisePtr FindHeld(const Request& request) {
  if (PromisePtr promise = FindIfHeld(request)) return promise;
  CheckHome(request.token);
  // Throws if it is not outstanding. To make a stand-in and drop it would break it.
  auto found = FileBackend().Import(request.token, HasValue(request.token));
  ReleaseFuture(std::move(found.future));
  throw NotHere("this worker was given up for lost, and the promises that it held with it");
}

// For what fulfils it at once, which may overtake the word that it is held.
PromisePtr Find(const Request& request) {
  if (PromisePtr promise = FindIfHeld(request)) return promise;
  return Make(request.token);
}

// The worker is lost, or this process leaves.
void Lose(StandIns lost, const std::string& why) {
  for (auto& [token, promise] : lost.held) promise->Explain(why);
  for (auto& [number, each] : lost.reserved) each.promise->Explain(why);
}

// Callbacks of the user may block, and the agent's threads are few.
void RunElsewhere(std::function<void()> body) {
  try {
    StartThread(body);
  } catch (const std::exception&) {
    body();  // no thread to be had
  }
}

void OnLost(const std::string& peer, const std::string& why) {
  Log(LogLevel::kInfo, kComponent, why);
  Table& table = GetTable();
  const auto lost = std::make_shared<StandIns>();
  {
    std::lock_guard<std::mutex> lock(table.mutex);
    auto node = table.peers.extract(peer);
    if (!node) return;
    *lost = std::move(node.mapped());
  }
  if (lost->IsEmpty()) return;
  RunElsewhere([lost, why] { Lose(std::move(*lost), why); });
}

const bool registered [[maybe_unused]] = [] {
  SetOnLost(&OnLost);
  OnFork({.child = [] { all = new Table; }});  // what is held in the other one is the parent's
  return true;
}();

// Behind every addition to the table: this process may have left meanwhile, and looked through the
// table before that.
void LoseIfLeft() {
  if (Present().empty()) StopServing();
}

void Hold(const Request& request) {
  PromisePtr promise = Make(request.token);
  Table& table = GetTable();
  {
    std::lock_guard<std::mutex> lock(table.mutex);
    table.peers[request.sender].held.emplace(request.token, std::move(promise));
  }
  Log(LogLevel::kDebug, kComponent, Called(request.sender), " holds a promise");
  LoseIfLeft();
  Watch(request.sender);
}

void Drop(const Request& request) {
  Table& table = GetTable();
  PromisePtr dropped;
  std::lock_guard<std::mutex> lock(table.mutex);
  const auto peer = table.peers.find(request.sender);
  if (peer == table.peers.end()) return;
  const auto it = peer->second.held.find(request.token);
  if (it == peer->second.held.end()) return;
  dropped = std::move(it->second);
  peer->second.held.erase(it);
}

at::Tensor Read(const Request& request) {
  const Unseen unseen;
  const auto& said = request.description;
  const at::Tensor& bytes = request.bytes;
  // RPC does not look whether a tensor lies within its storage.
  if (said.size() < 3 || !bytes.defined() || bytes.scalar_type() != at::kByte ||
      !bytes.is_contiguous() || bytes.storage_offset() != 0 || bytes.numel() < 0 ||
      bytes.storage().nbytes() < static_cast<size_t>(bytes.numel())) {
    throw std::runtime_error("what the producer published makes no sense");
  }
  const at::IntArrayRef sizes(said.data() + 3, said.size() - 3);
  const auto dtype =
      CheckReceived(static_cast<uint64_t>(said[0]), sizes, static_cast<size_t>(bytes.numel()));
  at::Tensor value = at::empty({0}, bytes.options().dtype(dtype));
  // The memory that it was received into, which nobody else has.
  auto* impl = value.unsafeGetTensorImpl();
  impl->set_storage_and_dtype(bytes.storage(), value.dtype());
  impl->set_sizes_contiguous(sizes);
  return value;
}

bool TakesTensor(const PromiseState& promise) {
  return promise.future()->elementType()->kind() == c10::TypeKind::TensorType;
}

void Complete(Reserved& reserved, const Request& request) {
  auto& reservation = reserved.reservation;
  try {
    if (request.verb == Verb::kFail) {
      ErrorRecord record;
      if (!ErrorRecord::FromBytes(request.text, record)) {
        throw std::runtime_error("what the producer published as an error is none");
      }
      reservation->SetError(DecodeError(record));
      return;
    }
    if (!TakesTensor(*reserved.promise)) {
      reservation->SetValue(c10::IValue());
      return;
    }
    at::Tensor value = Read(request);
    const auto wanted = reserved.promise->wanted_device();
    const c10::Device device =
        DeviceNamed(static_cast<uint64_t>(request.description[1]), request.description[2]);
    const auto deliver = GetAcceleratorValues().deliver;
    if ((device.is_cpu() && !wanted) || !deliver) {
      reservation->SetValue(std::move(value));
    } else {
      deliver(reservation, std::move(value), device, wanted);
    }
  } catch (const std::exception& error) {
    if (reservation) SetErrorOf(*reservation, std::make_exception_ptr(DTorchError(TextOf(error))));
  }
}

// What has arrived on a device is ordered by this thread's streams. It completes in another thread.
void CompleteOnDevice(const std::shared_ptr<Reserved>& reserved, const Request& request) {
  try {
    GetAcceleratorValues().deliver_here(reserved->reservation, Read(request),
                                        reserved->promise->wanted_device());
  } catch (const std::exception& error) {
    const auto shown = std::make_exception_ptr(DTorchError(TextOf(error)));
    RunElsewhere([reserved, shown] {
      if (reserved->reservation) SetErrorOf(*reserved->reservation, shown);
    });
  }
}

// What the sender has reserved, taken out of the table.
std::optional<Reserved> TakeReserved(const Request& request) {
  Table& table = GetTable();
  std::lock_guard<std::mutex> lock(table.mutex);
  const auto peer = table.peers.find(request.sender);
  if (peer == table.peers.end()) return std::nullopt;
  auto node = peer->second.reserved.extract(request.number);
  if (!node) return std::nullopt;
  return std::move(node.mapped());
}

// Takes the promise, which is what the producer is told, and completes it: in a thread of its own
// if that runs callbacks, which may block, or wait for what that producer sends next.
void Fulfil(Request request) {
  auto reserved = std::make_shared<Reserved>();
  if (request.number != 0) {
    auto taken = TakeReserved(request);
    if (!taken) {
      throw DTorchError("this worker was given up for lost, and what it had reserved with it");
    }
    *reserved = std::move(*taken);
    if (reserved->bytes.defined() && request.verb == Verb::kSet) {
      request.description = std::move(reserved->description);
      request.bytes = std::move(reserved->bytes);
    }
  } else {
    reserved->promise = Find(request);
    reserved->reservation = reserved->promise->Reserve();
  }
  Log(LogLevel::kDebug, kComponent, Called(request.sender), " fulfils a promise");
  const auto shared = std::make_shared<const Request>(std::move(request));
  const auto complete = [reserved, shared] { Complete(*reserved, *shared); };
  const bool is_on_device = shared->bytes.defined() && !shared->bytes.is_cpu();
  if (is_on_device && shared->verb == Verb::kSet && TakesTensor(*reserved->promise)) {
    CompleteOnDevice(reserved, *shared);
  } else if (shared->verb == Verb::kFail || reserved->reservation->RunsCallbacks()) {
    RunElsewhere(complete);  // an error may be Python's, whose lock is not waited for here
  } else {
    complete();
  }
}

void Reserve(Request request) {
  PromisePtr promise = Find(request);
  auto reservation = promise->Reserve();
  Table& table = GetTable();
  {
    std::lock_guard<std::mutex> lock(table.mutex);
    auto& reserved = table.peers[request.sender].reserved;
    if (request.number <= 0 || reserved.contains(request.number)) {
      throw DTorchError("expected a number for the reservation that is free, got " +
                        std::to_string(request.number));
    }
    reserved.emplace(request.number,
                     Reserved{std::move(promise), std::move(reservation),
                              std::move(request.description), std::move(request.bytes)});
  }
  Log(LogLevel::kDebug, kComponent, Called(request.sender), " has reserved a promise");
  LoseIfLeft();
  Watch(request.sender);
}

Reply Answer(Request request) {
  using Status = Reply::Status;
  switch (request.verb) {
    case Verb::kBeat:  // peers.h answers it
      return {};
    case Verb::kFreight:
      return {Status::kDone, FreightAddress()};
    case Verb::kHold:
      Hold(request);
      return {};
    case Verb::kDrop:
      Drop(request);
      return {};
    case Verb::kHandOver:
      (void)FindHeld(request)->Token();
      return {};
    case Verb::kLook:
      return {FindHeld(request)->is_pending() ? Status::kDone : Status::kSatisfied, {}};
    case Verb::kReserve:
      Reserve(std::move(request));
      return {};
    case Verb::kSet:
    case Verb::kFail:
      Fulfil(std::move(request));
      return {};
    case Verb::kAbandon:
      if (TakeReserved(request)) {  // and drops it
        Log(LogLevel::kDebug, kComponent, Called(request.sender), " gives a promise back");
      }
      return {};
  }
  return {Status::kRefused, "expected a request of this version of dtorch_ops, got another one"};
}

Reply AnswerOf(Request request) {
  using Status = Reply::Status;
  try {
    if (Present().empty()) return {Status::kElsewhere, "RPC is being shut down there"};
    return Answer(std::move(request));
  } catch (const PromiseAlreadySatisfiedError& error) {
    return {Status::kSatisfied, error.what()};
  } catch (const NotHere& error) {
    return {Status::kElsewhere, error.what()};
  } catch (const std::exception& error) {
    return {Status::kRefused, TextOf(error)};
  }
}

}  // namespace

FuturePtr Serve(Request request) noexcept {
  HeardFrom(request.sender);
  return request.verb == Verb::kBeat
             ? AnswerLater(request.number)
             : MakeCompletedFuture(c10::StringType::get(), AnswerOf(std::move(request)).ToText());
}

void Rely(std::weak_ptr<OwnerEnd> end) {
  Table& table = GetTable();
  {
    std::lock_guard<std::mutex> lock(table.mutex);
    auto& relying = table.relying;
    if (relying.size() == relying.capacity()) {
      std::erase_if(relying, [](const auto& each) { return each.expired(); });
      relying.reserve(2 * relying.size() + 16);
    }
    relying.push_back(std::move(end));
  }
  LoseIfLeft();
}

void StopServing() {
  const std::string why =
      "torch.distributed.rpc was shut down while the promise was another worker's to fulfil: wait "
      "for what is still to come before rpc.shutdown()";
  Table& table = GetTable();
  std::unordered_map<std::string, StandIns> peers;
  std::vector<std::weak_ptr<OwnerEnd>> relying;
  {
    std::lock_guard<std::mutex> lock(table.mutex);
    peers = std::exchange(table.peers, {});
    relying = std::exchange(table.relying, {});
  }
  for (auto& [peer, lost] : peers) Lose(std::move(lost), why);
  for (const auto& each : relying) {
    const auto end = each.lock();
    if (!end) continue;
    end->Hold();
    end->Explain(why);
    end->Drop();
  }
}

}  // namespace dtorch::network
