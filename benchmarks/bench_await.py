"""What ``await`` costs, beside the least that asyncio itself needs to be woken by a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

import dtorch_ops

from .common import Figure, Helper, Settings, Target, compare, expect
from .common import measure as take

TENSOR = torch.ones(2)

T = TypeVar("T")


@dataclass
class Pending(Generic[T]):
    """Something to await, how another thread completes it, and what it then gives."""

    awaitable: Awaitable[T]
    complete: Callable[[], object]
    value: T


def _ours(loop: asyncio.AbstractEventLoop) -> Pending[torch.Tensor]:
    promise = dtorch_ops.TensorPromise()
    return Pending(promise.get_future(), lambda: promise.set_value(TENSOR), TENSOR)


def bare(loop: asyncio.AbstractEventLoop) -> Pending[None]:
    """The baseline: what every way to wake a coroutine from a thread comes down to."""
    future = loop.create_future()
    return Pending(future, lambda: loop.call_soon_threadsafe(future.set_result, None), None)


Make = Callable[[asyncio.AbstractEventLoop], Pending[Any]]
MAKERS: dict[str, Make] = {"ours": _ours, "bare": bare}
BARE = "call_soon_threadsafe(future.set_result)"


# ---- One -----------------------------------------------------------------------------------------


async def resumed_after(helper: Helper, make: Make) -> float:
    """Microseconds from just before the completion to the resumption of a loop that sleeps."""
    pending = make(asyncio.get_running_loop())
    helper.act_soon(pending.complete)
    value = await pending.awaitable
    end = time.perf_counter()
    expect(value is pending.value, "what an await gave")
    return (end - helper.acted_at) * 1e6


# ---- Many at once --------------------------------------------------------------------------------


class Crowd:
    """Coroutines that each await one thing, and the instant at which the last was resumed."""

    def __init__(self, make: Make, size: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending = [make(self._loop) for _ in range(size)]
        self._left = size
        self._all_resumed = self._loop.create_future()
        self._tasks = [self._loop.create_task(self._one(p.awaitable)) for p in self._pending]

    async def _one(self, awaitable: Awaitable[Any]) -> Any:
        value = await awaitable
        self._left -= 1
        if self._left == 0:
            self._all_resumed.set_result(time.perf_counter())
        return value

    async def all_asleep(self) -> None:
        await asyncio.sleep(0)  # each has run up to its await
        expect(self._left == len(self._tasks), "nobody was resumed before the completion")

    def complete(self) -> None:
        for pending in self._pending:
            pending.complete()

    async def last_resumed_at(self) -> float:
        at: float = await self._all_resumed
        values = await asyncio.gather(*self._tasks)
        right = (value is p.value for value, p in zip(values, self._pending, strict=True))
        expect(all(right), "what the awaits gave")
        return at


async def _all_resumed_after(helper: Helper, make: Make, size: int) -> float:
    """Milliseconds from just before the first completion to the resumption of the last."""
    crowd = Crowd(make, size)
    await crowd.all_asleep()
    helper.act_soon(crowd.complete)
    return (await crowd.last_resumed_at() - helper.acted_at) * 1e3


# ---- Many that nobody completes ------------------------------------------------------------------


def _threads() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("Threads:")[1].split()[0])


async def _idle(helper: Helper, make: Make, size: int, seconds: float) -> tuple[float, int]:
    """Per cent of one core that the process uses meanwhile, and its threads in the end."""
    crowd = Crowd(make, size)
    await crowd.all_asleep()
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    threads = _threads()
    helper.act_soon(crowd.complete)
    await crowd.last_resumed_at()
    return 100 * cpu / wall, threads


# ---- The figures ---------------------------------------------------------------------------------


class Bench:
    """One event loop and one other thread for everything, since both cost time to get going."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._helper = Helper()

    def close(self) -> None:
        self._helper.close()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)

    def one(self) -> Figure:
        series = take(
            {
                name: lambda make=make: self._run(resumed_after(self._helper, make))
                for name, make in MAKERS.items()
            },
            self._settings.rounds,
            per_round=self._settings.count(50, 3),
        )
        return compare(
            "await.resume",
            "set_value -> the coroutine goes on",
            BARE,
            subject=series["ours"],
            baseline=series["bare"],
            unit="µs",
            target=Target(1.15),
        )

    def many(self) -> Figure:
        size = self._settings.count(10_000, 200)
        series = take(
            {
                name: lambda make=make: self._run(_all_resumed_after(self._helper, make, size))
                for name, make in MAKERS.items()
            },
            self._settings.rounds,
        )
        return compare(
            "await.many",
            f"{size:,} completed at once -> all go on",
            BARE,
            subject=series["ours"],
            baseline=series["bare"],
            unit="ms",
            target=Target(0.7),
        )

    def idle(self) -> list[Figure]:
        size, seconds = self._settings.count(10_000, 200), 0.2 if self._settings.quick else 3.0
        cpu: dict[str, list[float]] = {name: [] for name in MAKERS}
        threads: dict[str, list[float]] = {name: [] for name in MAKERS}
        for _ in range(min(self._settings.rounds, 2)):
            for name in reversed(MAKERS):  # first without ours, which might start threads for good
                used, count = self._run(_idle(self._helper, MAKERS[name], size, seconds))
                cpu[name].append(used)
                threads[name].append(count)
        return [
            compare(
                "await.idle_cpu",
                f"{size:,} awaited, idle for {seconds:g} s: one core's time",
                "as many asyncio futures awaited",
                subject=cpu["ours"],
                baseline=cpu["bare"],
                unit="%",
                target=Target(1.0, "subject"),
            ),
            compare(
                "await.idle_threads",
                "threads of the process meanwhile",
                "as many asyncio futures awaited",
                subject=threads["ours"],
                baseline=threads["bare"],
                unit="threads",
                target=Target(1.0),
            ),
        ]


def run(settings: Settings) -> list[Figure]:
    bench = Bench(settings)
    try:
        idle = bench.idle()  # first: nothing of ours has been awaited in this process yet
        return [bench.one(), bench.many(), *idle]
    finally:
        bench.close()
