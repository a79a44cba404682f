// All that touches TorchScript's runtime and tracer. Without this file the operators of
// library.cpp still work everywhere else.

#include "dtorch/future/collect.h"
#include "dtorch/future/outcome.h"
#include "dtorch/future/wait.h"
#include "dtorch/ops/schemas.h"
#include "dtorch/ops/tracing.h"

#include <ATen/TracerMode.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/library.h>

namespace dtorch {
namespace {

using torch::jit::Stack;

struct FutureList {
  explicit FutureList(const c10::IValue& value) {
    const auto list = value.toList();
    for (const auto& item : list) futures.push_back(c10::IValue(item.get()).toFuture());
    if (const auto future_type = list.elementType()->cast<c10::FutureType>()) {
      element_type = future_type->getElementType();
    } else if (!futures.empty()) {
      element_type = futures.front()->elementType();
    }
  }
  std::vector<FuturePtr> futures;
  c10::TypePtr element_type = c10::AnyType::get();
};

void CollectAllOp(Stack& stack) {
  const FutureList list(torch::jit::pop(stack));
  FuturePtr result = CollectAll(list.futures, list.element_type);
  TraceCollect("dtorch::collect_all", list.futures, result);
  torch::jit::push(stack, std::move(result));
}

void CollectAnyOp(Stack& stack) {
  const FutureList list(torch::jit::pop(stack));
  FuturePtr result = CollectAny(list.futures, list.element_type);
  TraceCollect("dtorch::collect_any", list.futures, result);
  torch::jit::push(stack, std::move(result));
}

void WaitAllOp(Stack& stack) {
  const FutureList list(torch::jit::pop(stack));
  c10::impl::GenericList values(list.element_type);
  WaitForAll(list.futures, Deadline::Never());
  for (const FuturePtr& future : list.futures) {
    values.push_back(ValueOf(future));
    TraceWait(future, values.get(values.size() - 1));
  }
  torch::jit::push(stack, std::move(values));
}

void IsReadyOp(Stack& stack) {
  const FuturePtr future = torch::jit::pop(stack).toFuture();
  torch::jit::push(stack, IsComplete(future));
}

void WaitForOp(Stack& stack) {
  const int64_t timeout_ms = torch::jit::pop(stack).toInt();
  const FuturePtr future = torch::jit::pop(stack).toFuture();
  c10::IValue value = WaitForValue(future, DeadlineFromMs(timeout_ms));
  TraceWait(future, value);
  torch::jit::push(stack, std::move(value));
}

torch::jit::Operator ScriptOperator(const char* schema, torch::jit::Operation operation) {
  return torch::jit::Operator(schema, std::move(operation), c10::AliasAnalysisKind::CONSERVATIVE);
}

const torch::jit::RegisterOperators script_operators({
    ScriptOperator(schemas::kCollectAll, CollectAllOp),
    ScriptOperator(schemas::kCollectAny, CollectAnyOp),
    ScriptOperator(schemas::kWaitAll, WaitAllOp),
    ScriptOperator(schemas::kIsReady, IsReadyOp),
    ScriptOperator(schemas::kWaitFor, WaitForOp),
});

torch::jit::Value* TracedArgument(torch::jit::Graph& graph, const c10::IValue& value) {
  if (value.isTensor() || value.isFuture() || value.isObject()) {
    return torch::jit::tracer::getValueTrace(value);
  }
  if (!value.isList()) return graph.insertConstant(value);
  std::vector<torch::jit::Value*> items;
  for (const c10::IValue& item : value.toListRef()) items.push_back(TracedArgument(graph, item));
  auto* node = graph.createList(value.toList().elementType(), items);
  return graph.insertNode(node)->output();
}

// The tracer's own fallback refuses operators that return a Future.
void TraceKernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  namespace tracer = torch::jit::tracer;
  const c10::FunctionSchema& schema = op.schema();
  torch::jit::Node* node = nullptr;
  if (const auto& state = tracer::getTracingState()) {
    torch::jit::Graph& graph = *state->graph;
    node = graph.create(c10::Symbol::fromQualString(schema.name()), /*num_outputs=*/0);
    tracer::recordSourceLocation(node);
    for (const c10::IValue& arg : torch::jit::last(*stack, schema.arguments().size())) {
      node->addInput(TracedArgument(graph, arg));
    }
    graph.insertNode(node);
  }
  {
    at::tracer::impl::NoTracerDispatchMode untraced;
    op.redispatchBoxed(
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Tracer),
        stack);
  }
  if (!node || schema.returns().empty()) return;
  torch::jit::Value* output = node->addOutput()->setType(schema.returns()[0].type());
  tracer::setValueTrace(stack->back(), output);
}

}  // namespace

void TraceWait(const FuturePtr& future, const c10::IValue& value) {
  namespace tracer = torch::jit::tracer;
  if (!tracer::isTracing()) return;
  torch::jit::Value* traced = nullptr;
  try {
    traced = tracer::getValueTrace(future);
  } catch (const std::exception&) {
    return;
  }
  torch::jit::Value* output =
      tracer::getTracingState()->graph->insert(torch::jit::aten::wait, {traced});
  if (!value.isNone()) tracer::setValueTrace(value, output);
}

void TraceCollect(const char* op, const std::vector<FuturePtr>& members, const FuturePtr& result) {
  namespace tracer = torch::jit::tracer;
  if (!tracer::isTracing() || members.empty()) return;
  std::vector<torch::jit::Value*> traced;
  try {
    for (const FuturePtr& member : members) traced.push_back(tracer::getValueTrace(member));
  } catch (const std::exception&) {
    return;
  }
  torch::jit::Graph& graph = *tracer::getTracingState()->graph;
  const auto member_type = c10::FutureType::create(members.front()->elementType());
  torch::jit::Value* list = graph.insertNode(graph.createList(member_type, traced))->output();
  torch::jit::Value* output = graph.insert(c10::Symbol::fromQualString(op), {list});
  tracer::setValueTrace(result, output);
}

TORCH_LIBRARY_IMPL(dtorch, Tracer, m) {
  for (const char* name :
       {"get_tensor_async", "get_tensors_async", "get_tensor", "get_tensor.copy", "get_future",
        "get_future.void", "sync", "sync.promise", "sync.devices_promise"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&TraceKernel>());
  }
}

}  // namespace dtorch
