// What torch.distributed.rpc does with tensors of the fake: it reads them where they are, as memory
// of the host. Those that it sends have been computed by then.

#define USE_TENSORPIPE  // as torch was built
#include <torch/csrc/distributed/rpc/tensorpipe_utils.h>
#undef USE_TENSORPIPE

#include <stdexcept>
#include <tensorpipe/core/message.h>

#include "current.h"

namespace fake {
namespace {

struct Converter final : torch::distributed::rpc::TensorpipeDeviceTypeConverter {
  std::optional<std::vector<char>> prepareTensorForSending(
      const c10::Storage& storage, const std::vector<c10::Stream>&,
      tensorpipe::Message& message) const override {
    tensorpipe::Message::Tensor tensor;
    tensor.buffer = tensorpipe::CpuBuffer{storage.mutable_data()};
    tensor.length = storage.nbytes();
    message.tensors.push_back(std::move(tensor));
    return std::nullopt;
  }

  // What arrives is sent to the CPU: to torch, all other devices of TensorPipe's are CUDA's.
  at::DataPtr allocateTensorForReceiving(c10::DeviceIndex, size_t, const std::vector<c10::Stream>&,
                                         tensorpipe::Allocation&) const override {
    throw std::logic_error("nothing is received on the fake");
  }
};

const torch::distributed::rpc::TensorpipeDeviceTypeConverterRegistrar registered(kType,
                                                                                 new Converter);

}  // namespace
}  // namespace fake
