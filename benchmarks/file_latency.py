"""From ``set_value`` in one process to the tensor in the hand of another, beside the floor.

Both processes sleep before: the consumer is blocked, the producer has slept for a while. The clock
is read just before ``set_value`` in the one process and just after the wait in the other;
CLOCK_MONOTONIC is the same in both. What asks the producer to produce is outside of this.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import torch

import dtorch_ops

from . import bench_await
from .common import Figure, Helper, Sample, Series, Settings, Target, compare, in_a_row
from .common import measure as take
from .contents import Contents
from .floor import Floor
from .partner import Partner

#: Bytes, by what they are called. A quick run leaves the large ones out.
SIZES = {"4 B": 4, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "256 MiB": 1 << 28}
QUICK_SIZES = ("4 B", "64 KiB", "1 MiB")

#: Bytes up to which the wake-up is most of the time, not the copy.
SMALL = 1 << 16

#: Seconds; enough for the other process to go to sleep in the kernel.
PAUSE = 0.002

#: Whether a producer can write into memory that the promise lends it.
LENDS = hasattr(dtorch_ops.TensorPromise, "empty")


def sizes(settings: Settings) -> dict[str, int]:
    return {name: SIZES[name] for name in (QUICK_SIZES if settings.quick else SIZES)}


def key(name: str) -> str:
    """The name of a size, as a part of a figure's key."""
    return name.replace(" ", "")


