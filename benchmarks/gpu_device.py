"""The accelerator that is measured: a real one, or the fake one of the tests.

What is measured on the fake means nothing; it shows that a benchmark works.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from .common import NothingToMeasure, Settings

FAKE = "fake"


class Accelerator:
    """What the benchmarks need beyond what torch offers for every accelerator."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        torch.accelerator.set_device_index(self.device.index or 0)
        self._cycles_per_ms = 0.0

    def drain(self) -> None:
        torch.accelerator.synchronize(self.device)

    def sleep(self, milliseconds: float) -> None:
        """Have the current stream do nothing for so long, from when it gets there."""
        if not self._cycles_per_ms:
            self._cycles_per_ms = self._measure_cycles()
        torch.cuda._sleep(int(milliseconds * self._cycles_per_ms))

    def _measure_cycles(self) -> float:
        cycles = 20_000_000
        begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        for _ in range(2):  # the first one is for warming up
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
        return cycles / begin.elapsed_time(end)

    def synchronisations(self, body: Callable[[], object]) -> int:
        """How often ``body`` has made the calling thread wait for the device; by torch's count."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                body()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(one.message) for one in told)


class FakeAccelerator(Accelerator):
    """That of the tests, whose streams can be held."""

    def __init__(self) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
        import fake_accelerator

        self._fake = fake_accelerator
        self._fake.install()
        super().__init__(FAKE)

    def sleep(self, milliseconds: float) -> None:
        stream = torch.accelerator.current_stream(self.device)
        self._fake.hold(stream)

        def release() -> None:
            time.sleep(milliseconds / 1e3)
            self._fake.release(stream)

        threading.Thread(target=release, daemon=True).start()

    def synchronisations(self, body: Callable[[], object]) -> int:
        self._fake.reset_counters()
        body()
        # Operators that it lacks run on the CPU, and block.
        return sum(n for name, n in self._fake.counters().my_syncs().items() if name != "fallback")


def accelerator(settings: Settings) -> Accelerator:
    """The one that was asked for, or the one there is.

    Raises:
        NothingToMeasure: There is none.
    """
    if settings.device == FAKE:
        return FakeAccelerator()
    if not torch.cuda.is_available():
        raise NothingToMeasure("no CUDA device: nothing was measured")
    known = ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    name = settings.device or "cuda"
    if name not in known:
        raise NothingToMeasure(f"expected one of {', '.join(known)}, {FAKE}, got {name!r}")
    return Accelerator(name)
