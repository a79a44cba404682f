"""What a fetch costs its caller, and how soon after the device's work the value is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import dtorch_ops

from .common import Figure, Sample, Settings, Target, compare, expect
from .common import measure as take
from .gpu_device import Accelerator

#: Microseconds, whatever the kind of fetch.
CALLER = Target(15, "subject")
READY = Target(1.2)


# ---- The caller ----------------------------------------------------------------------------------


def _caller(here: Accelerator, start: Callable[[], Any], count: int) -> Sample:
    """Microseconds of the calling thread for each ``start``, whose results are kept until after.

    The device is idle, so that what is measured is not its queue, which may be full.
    """

    def sample() -> float:
        here.drain()
        kept: list[Any] = [None] * count
        begin = time.perf_counter()
        for i in range(count):
            kept[i] = start()
        used = time.perf_counter() - begin
        here.drain()
        for one in kept:
            if isinstance(one, torch._C.Future):
                expect(one.wait().sum().item() == 2, "a fetch")
        return used / count * 1e6

    return sample


def _callers(settings: Settings, here: Accelerator) -> list[Figure]:
    tensor = torch.ones(2, device=here.device)
    operator = torch.ops.dtorch.get_tensor_async.default

    def event() -> torch.Event:
        made = torch.Event(here.device)
        made.record()
        return made

    def copy_and_event() -> tuple[torch.Tensor, torch.Event]:
        value = torch.empty(2, pin_memory=True)
        value.copy_(tensor, non_blocking=True)
        return value, event()

    starts: dict[str, Callable[[], Any]] = {
        "event": event,
        "copy_event": copy_and_event,
        "here": lambda: dtorch_ops.to_torch_async(tensor),
        "operator": lambda: operator(tensor),
        "to_host": lambda: dtorch_ops.to_torch_async(tensor, device="cpu"),
    }
    count = settings.count(50, 5)
    samples = {name: _caller(here, start, count) for name, start in starts.items()}
    series = take(samples, settings.rounds, per_round=settings.count(20, 2))

    def figure(name: str, title: str, baseline: str, baseline_title: str) -> Figure:
        return compare(
            f"gpu.caller_{name}",
            f"the caller's time: {title}",
            baseline_title,
            subject=series[name],
            baseline=series[baseline],
            unit="µs",
            target=CALLER,
        )

    by_hand = ("event", "make and record an event")
    copied = ("copy_event", "pinned memory, copy_(non_blocking=True), event")
    return [
        figure("here", "to_torch_async(t)", *by_hand),
        figure("operator", "get_tensor_async.default(t)", *by_hand),
        figure("to_host", "to_torch_async(t, device='cpu')", *copied),
    ]


# ---- Ready ---------------------------------------------------------------------------------------


def _ready(here: Accelerator, tensor: torch.Tensor, wait: Callable[[], Any], ms: float) -> Sample:
    """Microseconds from queueing work of ``ms`` to the end of ``wait``, which fetches and waits."""

    def sample() -> float:
        here.drain()
        tensor.fill_(1)
        here.drain()
        begin = time.perf_counter()
        if ms:
            here.sleep(ms)
        tensor.fill_(2)
        wait()
        used = time.perf_counter() - begin
        expect(tensor.sum().item() == 4, "work before the fetch")
        return used * 1e6

    return sample


def _readies(settings: Settings, here: Accelerator) -> list[Figure]:
    tensor = torch.ones(2, device=here.device)

    def by_hand(blocking: bool) -> Callable[[], None]:
        def wait() -> None:
            event = torch.Event(here.device, blocking=blocking)
            event.record()
            event.synchronize()

        return wait

    waits: dict[str, Callable[[], Any]] = {
        "ours": lambda: dtorch_ops.to_torch_async(tensor).wait(),
        "spinning": by_hand(blocking=False),
        "sleeping": by_hand(blocking=True),
    }
    found: list[Figure] = []
    for name, ms in (("idle", 0.0), ("1ms", 1.0)):
        samples = {key: _ready(here, tensor, wait, ms) for key, wait in waits.items()}
        series = take(samples, settings.rounds, per_round=settings.count(30, 2))
        found += [
            compare(
                f"gpu.ready_{name}_{kind}",
                f"{'a small kernel' if not ms else 'work of 1 ms'}, fetch, wait",
                f"event, recorded and synchronised with, {kind}",
                subject=series["ours"],
                baseline=series[kind],
                unit="µs",
                target=READY if ms else None,
            )
            for kind in ("sleeping", "spinning")
        ]
    return found


def run(settings: Settings, here: Accelerator) -> list[Figure]:
    return _callers(settings, here) + _readies(settings, here)
