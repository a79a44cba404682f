// Runs a TorchScript model that uses the operators, and the C++ API beside it. There is no Python
// in the process.

#include "dtorch/dtorch.h"

#include <torch/script.h>

#include <exception>
#include <iostream>
#include <thread>
#include <vector>

namespace {

void RunModel(const char* path) {
  torch::jit::Module model = torch::jit::load(path);
  const at::Tensor input = torch::tensor({{1.0f, 2.0f, 3.0f}});
  for (int i = 0; i < 3; ++i) {  // the later runs are those of the optimised graph
    const dtorch::TensorPromise promise;
    dtorch::TensorFuture result = promise.GetFuture();
    const at::Tensor hidden = model.forward({input, promise.ToIValue()}).toTensor();
    std::cout << "model: hidden " << hidden[0][0].item<float>() << " " << hidden[0][1].item<float>()
              << ", result " << result.Get().item<float>() << "\n";
  }
}

void FetchTensor() {
  const at::Tensor tensor = torch::arange(3, torch::kFloat);
  dtorch::TensorFuture shared = dtorch::GetTensorAsync(tensor);
  dtorch::TensorFuture snapshot = dtorch::GetTensorAsync(tensor, torch::kCPU, /*copy=*/true);
  tensor.add_(1);
  std::cout << "fetch: shared " << shared.Get().sum().item<float>() << ", snapshot "
            << snapshot.Get().sum().item<float>() << ", at once "
            << dtorch::GetTensor(tensor).sum().item<float>() << "\n";

  std::cout << "fetch: valid " << shared.Valid() << "\n";
  try {
    shared.Get();
  } catch (const dtorch::FutureAlreadyRetrievedError& error) {
    std::cout << "fetch: " << error.what() << "\n";
  }
}

void FulfilFromThread() {
  const dtorch::TensorPromise promise;
  dtorch::TensorFuture future = promise.GetFuture();
  try {
    future.Wait(/*timeout_ms=*/20);
  } catch (const dtorch::TimeoutError& error) {
    std::cout << "promise: " << error.what() << "\n";
  }
  std::cout << "promise: ready " << future.IsReady() << ", valid " << future.Valid() << "\n";

  std::thread producer([promise] { promise.SetValue(torch::full({2}, 4.0)); });
  std::cout << "promise: value " << future.Get().sum().item<float>() << "\n";
  producer.join();
  try {
    promise.SetValue(torch::zeros({2}));
  } catch (const dtorch::PromiseAlreadySatisfiedError& error) {
    std::cout << "promise: " << error.what() << "\n";
  }
}

void FailFromThread() {
  std::thread producer;
  dtorch::TensorFuture future = [&producer] {
    const dtorch::TensorPromise promise;
    dtorch::TensorFuture failed = promise.GetFuture();
    producer = std::thread([promise] { promise.SetException("the producer has no value"); });
    return failed;
  }();
  try {
    future.Get();
  } catch (const std::runtime_error& error) {
    std::cout << "error: " << error.what() << "\n";
  }
  producer.join();

  dtorch::TensorFuture broken = dtorch::TensorPromise().GetFuture();
  try {
    broken.Get();
  } catch (const dtorch::BrokenPromiseError& error) {
    std::cout << "error: " << error.what() << "\n";
  }
}

void WaitForWork() {
  dtorch::Sync();
  dtorch::Sync(std::vector<c10::Device>{torch::kCPU});
  const dtorch::VoidPromise promise;
  dtorch::VoidFutureCollect all({dtorch::SyncFuture(), promise.GetFuture()});
  std::cout << "sync: all done " << all.IsReady();
  promise.SetValue();
  all.Get();
  std::cout << ", then " << all.IsReady() << "\n";
  try {
    dtorch::Sync(std::vector<c10::Device>{c10::Device("privateuseone")});
  } catch (const c10::ValueError& error) {
    std::cout << "sync: " << error.what_without_backtrace() << "\n";
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: scripted_model MODEL.pt, as written by export_model.py\n";
    return 2;
  }
  try {
    RunModel(argv[1]);
    FetchTensor();
    FulfilFromThread();
    FailFromThread();
    WaitForWork();
  } catch (const std::exception& error) {
    std::cerr << "scripted_model: " << error.what() << "\n";
    return 1;
  }
}
