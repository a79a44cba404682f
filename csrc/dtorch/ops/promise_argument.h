#pragma once

#include "dtorch/promise/promise_state.h"

#include <ATen/core/class_type.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <type_traits>

namespace dtorch {

/// The promise of class `State` in an operator's argument; c10::TypeError if it is of another one.
/// In eager mode the schema does not tell the classes apart: any script object passes for any.
template <typename State>
c10::intrusive_ptr<State> PromiseArgument(const c10::IValue& argument, const char* op) {
  const char* expected = std::is_same_v<State, TensorPromiseState> ? "TensorPromise"
                         : std::is_same_v<State, VoidPromiseState> ? "VoidPromise"
                                                                   : "TensorPromise or VoidPromise";
  TORCH_CHECK_TYPE(argument.isObject(), op, ": promise: expected a ", expected, ", got ",
                   argument.tagKind());
  const auto object = argument.toObject();
  State* promise = nullptr;
  if (!object->slots().empty() && object->slots()[0].isCapsule()) {
    promise = dynamic_cast<State*>(object->slots()[0].toCapsule().get());
  }
  TORCH_CHECK_TYPE(promise, op, ": promise: expected a ", expected, ", got a ",
                   object->type()->name()->name());
  return c10::intrusive_ptr<State>::reclaim_copy(promise);
}

}  // namespace dtorch
