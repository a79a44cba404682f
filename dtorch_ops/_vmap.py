"""What the operators do inside of ``torch.vmap``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _ops


def _get_start(
    info: Any,
    in_dims: tuple[int | None, ...],
    input: Tensor,
    *,
    device: torch.device | None = None,
    frozen: bool = False,
) -> tuple[Tensor, None]:
    # One transfer of the whole batch; its handle is the same for all.
    return _ops.get_start(input, device=device, frozen=frozen), None


def _get_wait(
    info: Any,
    in_dims: tuple[int | None, ...],
    handle: Tensor,
    source: Tensor,
    *,
    device: torch.device | None = None,
) -> tuple[Tensor, int | None]:
    if in_dims[0] is not None:
        raise ValueError(
            "get_wait: expected the handle of a start in the same vmap, got one that has left it: "
            "start and wait inside, or both outside"
        )
    return _ops.get_wait(handle, source, device=device), in_dims[1]


def install() -> None:
    torch.library.register_vmap(_ops.get_start, _get_start)
    torch.library.register_vmap(_ops.get_wait, _get_wait)


install()
