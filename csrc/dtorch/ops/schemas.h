#pragma once

// Every operator of the namespace `dtorch`: the table of contents. All are declared with
// conservative alias analysis, so that no optimiser merges, moves or drops one: a promise that a
// deleted operator should have fulfilled would be waited for without end.
namespace dtorch::schemas {

#define DTORCH_TENSOR_PROMISE "__torch__.torch.classes.dtorch.TensorPromise"
#define DTORCH_VOID_PROMISE "__torch__.torch.classes.dtorch.VoidPromise"

// Fetch a tensor's value.
inline constexpr char kGetTensorAsync[] =
    "get_tensor_async(Tensor self, *, Device? device=None, bool copy=False) -> Future(Tensor)";
inline constexpr char kGetTensorsAsync[] =
    "get_tensors_async(Tensor[] self, *, Device? device=None, bool copy=False) -> "
    "Future(Tensor[])";
inline constexpr char kGetTensor[] =
    "get_tensor(Tensor self, " DTORCH_TENSOR_PROMISE " promise) -> ()";
inline constexpr char kGetTensorCopy[] =
    "get_tensor.copy(Tensor self, " DTORCH_TENSOR_PROMISE " promise, *, bool copy) -> ()";

// The same for graphs, which cannot hold a future. The handle is a tensor of one byte that owns the
// fetch; `source` and `device` are those of the start.
inline constexpr char kGetStart[] =
    "get_start(Tensor self, *, Device? device=None, bool frozen=False) -> Tensor";
inline constexpr char kGetWait[] =
    "get_wait(Tensor handle, Tensor source, *, Device? device=None) -> Tensor";

// The future of a promise.
inline constexpr char kGetFuture[] =
    "get_future(" DTORCH_TENSOR_PROMISE " promise) -> Future(Tensor)";
inline constexpr char kGetFutureVoid[] =
    "get_future.void(" DTORCH_VOID_PROMISE " promise) -> Future(NoneType)";

// Everything queued so far is done.
inline constexpr char kSync[] = "sync(Device[]? devices=None) -> Future(NoneType)";
inline constexpr char kSyncPromise[] =
    "sync.promise(" DTORCH_VOID_PROMISE " promise, Device[]? devices=None) -> ()";
inline constexpr char kSyncDevicesPromise[] =
    "sync.devices_promise(Device[]? devices, " DTORCH_VOID_PROMISE " promise) -> ()";

// Futures of any type. The dispatcher's parser knows no type variables, hence full names: these
// are registered with the TorchScript runtime (torchscript.cpp).
inline constexpr char kCollectAll[] =
    "dtorch::collect_all(Future(t)[] futures) -> Future(Future(t)[])";
inline constexpr char kCollectAny[] = "dtorch::collect_any(Future(t)[] futures) -> Future(t)";
inline constexpr char kWaitAll[] = "dtorch::wait_all(Future(t)[] futures) -> t[]";
inline constexpr char kIsReady[] = "dtorch::is_ready(Future(t) future) -> bool";
inline constexpr char kWaitFor[] = "dtorch::wait_for(Future(t) future, int timeout_ms) -> t";

#undef DTORCH_TENSOR_PROMISE
#undef DTORCH_VOID_PROMISE

}  // namespace dtorch::schemas
