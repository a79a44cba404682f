#pragma once

#include "dtorch/device/event.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <optional>
#include <vector>

namespace dtorch {

/// Tensors of one device that are fetched together: their stream is told once.
struct Sources {
  Sources(const at::Tensor& tensor) : tensors(tensor) {}
  Sources(at::TensorList tensors, c10::ArrayRef<size_t> places)
      : tensors(tensors), places(places) {}

  at::TensorList tensors;        // one or more
  c10::ArrayRef<size_t> places;  // in the list that an operator was given, for errors; or none
};

/// Values that are being computed, or copied, by a stream.
///
///      the caller's stream   --- work --- (clone) -- computed --------- goes on ---->
///                                                      |                  ^ if not cloned
///      the side stream of it                           `--- copy --- reached
///
/// What is written to the source behind the call is not seen: see Snapshot.
struct Transfer {
  std::vector<at::Tensor> values;  // as many as there are sources
  c10::Stream stream;
  std::vector<Event> reached;    // then the values are there; the last is on `stream`
  std::vector<at::Tensor> keep;  // until then
  /// What a thread that may block has to do then, if the rest could not be queued. May be empty.
  std::function<void()> finish;
};

/// What keeps that which is written to a source behind the call from being copied to another
/// device.
enum class Snapshot {
  kCheapest,  // a small source is cloned by its own stream first; for a large one that stream's
              // later work waits for the copy
  kClone,     // it is cloned, whatever its size: nothing waits for the copy
  kCaller,    // nothing: the caller writes to it when the value is there
};

/// Begins to fetch what is on an accelerator where it is: itself, or if `copy` a copy.
Transfer FetchHere(const Sources& sources, bool copy, const char* op);

/// Begins to copy `given`, whose memory was another process's to write to, out of that: behind no
/// other work.
Transfer CopyOut(const at::Tensor& given);

/// Throws what FetchTo() would at once for reasons of `self` or of a graph's capture; without a
/// device, what FetchHere() would.
void CheckCanFetch(const at::Tensor& self, std::optional<c10::Device> device, const char* op);

/// Begins to copy the sources to `device`. One of the two is an accelerator, the other that or the
/// CPU. The host's side is pinned memory where there is some. c10::NotImplementedError for what has
/// no strides.
Transfer FetchTo(const Sources& sources, c10::Device device, const char* op,
                 Snapshot snapshot = Snapshot::kCheapest);

}  // namespace dtorch
