// What RPC calls in this process: network/rpc.h. TorchScript's operators, since RPC looks these up.

#include "dtorch/network/peers.h"
#include "dtorch/network/rpc.h"
#include "dtorch/network/stand_ins.h"
#include "dtorch/ops/schemas.h"

#include <torch/csrc/jit/runtime/custom_operator.h>

#include <utility>

namespace dtorch {
namespace {

using torch::jit::Stack;

void CallOp(Stack& stack) {
  network::Request request;
  const c10::IValue bytes = torch::jit::pop(stack);
  if (!bytes.isNone()) request.bytes = bytes.toTensor();
  request.description = torch::jit::pop(stack).toIntVector();
  request.text = torch::jit::pop(stack).toStringRef();
  request.number = torch::jit::pop(stack).toInt();
  request.token = torch::jit::pop(stack).toStringRef();
  request.sender = torch::jit::pop(stack).toStringRef();
  request.verb = static_cast<network::Verb>(torch::jit::pop(stack).toInt());
  torch::jit::push(stack, network::Serve(std::move(request)).ToText());
}

void AnswerLaterOp(Stack& stack) {
  const int64_t after_ms = torch::jit::pop(stack).toInt();
  const std::string sender = torch::jit::pop(stack).toStringRef();
  torch::jit::push(stack, network::AnswerLater(sender, after_ms));
}

const torch::jit::RegisterOperators registered({
    torch::jit::Operator(schemas::kNetworkCall, CallOp, c10::AliasAnalysisKind::CONSERVATIVE),
    torch::jit::Operator(schemas::kAnswerLater, AnswerLaterOp,
                         c10::AliasAnalysisKind::CONSERVATIVE),
});

}  // namespace
}  // namespace dtorch
