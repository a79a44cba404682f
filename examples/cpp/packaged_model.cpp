// Runs a model that torch.export and AOTInductor have compiled, and that fetches tensors with
// get_start and get_wait. There is no Python in the process.

#include "dtorch/dtorch.h"

#include <ATen/ops/arange.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <exception>
#include <iostream>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: packaged_model MODEL.pt2, as written by export_package.py\n";
    return 2;
  }
  try {
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    for (int64_t rows = 1; rows <= 3; ++rows) {
      const at::Tensor input = at::arange(1, 3 * rows + 1, at::kFloat).view({rows, 3});
      const std::vector<at::Tensor> outputs = model.run({input});
      std::cout << "rows " << rows << ": hidden " << outputs[0].sum().item<float>() << ", result "
                << outputs[1].sum().item<float>() << "\n";
    }
  } catch (const std::exception& error) {
    std::cerr << "packaged_model: " << error.what() << "\n";
    return 1;
  }
}
