"""Fetching a tensor's value, as functions and as methods of ``torch.Tensor``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import _C, _ops, functional
from ._compile import breaks_graph, is_traced
from .functional import Device
from .future import TensorFuture

__all__ = ["to_torch", "to_torch_async"]


@breaks_graph
def to_torch_async(
    input: Tensor, *, device: Device | None = None, copy: bool = False
) -> TensorFuture:
    """A future of the value of ``input``; returns at once. Also ``t.to_torch_async()``.
    On the same device and without ``copy`` the result shares memory with ``input``, as
    ``detach()`` does, and a later in-place update shows; ``copy=True`` takes a snapshot at the
    time of the call, in the order of the stream, and so does a ``device`` other than the tensor's.

    On an accelerator the future completes when all that the current stream was given before the
    call is done; the calling thread only queues, and a background thread waits. What comes to the
    CPU is in pinned memory, where there is some, copied on a stream of its own.

    Args:
        input: a tensor of any shape, dtype and layout, on the CPU or meta (complete on return) or
            on an accelerator. A copy of a tensor of a subclass is a plain tensor, unless the
            subclass sees to it.
        device: where the result is to be; None is where ``input`` is.
        copy: whether to take a snapshot.

    Returns:
        A :class:`TensorFuture`. The result is differentiable, since it is ``input`` itself, or a
        copy that autograd has recorded.

    Raises:
        TypeError: not a tensor, or a DTensor, of which ``to_local()`` or ``full_tensor()`` is one.
        ValueError: a device that this build of torch does not know.
        NotImplementedError: a device without streams and events; from or to an accelerator a
            tensor that is not strided.
        RuntimeError: the current stream records a graph.

    Example:
        >>> future = dtorch_ops.to_torch_async(torch.ones(2))
        >>> future.get()
        tensor([1., 1.])
    """
    return _C.to_torch_async(input, device, copy)


def to_torch(input: Tensor, *, device: Device | None = None, copy: bool = False) -> Tensor:
    """The value of ``input``: ``to_torch_async(...).get()``. Also ``t.to_torch()``.

    Takes and raises what :func:`to_torch_async` does. In a compiled or exported region it becomes
    :func:`dtorch_ops.functional.get_start` and ``get_wait``.

    Example:
        >>> dtorch_ops.to_torch(torch.ones(2))
        tensor([1., 1.])
    """
    if is_dynamo_compiling() or (type(input) is not Tensor and is_traced(input)):
        return functional.fetch(input, device, copy)
    return _C.to_torch_async(input, device, copy).get()


def install() -> None:
    """Add the two as methods of ``torch.Tensor``."""
    _C.register_get_tensor_async(_ops.get_tensor_async)
    torch.Tensor.to_torch_async = to_torch_async  # type: ignore[attr-defined]
    torch.Tensor.to_torch = to_torch  # type: ignore[attr-defined]


install()
