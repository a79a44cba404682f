#pragma once

// The public C++ API:
//
//   auto future = dtorch::GetTensorAsync(tensor);   // returns at once
//   at::Tensor value = future.Get();
//
//   dtorch::TensorPromise promise;
//   dtorch::TensorFuture result = promise.GetFuture();
//   promise.SetValue(tensor);                        // from any thread

#include "dtorch/base/error.h"
#include "dtorch/future/future.h"
#include "dtorch/network/leave.h"
#include "dtorch/ops/api.h"
#include "dtorch/promise/promise.h"
