#include "dtorch/network/stand_ins.h"

#include "dtorch/base/error.h"
#include "dtorch/base/fork.h"
#include "dtorch/base/log.h"
#include "dtorch/network/peers.h"
#include "dtorch/network/rpc.h"
#include "dtorch/promise/error_record.h"
#include "dtorch/promise/promise_state.h"
#include "dtorch/promise/sendable.h"
#include "dtorch/promise/unseen.h"
#include "dtorch/shm/address.h"
#include "dtorch/sys/thread.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <exception>
#include <mutex>
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
};

// What is held and reserved here for one worker.
struct StandIns {
  std::unordered_multimap<std::string, PromisePtr> held;
  std::unordered_map<int64_t, Reserved> reserved;
  bool IsEmpty() const { return held.empty() && reserved.empty(); }
};

struct Table {
  std::mutex mutex;  // what it guards is dropped behind it
  std::unordered_map<std::string, StandIns> workers;
  int64_t next_reservation = 0;
  std::vector<std::weak_ptr<OwnerEnd>> relying;
};
Table* all = new Table;  // leaked on purpose: RPC's threads may outlive everything
Table& GetTable() { return *all; }

const bool registered [[maybe_unused]] = [] {
  OnFork({.child = [] { all = new Table; }});  // what is held in the other one is the parent's
  return true;
}();

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
  const auto worker = table.workers.find(request.sender);
  if (worker == table.workers.end()) return nullptr;
  const auto it = worker->second.held.find(request.token);
  return it == worker->second.held.end() ? nullptr : it->second;
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
  for (auto& [number, each] : lost.reserved) {
    SetErrorOf(*each.reservation, std::make_exception_ptr(BrokenPromiseError(why)));
  }
}

void WatchOver(const std::string& worker, bool answers_later) {
  Watch(
      worker, answers_later,
      [worker] {
        Table& table = GetTable();
        std::lock_guard<std::mutex> lock(table.mutex);
        const auto it = table.workers.find(worker);
        if (it == table.workers.end()) return false;
        if (it->second.IsEmpty()) {
          table.workers.erase(it);  // the next one that it holds begins a new watch
          return false;
        }
        return true;
      },
      [worker](const std::string& why) {
        Log(LogLevel::kInfo, kComponent, why);
        Table& table = GetTable();
        StandIns lost;
        {
          std::lock_guard<std::mutex> lock(table.mutex);
          const auto it = table.workers.find(worker);
          if (it == table.workers.end()) return;
          lost = std::move(it->second);
          table.workers.erase(it);
        }
        Lose(std::move(lost), why);
      });
}

void Hold(const Request& request) {
  PromisePtr promise = Make(request.token);
  Table& table = GetTable();
  bool first = false;
  {
    std::lock_guard<std::mutex> lock(table.mutex);
    const auto [it, made] = table.workers.try_emplace(request.sender);
    first = made;
    it->second.held.emplace(request.token, std::move(promise));
  }
  Log(LogLevel::kDebug, kComponent, "worker '", request.sender, "' holds a promise");
  if (first) WatchOver(request.sender, request.number != 0);
}

void Drop(const Request& request) {
  Table& table = GetTable();
  PromisePtr dropped;
  std::lock_guard<std::mutex> lock(table.mutex);
  const auto worker = table.workers.find(request.sender);
  if (worker == table.workers.end()) return;
  const auto it = worker->second.held.find(request.token);
  if (it == worker->second.held.end()) return;
  dropped = std::move(it->second);
  worker->second.held.erase(it);
}

at::Tensor Read(const Request& request) {
  const Unseen unseen;
  const auto& said = request.description;
  const bool is_small = !request.bytes.defined();
  if (said.size() < 3 ||
      (!is_small && (!request.bytes.is_cpu() || request.bytes.scalar_type() != at::kByte ||
                     !request.bytes.is_contiguous()))) {
    throw std::runtime_error("what the producer published makes no sense");
  }
  const at::IntArrayRef sizes(said.data() + 3, said.size() - 3);
  const auto bytes = is_small ? request.text.size() : static_cast<size_t>(request.bytes.numel());
  const auto dtype = CheckReceived(static_cast<uint64_t>(said[0]), sizes, bytes);
  const auto options = at::TensorOptions().dtype(dtype);
  if (is_small) {
    at::Tensor value = at::empty(sizes, options);
    if (bytes > 0) std::memcpy(value.mutable_data_ptr(), request.text.data(), bytes);
    return value;
  }
  at::Tensor value = at::empty({0}, options);
  // The memory that it was received into, which nobody else has.
  auto* impl = value.unsafeGetTensorImpl();
  impl->set_storage_and_dtype(request.bytes.storage(), value.dtype());
  impl->set_sizes_contiguous(sizes);
  return value;
}

