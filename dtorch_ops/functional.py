"""The fetch as two functions of tensors only, for graphs, which cannot hold a future.

``torch.compile(step, fullgraph=True)``, ``torch.export`` and AOTInductor take this:

>>> def step(x):
...     transfer = dtorch_ops.functional.get_start(x.sum(), device="cpu")
...     y = x * 2  # what stands here runs beside the copy
...     return y, dtorch_ops.functional.get_wait(transfer)
>>> step(torch.ones(3))
(tensor([2., 2., 2.]), tensor(3.))
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _ops

__all__ = ["Transfer", "get_start", "get_wait"]

Device = torch.device | str | int


class Transfer(NamedTuple):
    """A fetch that has been started: for :func:`get_wait`, once. What is in it is private.

    A tuple of tensors, so that it passes into and out of compiled regions.
    """

    handle: Tensor
    source: Tensor
    device: torch.device | None


def as_device(device: Device | None) -> torch.device | None:
    """``device`` as torch has it, with our errors."""
    if device is None or isinstance(device, torch.device):
        return device
    if isinstance(device, bool) or not isinstance(device, (str, int)):
        raise TypeError(
            "device: expected a torch.device, a string or an index, got " + type(device).__name__
        )
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device: expected one that torch knows, got {device!r}: {error}"
        ) from None


def get_start(input: Tensor, device: Device | None = None, *, frozen: bool = False) -> Transfer:
    """Begin to take a snapshot of ``input``; returns at once.

    ``get_wait(get_start(t, device))`` equals ``dtorch_ops.to_torch(t, device=device, copy=True)``
    at the place of the start, whatever is written to ``t`` afterwards. On an accelerator the copy
    runs beside what the current stream is given between the two; on the CPU it is made at once.
    In a graph both run exactly once, in their order.

    Args:
        input: a tensor of any shape and dtype, as for :func:`dtorch_ops.to_torch_async`.
        device: where the snapshot is to be; None is where ``input`` is.
        frozen: nothing is written to ``input`` before the wait, you promise. Without that what an
            accelerator is to copy to another device is first cloned on its own, which takes that
            memory for as long as the copy takes.

    Returns:
        What :func:`get_wait` takes, once.

    Raises:
        Exception: what :func:`dtorch_ops.to_torch_async` raises.

    Example:
        >>> t = torch.ones(2)
        >>> transfer = dtorch_ops.functional.get_start(t)
        >>> _ = t.add_(1)
        >>> dtorch_ops.functional.get_wait(transfer)
        tensor([1., 1.])
    """
    if not isinstance(input, Tensor):
        raise TypeError("input: expected a torch.Tensor, got " + type(input).__name__)
    device = as_device(device)
    return Transfer(_ops.get_start(input, device=device, frozen=frozen), input, device)


def get_wait(transfer: Transfer) -> Tensor:
    """The snapshot that :func:`get_start` has begun; blocks until it is there.

    Args:
        transfer: what :func:`get_start` has returned.

    Returns:
        A tensor of the shape and dtype of the start's ``input``, on the start's ``device``. The
        gradient goes to ``input``. It is the memory that the start has filled, and on the CPU
        pinned if it came from an accelerator that has such memory.

    Raises:
        TypeError: something else than :func:`get_start` returns.
        FutureAlreadyRetrievedError: a transfer that has been waited for.
        RuntimeError: the error of the device.

    Example:
        >>> dtorch_ops.functional.get_wait(dtorch_ops.functional.get_start(torch.ones(2)))
        tensor([1., 1.])
    """
    if not isinstance(transfer, Transfer):
        raise TypeError(
            "transfer: expected what dtorch_ops.functional.get_start returns, got "
            + type(transfer).__name__
        )
    value: Tensor = _ops.get_wait(transfer.handle, transfer.source, device=transfer.device)
    return value


def fetch(input: Tensor, device: Device | None, copy: bool) -> Tensor:
    """What ``dtorch_ops.to_torch`` becomes in a graph."""
    return fetch_each([input], device, copy)[0]


def fetch_each(inputs: list[Tensor], device: Device | None, copy: bool) -> list[Tensor]:
    """The same of several: all starts, then all waits."""
    device = as_device(device)
    snapshots = [copy or not _is_on(input, device) for input in inputs]
    starts = [
        # Nothing stands between that writes to it. Or the result is the tensor itself, once
        # computed: fetch nothing of it, and wait for that.
        get_start(input, device, frozen=True)
        if snapshot
        else get_start(input.detach().unsqueeze(0)[:0], frozen=True)
        for input, snapshot in zip(inputs, snapshots, strict=True)
    ]
    values = [get_wait(start) for start in starts]
    return [
        value if snapshot else input
        for input, value, snapshot in zip(inputs, values, snapshots, strict=True)
    ]


def _is_on(input: Tensor, device: torch.device | None) -> bool:
    if device is None:
        return True
    if device.type != input.device.type or device.type in ("cpu", "meta"):
        return device.type == input.device.type
    if device.index is None:
        device = torch.empty(0, device=device).device  # the current one
    return device == input.device
