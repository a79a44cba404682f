// A worker process without Python: it is given the tokens of two promises on its command line, and
// fulfils them in whichever process made them. See README.md for that side.

#include "dtorch/dtorch.h"

#include <torch/script.h>

#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int kUnfulfilled = 3;

// An error does not end the worker without a word: whoever waits for the promise gets it.
template <typename Promise, typename Function>
auto OrFail(const Promise& promise, Function function) {
  try {
    return function();
  } catch (...) {
    try {
      promise.SetException(std::current_exception());
    } catch (const dtorch::PromiseAlreadySatisfiedError&) {
      // The model had fulfilled it before it failed, or the consumer has cancelled it.
    }
    throw;
  }
}

std::vector<float> ReadNumbers(std::istream& stream) {
  std::vector<float> numbers;
  for (float number = 0; stream >> number;) numbers.push_back(number);
  if (!stream.eof()) throw std::invalid_argument("expected numbers on the standard input");
  return numbers;
}

int Work(const char* path, const char* ready_token, const char* result_token) {
  // From here on the promises are this process's to fulfil: should it die, they break.
  const auto ready = dtorch::VoidPromise::FromToken(ready_token);
  const auto result = dtorch::TensorPromise::FromToken(result_token);

  torch::jit::Module model =
      OrFail(result, [&] { return OrFail(ready, [&] { return torch::jit::load(path); }); });
  ready.SetValue();

  return OrFail(result, [&] {
    const std::vector<float> numbers = ReadNumbers(std::cin);
    if (numbers.empty()) return kUnfulfilled;  // drops the promise, which breaks it
    // The model fulfils the promise itself, with an operator; it knows nothing of the other
    // process.
    model.forward({torch::tensor(numbers).unsqueeze(0), result.ToIValue()});
    return 0;
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: worker MODEL.pt READY RESULT < numbers\n"
                 "READY and RESULT are tokens of a VoidPromise and a TensorPromise\n";
    return 2;
  }
  try {
    return Work(argv[1], argv[2], argv[3]);
  } catch (const c10::Error& error) {
    std::cerr << "worker: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "worker: " << error.what() << "\n";
    return 1;
  }
}
