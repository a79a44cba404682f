"""Waiting for devices: all work that was queued so far is done."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from . import _ops
from ._compile import breaks_graph
from .functional import Device
from .future import VoidFuture

__all__ = ["sync", "sync_future"]

Devices = Device | Iterable[Device]


def _device_list(devices: Devices | None) -> list[torch.device] | None:
    if devices is None:
        return None
    if isinstance(devices, (torch.device, str, int)):
        devices = [devices]
    try:
        listed = list(devices)
    except TypeError:
        listed = [devices]  # type: ignore[list-item]
    for device in listed:
        if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
            raise TypeError(
                "devices: expected a torch.device, a string or an index, or a list of them, got "
                f"{type(device).__name__}"
            )
    try:
        return [torch.device(device) for device in listed]
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"devices: expected devices that torch knows, got {listed!r}: {error}"
        ) from None


@breaks_graph
def sync_future(devices: Devices | None = None) -> VoidFuture:
    """A future that completes when everything queued so far on ``devices`` is done.

    Args:
        devices: one device or several; the current stream of each counts. None is every device
            that is initialised.

    Raises:
        TypeError: something that names no device.
        ValueError: a device that this build of torch does not know.
        NotImplementedError: a device without streams and events.
        RuntimeError: the current stream of one records a graph.

    Example:
        >>> dtorch_ops.sync_future("cpu").get()
    """
    return VoidFuture(_ops.sync(_device_list(devices)))


@breaks_graph
def sync(devices: Devices | None = None, timeout_ms: float | None = None) -> None:
    """Block until everything queued so far on ``devices`` is done.

    Args:
        devices: as for :func:`sync_future`.
        timeout_ms: milliseconds on the monotonic clock; None is no limit.

    Raises:
        TimeoutError: the time is over.
        Exception: what :func:`sync_future` raises.

    Example:
        >>> dtorch_ops.sync(timeout_ms=1000)
    """
    sync_future(devices).wait(timeout_ms)
