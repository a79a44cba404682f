// Opens the operator library with dlopen, in a process without Python: reads the schemas of the two
// fetching operators and calls one. Nothing of it is known at link time.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <dlfcn.h>
#include <iostream>

int main(int argc, char** argv) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const char* names[] = {"dtorch::get_tensor_async", "dtorch::sync"};
  if (dispatcher.findSchema({names[0], ""})) {
    std::cerr << "the library was linked\n";
    return 1;
  }
  for (int i = 0; i < 2; ++i) {  // the second time is none
    if (argc != 2 || !dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) {
      std::cerr << dlerror() << "\n";
      return 1;
    }
  }
  for (const char* name : names) {
    std::cout << dispatcher.findSchemaOrThrow(name, "").schema() << "\n";
  }
  torch::jit::Stack stack{at::ones({2}), c10::IValue(), true};
  dispatcher.findSchemaOrThrow(names[0], "").callBoxed(&stack);
  std::cout << stack.back().toFuture()->value().toTensor().sum().item<float>() << "\n";
}