void Complete(Reserved& reserved, const Request& request) {
  auto& [promise, reservation] = reserved;
  try {
    if (request.verb == Verb::kFail) {
      ErrorRecord record;
      if (!ErrorRecord::FromBytes(request.text, record)) {
        throw std::runtime_error("what the producer published as an error is none");
      }
      reservation->SetError(DecodeError(record));
      return;
    }
    if (!HasValue(request.token)) {
      reservation->SetValue(c10::IValue());
      return;
    }
    at::Tensor value = Read(request);
    const auto wanted = promise->wanted_device();
    const c10::Device device =
        DeviceNamed(static_cast<uint64_t>(request.description[1]), request.description[2]);
    const auto deliver = GetAcceleratorValues().deliver;
    if ((device.is_cpu() && !wanted) || !deliver) {
      reservation->SetValue(std::move(value));
    } else {
      deliver(reservation, std::move(value), device, wanted);
    }
  } catch (const std::exception& error) {
    if (reservation) SetErrorOf(*reservation, std::make_exception_ptr(DTorchError(error.what())));
  }
}

// Takes the promise, which is what the producer is told, and completes it: in a thread of its own
// if that runs callbacks, which may block, or wait for what that producer sends next.
void Fulfil(Request request) {
  Table& table = GetTable();
  auto reserved = std::make_shared<Reserved>();
  if (request.number != 0) {
    std::lock_guard<std::mutex> lock(table.mutex);
    const auto worker = table.workers.find(request.sender);
    const auto it = worker == table.workers.end() ? decltype(worker->second.reserved.end()){}
                                                  : worker->second.reserved.find(request.number);
    if (worker == table.workers.end() || it == worker->second.reserved.end()) {
      throw DTorchError("this worker was given up for lost, and what it had reserved with it");
    }
    *reserved = std::move(it->second);
    worker->second.reserved.erase(it);
  } else {
    reserved->promise = Find(request);
    reserved->reservation = reserved->promise->Reserve();
  }
  Log(LogLevel::kDebug, kComponent, "worker '", request.sender, "' fulfils a promise");
  if (!reserved->reservation->RunsCallbacks()) return Complete(*reserved, request);
  auto shared = std::make_shared<const Request>(std::move(request));
  try {
    StartThread([reserved, shared] { Complete(*reserved, *shared); });
  } catch (const std::exception&) {
    Complete(*reserved, *shared);  // no thread to be had
  }
}

std::string Reserve(const Request& request) {
  PromisePtr promise = Find(request);
  auto reservation = promise->Reserve();
  Table& table = GetTable();
  int64_t number = 0;
  bool first = false;  // the word that it is held is still to come
  {
    std::lock_guard<std::mutex> lock(table.mutex);
    const auto [it, made] = table.workers.try_emplace(request.sender);
    first = made;
    number = ++table.next_reservation;
    it->second.reserved.emplace(number, Reserved{std::move(promise), std::move(reservation)});
  }
  if (first) WatchOver(request.sender, request.number != 0);
  return std::to_string(number);
}

void Abandon(const Request& request) {
  Table& table = GetTable();
  Reserved dropped;
  std::lock_guard<std::mutex> lock(table.mutex);
  const auto worker = table.workers.find(request.sender);
  if (worker == table.workers.end()) return;
  const auto it = worker->second.reserved.find(request.number);
  if (it == worker->second.reserved.end()) return;
  dropped = std::move(it->second);
  worker->second.reserved.erase(it);
}

Reply Answer(Request request) {
  using Status = Reply::Status;
  switch (request.verb) {
    case Verb::kBeat:
      return {};
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
      return {Status::kDone, Reserve(request)};
    case Verb::kSet:
    case Verb::kFail:
      Fulfil(std::move(request));
      return {};
    case Verb::kAbandon:
      Abandon(request);
      return {};
  }
  return {Status::kRefused, "expected a request of this version of dtorch_ops, got another one"};
}

}  // namespace

Reply Serve(Request request) noexcept {
  using Status = Reply::Status;
  try {
    HeardFrom(request.sender);
    if (SelfName().empty()) return {Status::kElsewhere, "RPC is being shut down there"};
    return Answer(std::move(request));
  } catch (const PromiseAlreadySatisfiedError& error) {
    return {Status::kSatisfied, error.what()};
  } catch (const NotHere& error) {
    return {Status::kElsewhere, error.what()};
  } catch (const std::exception& error) {
    return {Status::kRefused, error.what()};
  }
}

void Rely(std::weak_ptr<OwnerEnd> end) {
  Table& table = GetTable();
  std::lock_guard<std::mutex> lock(table.mutex);
  auto& relying = table.relying;
  if (relying.size() == relying.capacity()) {
    std::erase_if(relying, [](const auto& each) { return each.expired(); });
    relying.reserve(2 * relying.size() + 16);
  }
  relying.push_back(std::move(end));
}

void StopServing() {
  const std::string why =
      "torch.distributed.rpc was shut down while the promise was another worker's to fulfil: wait "
      "for what is still to come before rpc.shutdown()";
  Table& table = GetTable();
  std::unordered_map<std::string, StandIns> workers;
  std::vector<std::weak_ptr<OwnerEnd>> relying;
  {
    std::lock_guard<std::mutex> lock(table.mutex);
    workers = std::exchange(table.workers, {});
    relying = std::exchange(table.relying, {});
  }
  for (auto& [worker, lost] : workers) Lose(std::move(lost), why);
  for (const auto& each : relying) {
    const auto end = each.lock();
    if (!end) continue;
    end->Hold();
    end->Explain(why);
    end->Drop();
  }
}

}  // namespace dtorch::network