def repeat(size: int, settings: Settings) -> int:
    """How many in a row make one value: more of the short ones, which vary most."""
    return settings.count(max(1, min(40, (1 << 25) // size)), 2)


# ---- The process that sets -----------------------------------------------------------------------


class Producer:
    """Its methods return the instant just before the value was set, in ns."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._contents = Contents()
        self._floors: dict[str, Floor] = {}

    def ready(self, size: int) -> None:
        """Makes the tensor of this size, so that it is warm."""
        self._contents.tensor(size, 0)

    def set_value(self, promise: dtorch_ops.TensorPromise, size: int, number: int) -> int:
        tensor = self._contents.tensor(size, number)
        time.sleep(PAUSE)
        began = time.monotonic_ns()
        promise.set_value(tensor)
        return began

    def set_lent(self, promise: dtorch_ops.TensorPromise, size: int, number: int) -> int:
        """The tensor was written into memory of the promise: nothing is left to copy."""
        tensor = promise.empty(size, dtype=torch.uint8)
        tensor.copy_(self._contents.tensor(size, number))
        time.sleep(PAUSE)
        began = time.monotonic_ns()
        promise.set_value(tensor)
        return began

    def put(self, path: str, capacity: int, size: int, number: int) -> int:
        if path not in self._floors:
            self._floors[path] = Floor(capacity, path)
        tensor = self._contents.tensor(size, number)
        time.sleep(PAUSE)
        return self._floors[path].put(tensor)


# ---- The process that waits ----------------------------------------------------------------------

Waited = tuple[torch.Tensor, int]  # and the instant at which it was in hand, in ns


def _wait(promise: dtorch_ops.TensorPromise, begin: Callable[[], None]) -> Waited:
    future = promise.get_future()
    begin()
    tensor = future.wait()
    return tensor, time.monotonic_ns()


def _torch_wait(promise: dtorch_ops.TensorPromise, begin: Callable[[], None]) -> Waited:
    future = torch.ops.dtorch.get_future(promise)  # a plain torch.futures.Future's base
    begin()
    tensor = future.wait()
    return tensor, time.monotonic_ns()


async def _await(promise: dtorch_ops.TensorPromise, begin: Callable[[], None]) -> Waited:
    future = promise.get_future()
    begin()
    tensor = await future
    return tensor, time.monotonic_ns()


class Consumer:
    """Takes single measurements, in microseconds."""

    def __init__(self, producer: Partner, capacity: int) -> None:
        torch.set_num_threads(1)
        self._producer = producer
        self._capacity = capacity
        self._contents = Contents()
        self._number = 0
        self._floor = Floor(capacity)
        self._loop = asyncio.new_event_loop()
        self._helper = Helper()

    def close(self) -> None:
        self._helper.close()
        self._loop.close()
        self._floor.close()

    def samples(self, size: int) -> dict[str, Sample]:
        self._producer.call("ready", size)
        samples: dict[str, Sample] = {
            "floor": lambda: self.floor(size),
            "wait": lambda: self.ours(size, _wait),
        }
        if size <= SMALL:
            samples["torch_wait"] = lambda: self.ours(size, _torch_wait)
            samples["await"] = lambda: self.ours(size, self._await)
            samples["call_soon"] = self._call_soon
        if LENDS:
            samples["lent"] = lambda: self.ours(size, _wait, "set_lent")
            samples["wait_4B"] = lambda: self.ours(4, _wait)
        return samples

    def floor(self, size: int, floor: Floor | None = None) -> float:
        self._number += 1
        floor = floor or self._floor
        self._producer.tell("put", floor.path, self._capacity, size, self._number)
        ended = floor.take()
        began = self._producer.answer()
        self._contents.check(floor.value(size), self._number, "the floor")
        return float(ended - began) / 1e3

    def ours(
        self,
        size: int,
        wait: Callable[[dtorch_ops.TensorPromise, Callable[[], None]], Waited],
        method: str = "set_value",
    ) -> float:
        self._number += 1
        promise = dtorch_ops.TensorPromise()
        tensor, ended = wait(
            promise, lambda: self._producer.tell(method, promise, size, self._number)
        )
        began = self._producer.answer()
        self._contents.check(tensor, self._number, "a promise")
        return float(ended - began) / 1e3

    def _await(self, promise: dtorch_ops.TensorPromise, begin: Callable[[], None]) -> Waited:
        return self._loop.run_until_complete(_await(promise, begin))

    def _call_soon(self) -> float:
        """What wakes a loop from a thread at the least."""
        return self._loop.run_until_complete(
            bench_await.resumed_after(self._helper, bench_await.bare)
        )


# ---- The figures ---------------------------------------------------------------------------------

FLOOR = "floor: memcpy, futex"


def _of_size(name: str, size: int, series: Series) -> list[Figure]:
    def figure(
        what: str, title: str, target: float, baseline: list[float], baseline_title: str
    ) -> Figure:
        return compare(
            f"file.{what}_{key(name)}",
            f"{name}: {title}",
            baseline_title,
            subject=series[what],
            baseline=baseline,
            unit="µs",
            target=Target(target),
        )

    floor = series["floor"]
    figures = [
        figure(
            "wait",
            "set_value -> TensorFuture.wait() goes on",
            1.5 if size <= SMALL else 1.15,
            floor,
            FLOOR,
        )
    ]
    if size <= SMALL:
        title = "set_value -> wait() of the torch future goes on"
        figures.append(figure("torch_wait", title, 2.5, floor, FLOOR))
        least = [2.5 * a + b for a, b in zip(floor, series["call_soon"], strict=True)]
        title = "set_value -> the coroutine goes on"
        figures.append(figure("await", title, 1.0, least, "2.5 floors + call_soon_threadsafe"))
    if LENDS:
        title = "set_value of lent memory -> wait() goes on"
        figures.append(figure("lent", title, 1.2, series["wait_4B"], "4 B: set_value -> wait()"))
    return figures


def _first_use(settings: Settings) -> Figure:
    """Each round has a process of its own, whose memory nobody has touched."""
    name = "1 MiB" if settings.quick else "256 MiB"
    size = SIZES[name]
    series: Series = {"ours": [], "mapped": []}
    for _ in range(min(settings.rounds, 5)):
        with Partner(Producer) as producer:
            consumer = Consumer(producer, size)
            producer.call("ready", size)
            series["mapped"].append(consumer.floor(size))
            series["ours"].append(consumer.ours(size, _wait))
            consumer.close()
    return compare(
        "file.first_use",
        f"{name}, first use: set_value -> wait() goes on",
        "floor, into fresh pages of /dev/shm",
        subject=series["ours"],
        baseline=series["mapped"],
        unit="µs",
        target=Target(0.6),
    )


def run(settings: Settings) -> list[Figure]:
    figures: list[Figure] = []
    with Partner(Producer) as producer:
        consumer = Consumer(producer, max(sizes(settings).values()))
        for name, size in sizes(settings).items():
            count = repeat(size, settings)
            samples = consumer.samples(size)
            rows = {what: in_a_row(sample, count) for what, sample in samples.items()}
            figures += _of_size(name, size, take(rows, settings.rounds))
        consumer.close()
    return [*figures, _first_use(settings)]
