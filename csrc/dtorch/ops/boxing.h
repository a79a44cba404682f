#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <type_traits>
#include <utility>

namespace dtorch {

/// The boxed kernel that calls the typed function `kFn`. The dispatcher cannot infer a schema type
/// for a C++ Future, so a typed kernel that returns one ends the process when the library is
/// loaded; a boxed one is taken as the schema says.
template <auto kFn>
struct BoxedKernel;

template <typename Result, typename... Args, Result (*kFn)(Args...)>
struct BoxedKernel<kFn> {
  static void Call(const c10::OperatorHandle&, torch::jit::Stack* stack) {
    CallWithStack(*stack, std::index_sequence_for<Args...>());
  }

 private:
  template <typename T>
  static T Unbox(c10::IValue& value) {
    if constexpr (std::is_same_v<T, c10::IValue>) {
      return std::move(value);
    } else {
      return std::move(value).template to<T>();
    }
  }

  template <size_t... kIndex>
  static void CallWithStack(torch::jit::Stack& stack, std::index_sequence<kIndex...>) {
    constexpr size_t kCount = sizeof...(Args);
    const auto call = [&] {
      return kFn(Unbox<std::decay_t<Args>>(torch::jit::peek(stack, kIndex, kCount))...);
    };
    if constexpr (std::is_void_v<Result>) {
      call();
      torch::jit::drop(stack, kCount);
    } else {
      c10::IValue result(call());
      torch::jit::drop(stack, kCount);
      torch::jit::push(stack, std::move(result));
    }
  }
};

}  // namespace dtorch
