"""Bytes from the device to the host, beside the copy that one would write by hand."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import dtorch_ops

from .common import Figure, Sample, Settings, Target, compare, expect
from .common import measure as take
from .gpu_device import Accelerator

MIB = 1 << 20
SIZES = {"1MiB": MIB, "8MiB": 8 * MIB, "64MiB": 64 * MIB, "256MiB": 256 * MIB, "1GiB": 1024 * MIB}
QUICK = ("1MiB", "64MiB")
#: 0.95 of the plain copy's bandwidth, as a ratio of times. Of the sizes where it is what counts.
TARGET = Target(1 / 0.95)
TARGET_FROM = 64 * MIB


def _sample(here: Accelerator, size: int, fetch: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
    tensor = torch.arange(size // 4, dtype=torch.int32, device=here.device)
    last = size // 4 - 1

    def sample() -> float:
        """Milliseconds until the bytes can be read. The memory has been used before."""
        here.drain()
        begin = time.perf_counter()
        value = fetch(tensor)
        used = time.perf_counter() - begin
        expect(value[0].item() == 0 and value[last].item() == last, "a copy to the host")
        return used * 1e3

    return sample


def _of_size(settings: Settings, here: Accelerator, name: str, size: int) -> Figure:
    pinned = torch.empty(size // 4, dtype=torch.int32, pin_memory=True)

    def by_hand(tensor: torch.Tensor) -> torch.Tensor:
        pinned.copy_(tensor, non_blocking=True)
        here.drain()
        return pinned

    def ours(tensor: torch.Tensor) -> torch.Tensor:
        # The value before is gone: its pinned memory is taken again.
        return dtorch_ops.to_torch_async(tensor, device="cpu").get()

    samples = {"ours": _sample(here, size, ours), "by_hand": _sample(here, size, by_hand)}
    series = take(samples, settings.rounds)
    return compare(
        f"gpu.to_host_{name}",
        f"{name} to the host: to_torch_async(t, device='cpu').get()",
        "copy_(non_blocking=True) into pinned memory, synchronize",
        subject=series["ours"],
        baseline=series["by_hand"],
        unit="ms",
        target=TARGET if size >= TARGET_FROM else None,
    )


def run(settings: Settings, here: Accelerator) -> list[Figure]:
    names = QUICK if settings.quick else SIZES
    return [_of_size(settings, here, name, SIZES[name]) for name in names]
