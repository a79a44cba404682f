"""What the operators do with fake tensors, which have a shape and a device but no data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _library as _library  # loads the operators
from ._compile import REASON, is_fake_promise
from .promise import TensorPromise, VoidPromise


def _refuse_in_a_graph() -> None:
    # Of torch.export, which traces by running: Dynamo breaks the graph before.
    if torch.compiler.is_compiling():
        raise NotImplementedError(REASON)


def _get_tensor_async(
    self: Tensor, *, device: torch.device | None = None, copy: bool = False
) -> torch._C.Future[Tensor]:
    _refuse_in_a_graph()
    promise = TensorPromise()
    promise.set_value(self if device is None and not copy else self.to(device=device, copy=copy))
    return promise.get_future()


def _get_tensors_async(
    self: list[Tensor], *, device: torch.device | None = None, copy: bool = False
) -> torch._C.Future[list[Tensor]]:
    _refuse_in_a_graph()
    once = {
        id(tensor): tensor if device is None and not copy else tensor.to(device=device, copy=copy)
        for tensor in self
    }
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([once[id(tensor)] for tensor in self])
    return future


def _sync(devices: list[torch.device] | None = None) -> torch._C.Future[None]:
    _refuse_in_a_graph()
    promise = VoidPromise()
    promise.set_value()
    return promise.get_future()


def _get_start(self: Tensor, *, device: torch.device | None = None, frozen: bool = False) -> Tensor:
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


def _get_wait(handle: Tensor, source: Tensor, *, device: torch.device | None = None) -> Tensor:
    return source.detach().to(device, copy=True).resolve_conj().resolve_neg()


def _get_tensor(self: Tensor, promise: Any) -> None:
    if not is_fake_promise(promise):
        promise.set_value(self)


def _get_tensor_copy(self: Tensor, promise: Any, *, copy: bool) -> None:
    _get_tensor(self.clone() if copy else self, promise)


def _sync_promise(promise: Any, devices: list[torch.device] | None = None) -> None:
    if not is_fake_promise(promise):
        promise.set_value()


def _sync_devices_promise(devices: list[torch.device] | None, promise: Any) -> None:
    _sync_promise(promise)


def install() -> None:
    torch.library.register_fake("dtorch::get_tensor_async", _get_tensor_async)
    torch.library.register_fake("dtorch::get_tensors_async", _get_tensors_async)
    torch.library.register_fake("dtorch::get_tensor", _get_tensor)
    torch.library.register_fake("dtorch::get_tensor.copy", _get_tensor_copy)
    torch.library.register_fake("dtorch::sync", _sync)
    torch.library.register_fake("dtorch::sync.promise", _sync_promise)
    torch.library.register_fake("dtorch::sync.devices_promise", _sync_devices_promise)
    torch.library.register_fake("dtorch::get_start", _get_start)
    torch.library.register_fake("dtorch::get_wait", _get_wait)


install()
