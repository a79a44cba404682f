"""Fetching a tensor's value, as functions and as methods of ``torch.Tensor``."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import _C, _ops, _tree, functional
from ._compile import breaks_graph, is_traced
from .functional import Device
from .future import TensorFuture, TreeFuture

__all__ = ["to_torch", "to_torch_async"]

T = TypeVar("T")


@overload
def to_torch_async(  # type: ignore[overload-overlap]
    input: Tensor, *, device: Device | None = None, copy: bool = False
) -> TensorFuture: ...
@overload
def to_torch_async(
    input: T, *, device: Device | None = None, copy: bool = False
) -> TreeFuture[T]: ...
@breaks_graph
def to_torch_async(input: Any, *, device: Device | None = None, copy: bool = False) -> Any:
    """A future of the value of ``input``; returns at once. Also ``t.to_torch_async()``.
    On the same device and without ``copy`` the result is ``input`` itself: it shares memory with
    it, as ``detach()`` does, and a later in-place update shows. ``copy=True`` takes a snapshot at
    the time of the call, in the order of the stream, and so does a ``device`` other than the
    tensor's.

    On an accelerator the future completes when all that the current stream was given before the
    call is done; the calling thread only queues, and a background thread waits. What comes to the
    CPU is in pinned memory, where there is some, copied on a stream of its own.

    Of a tree, nested lists, tuples, dicts and what else ``torch.utils._pytree`` knows, it is one
    future of a tree of the same structure, with one event for each stream and one completion. A
    tensor that is in it several times is fetched once. Leaves that are no tensors are passed
    through as they are; one that has a tensor or a future in it is refused. All leaves are looked
    at before anything is begun; a note of an error says where in the tree it was.

    Args:
        input: a tensor of any shape, dtype and layout, on the CPU or meta (complete on return) or
            on an accelerator; or a tree of them. A copy of a tensor of a subclass is a plain
            tensor, unless the subclass sees to it.
        device: where the result is to be; None is where ``input`` is.
        copy: whether to take a snapshot.

    Returns:
        A :class:`TensorFuture`, or of a tree a :class:`TreeFuture`. The result is differentiable,
        since it is ``input`` itself, or a copy that autograd has recorded.

    Raises:
        TypeError: neither a tensor nor a tree, or a DTensor, of which ``to_local()`` or
            ``full_tensor()`` is a tensor.
        ValueError: a device that this build of torch does not know.
        NotImplementedError: a device without streams and events; from or to an accelerator a
            tensor that is not strided.
        RuntimeError: the current stream records a graph.

    Example:
        >>> future = dtorch_ops.to_torch_async(torch.ones(2))
        >>> future.get()
        tensor([1., 1.])
        >>> dtorch_ops.to_torch_async({"loss": torch.tensor(0.5), "steps": 3}).get()
        {'loss': tensor(0.5000), 'steps': 3}
    """
    return _C.to_torch_async(input, device, copy)


@overload
def to_torch(input: Tensor, *, device: Device | None = None, copy: bool = False) -> Tensor: ...
@overload
def to_torch(input: T, *, device: Device | None = None, copy: bool = False) -> T: ...
def to_torch(input: Any, *, device: Device | None = None, copy: bool = False) -> Any:
    """The value of ``input``: ``to_torch_async(...).get()``. Also ``t.to_torch()``.

    Takes and raises what :func:`to_torch_async` does. In a compiled or exported region it becomes
    :func:`dtorch_ops.functional.get_start` and ``get_wait``, of a tree all starts and then all
    waits.

    Example:
        >>> dtorch_ops.to_torch(torch.ones(2))
        tensor([1., 1.])
        >>> dtorch_ops.to_torch([torch.ones(2), torch.zeros(1)])
        [tensor([1., 1.]), tensor([0.])]
    """
    if is_dynamo_compiling():
        return _tree.fetch_in_graph(input, device, copy)
    if type(input) is not Tensor:
        if not isinstance(input, Tensor):
            return _tree.fetch_now(input, device, copy)
        if is_traced(input):
            return functional.fetch(input, device, copy)
    return _C.to_torch_async(input, device, copy).get()


def install() -> None:
    """Add the two as methods of ``torch.Tensor``."""
    _C.register_fetches(one=_ops.get_tensor_async, several=_ops.get_tensors_async, tree=_tree.fetch)
    torch.Tensor.to_torch_async = to_torch_async  # type: ignore[attr-defined]
    torch.Tensor.to_torch = to_torch  # type: ignore[attr-defined]


install()
