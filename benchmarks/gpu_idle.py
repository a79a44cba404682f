"""Processor time of the process while the device works and many futures are pending."""

from __future__ import annotations

import time

import torch

import dtorch_ops

from .common import Figure, Settings, Target, compare, expect
from .gpu_device import Accelerator

STREAMS = 4


def _idle(here: Accelerator, futures: int, seconds: float) -> float:
    """Per cent of one core, during a kernel that takes so long on each of the streams."""
    tensor = torch.ones(2, device=here.device)
    here.drain()
    pending: list[dtorch_ops.TensorFuture] = []
    for stream in [torch.Stream(here.device) for _ in range(STREAMS)]:
        with stream:
            here.sleep(seconds * 1e3)
            pending += [dtorch_ops.to_torch_async(tensor) for _ in range(futures // STREAMS)]
    wall, cpu = time.perf_counter(), time.process_time()
    time.sleep(seconds * 0.6)  # the kernels have begun before the clock
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    expect(not any(future.is_ready() for future in pending), "the futures outlast the measurement")
    dtorch_ops.wait_all(pending)
    here.drain()
    return 100 * cpu / wall


def run(settings: Settings, here: Accelerator) -> list[Figure]:
    seconds = 0.5 if settings.quick else 5.0
    count = settings.count(1000, 40)
    _idle(here, STREAMS, 0.5)  # a warm-up
    rounds = range(min(settings.rounds, 3))
    ours = [_idle(here, count, seconds) for _ in rounds]
    nothing = [_idle(here, 0, seconds) for _ in rounds]
    return [
        compare(
            "gpu.idle_cpu",
            f"{count:,} futures pending behind kernels of {seconds:g} s: one core's time",
            "the kernels alone",
            subject=ours,
            baseline=nothing,
            unit="%",
            target=Target(2.0, "subject"),
        )
    ]
