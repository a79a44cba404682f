"""What is kept for an outstanding request, and what is left behind by one that was given up.

Each round is a process of its own: in one that has freed memory before, new objects cost nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import dtorch_ops

from .common import Figure, Series, Settings, Target, compare, expect

ROOT = Path(__file__).resolve().parent.parent
TENSOR = torch.ones(2)

#: 200,000 operations that leave less than this each leave less than 200 KB together.
FLAT = Target(1.0, "subject")


def _resident() -> int:
    """Bytes. Counted page by page, unlike in /proc/self/statm, which is behind by some."""
    gc.collect()
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("expected a line 'Rss:' in /proc/self/smaps_rollup, got none")


def _grown(work: Callable[[int], object], count: int, warm_up: int) -> float:
    """Bytes per operation by which ``work``, which does as many as it is told, grows the process.

    What ``work`` returns stays alive up to the end.
    """
    warm = work(warm_up)
    before = _resident()
    kept = work(count)
    grown = _resident() - before
    _keep.append((warm, kept))
    return grown / count


# What one probe frees, the next one would get for nothing.
_keep: list[object] = []


# ---- Outstanding ---------------------------------------------------------------------------------


def _outstanding_torch_futures(count: int) -> list[object]:
    futures: list[object] = [None] * count
    for i in range(count):
        futures[i] = torch.futures.Future()
    return futures


def _outstanding_promises(count: int) -> tuple[list[object], list[object]]:
    promises: list[object] = [None] * count
    futures: list[object] = [None] * count
    for i in range(count):
        promises[i] = promise = dtorch_ops.TensorPromise()
        futures[i] = promise.get_future()
    return promises, futures


# ---- Given up ------------------------------------------------------------------------------------


class OnePending:
    """A future that outlives all who gave up waiting for it."""

    THREADS = 16
    BATCH = 1000

    def __init__(self) -> None:
        self._promise = dtorch_ops.TensorPromise()
        self._future = self._promise.get_future()
        self._pool = concurrent.futures.ThreadPoolExecutor(self.THREADS)
        self._loop = asyncio.new_event_loop()

    def look(self, count: int) -> None:
        for _ in range(count):
            with contextlib.suppress(TimeoutError):
                self._future.wait(0)
                expect(False, "a pending future did not time out")

    def block(self, count: int) -> None:
        """Really asleep, one millisecond each, in several threads."""
        share = -(-count // self.THREADS)
        for done in [self._pool.submit(self._block, share) for _ in range(self.THREADS)]:
            done.result()

    def _block(self, count: int) -> None:
        for _ in range(count):
            with contextlib.suppress(TimeoutError):
                self._future.wait(1)
                expect(False, "a pending future did not time out")

    def cancel(self, count: int) -> None:
        self._loop.run_until_complete(self._cancel(count))

    async def _cancel(self, count: int) -> None:
        for _ in range(-(-count // self.BATCH)):
            tasks = [asyncio.ensure_future(self._await()) for _ in range(self.BATCH)]
            await asyncio.sleep(0)  # each has run up to its await
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            expect(all(task.cancelled() for task in tasks), "an await was not cancelled")

    async def _await(self) -> torch.Tensor:
        return await self._future

    def finish(self) -> None:
        self._promise.set_value(TENSOR)
        expect(self._future.get() is TENSOR, "a future that many gave up waiting for")
        self._pool.shutdown()
        self._loop.close()


class OnePendingOfTorch:
    """What giving up costs by hand: a callback cannot be taken back."""

    def __init__(self) -> None:
        self._future = torch.futures.Future()
        self._called = 0

    def add_callbacks(self, count: int) -> None:
        for _ in range(count):
            self._future.add_done_callback(self._on_done)
        self._called -= count

    def _on_done(self, _: object) -> None:
        self._called += 1

    def finish(self) -> None:
        self._future.set_result(TENSOR)
        expect(self._called == 0, "every callback was called")


def probe(many: int, fewer: int) -> dict[str, float]:
    """Bytes per operation, of this process."""
    warm_up = max(OnePending.BATCH, many // 20)
    ours, torchs = OnePending(), OnePendingOfTorch()
    found = {
        "torch_future": _grown(_outstanding_torch_futures, many // 2, warm_up),
        "promise": _grown(_outstanding_promises, many // 2, warm_up),
        "callback": _grown(torchs.add_callbacks, many // 2, warm_up),
        "look": _grown(ours.look, many, warm_up),
        "block": _grown(ours.block, fewer, max(1, fewer // 4)),
        "cancel": _grown(ours.cancel, many, 10 * OnePending.BATCH),
    }
    ours.finish()
    torchs.finish()
    return found


# ---- The figures ---------------------------------------------------------------------------------


def _probe_in_new_process(many: int, fewer: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.bench_memory", str(many), str(fewer)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _figures(series: Series, many: int, fewer: int) -> list[Figure]:
    def figure(name: str, title: str, baseline: str, target: Target) -> Figure:
        titles = {
            "torch_future": "a pending torch.futures.Future",
            "callback": "a done-callback left on a torch future",
        }
        return compare(
            f"memory.{name}",
            title,
            titles[baseline],
            subject=series[name],
            baseline=series[baseline],
            unit="B",
            target=target,
        )

    return [
        figure(
            "promise", "a TensorPromise and its future", "torch_future", Target(1024, "subject")
        ),
        figure("look", f"left by each of {many:,} wait(0)", "callback", FLAT),
        figure("block", f"left by each of {fewer:,} wait(1)", "callback", FLAT),
        figure("cancel", f"left by each of {many:,} cancelled awaits", "callback", FLAT),
    ]


def run(settings: Settings) -> list[Figure]:
    many, fewer = settings.count(200_000, 2_000), settings.count(40_000, 64)
    rounds = min(settings.rounds, settings.count(3, 1))
    found = [_probe_in_new_process(many, fewer) for _ in range(rounds)]
    series = {name: [one[name] for one in found] for name in found[0]}
    return _figures(series, many, fewer)


if __name__ == "__main__":
    print(json.dumps(probe(*map(int, sys.argv[1:]))))
