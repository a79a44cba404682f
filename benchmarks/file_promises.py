"""What it costs to let another process fulfil a promise: the token, and waiting for many."""

from __future__ import annotations

import gc
import os
import pickle
import statistics
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing

import dtorch_ops

from .common import Figure, Series, Settings, Target, compare, expect
from .common import measure as take
from .partner import Partner

CHUNK = 1000  # promises that are made and sent at once


# ---- The token -----------------------------------------------------------------------------------


class Unpickler:
    """In the producer's process."""

    def unpickle(self, pickled: list[bytes]) -> float:
        """Microseconds for each."""
        start = time.perf_counter()
        promises = [pickle.loads(each) for each in pickled]
        ended = time.perf_counter()
        expect(all(promise.is_pending() for promise in promises), "unpickled promises")
        return (ended - start) / len(pickled) * 1e6


def _token(settings: Settings) -> list[Figure]:
    count = settings.count(CHUNK, 20)
    text = dtorch_ops.TensorPromise().token()

    def ours(producer: Partner) -> float:
        start = time.perf_counter()
        promises = [dtorch_ops.TensorPromise() for _ in range(count)]
        pickled = [pickle.dumps(promise) for promise in promises]
        ended = time.perf_counter()
        unpickling: float = producer.call("unpickle", pickled)
        return (ended - start) / count * 1e6 + unpickling

    def least() -> float:
        start = time.perf_counter()
        futures: list[object] = [torch.futures.Future() for _ in range(count)]
        pickled = [pickle.dumps((id, (text,))) for _ in futures]
        values = [pickle.loads(each) for each in pickled]
        ended = time.perf_counter()
        expect(values[0] == (id, (text,)), "a text, pickled")
        return (ended - start) / count * 1e6

    with Partner(Unpickler) as producer:
        series = take({"ours": lambda: ours(producer), "least": least}, settings.rounds)
    shared = torch.ones(2).share_memory_()
    handle = len(ForkingPickler.dumps(shared))
    return [
        compare(
            "file.token",
            "a promise: make, pickle, unpickle",
            "a torch future: make; a text as long: pickle, unpickle",
            subject=series["ours"],
            baseline=series["least"],
            unit="µs",
            target=Target(10, "subject"),
        ),
        compare(
            "file.token_size",
            "a promise, pickled",
            "torch.multiprocessing: a shared tensor, pickled",
            subject=[len(pickle.dumps(dtorch_ops.TensorPromise()))],
            baseline=[handle],
            unit="B",
            target=Target(300, "subject"),
        ),
    ]


# ---- Many outstanding ----------------------------------------------------------------------------


def _memory() -> int:
    """Bytes of this process; a page that several processes share counts for a part in each."""
    gc.collect()
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("expected a line 'Pss:' in /proc/self/smaps_rollup, got none")


class _Side:
    """A process that is asked what it uses."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def resources(self) -> tuple[int, int, int]:
        """Bytes, threads, descriptors."""
        return _memory(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def processor_time(self) -> float:
        return time.process_time()


class Owner(_Side):
    """The consumer's process."""

    def __init__(self) -> None:
        super().__init__()
        self._promises: list[dtorch_ops.TensorPromise] = []
        self._futures: list[dtorch_ops.TensorFuture] = []

    def make(self, count: int) -> tuple[float, list[bytes]]:
        """Microseconds to make and to pickle one, and the promises, pickled."""
        began = time.perf_counter()
        promises = [dtorch_ops.TensorPromise() for _ in range(count)]
        futures = [promise.get_future() for promise in promises]
        pickled = [pickle.dumps(promise) for promise in promises]
        cost = (time.perf_counter() - began) / count * 1e6
        self._promises += promises
        self._futures += futures
        return cost, pickled

    def check(self) -> None:
        right = (future.get().item() == i for i, future in enumerate(self._futures))
        expect(all(right), "what many outstanding promises gave")

    def memory_of_torch_futures(self, count: int) -> float:
        """Bytes for each that is pending."""
        before = _memory()
        futures: list[object] = [torch.futures.Future() for _ in range(count)]
        return (_memory() - before) / len(futures)


class Holder(_Side):
    """The producer's process."""

    def __init__(self) -> None:
        super().__init__()
        self._promises: list[dtorch_ops.TensorPromise] = []

    def hold(self, pickled: list[bytes]) -> None:
        self._promises += map(pickle.loads, pickled)

    def fulfil(self) -> None:
        for number, promise in enumerate(self._promises):
            promise.set_value(torch.tensor(number))


class _Pair:
    """Both processes, new ones: in one that has freed memory before, new objects cost nothing."""

    def __init__(self, owner: Partner, holder: Partner) -> None:
        self._owner = owner
        self._holder = holder

    def measure(self, count: int, idle_count: int, seconds: float) -> dict[str, float]:
        """What ``count`` outstanding promises cost, or ``idle_count`` when idle, by name."""
        found: dict[str, float] = {}
        self._grow(1)
        _, found["threads_of_one"], found["descriptors_of_one"] = self._resources()
        found["idle_of_one"] = self._idle(seconds)
        self._grow(idle_count)
        found["idle"] = self._idle(seconds)
        before, _, _ = self._resources()
        costs = self._grow(count)
        after, found["threads"], found["descriptors"] = self._resources()
        found["memory"] = (after - before) / count
        tenth = -(-len(costs) // 10)
        found["first"] = statistics.median(costs[:tenth])
        found["last"] = statistics.median(costs[-tenth:])
        self._holder.call("fulfil")
        self._owner.call("check")
        found["torch_memory"] = self._owner.call("memory_of_torch_futures", count)
        return found

    def _grow(self, count: int) -> list[float]:
        """As many more promises; microseconds to make one, by chunk."""
        costs = []
        for start in range(0, count, CHUNK):
            cost, pickled = self._owner.call("make", min(CHUNK, count - start))
            self._holder.call("hold", pickled)
            costs.append(cost)
        return costs

    def _resources(self) -> tuple[int, ...]:
        """Of both together."""
        both = self._owner.call("resources"), self._holder.call("resources")
        return tuple(map(sum, zip(*both, strict=True)))

    def _idle(self, seconds: float) -> float:
        """Per cent of one core that both together use while nothing happens."""
        before = self._processor_time()
        time.sleep(seconds)
        return 100 * (self._processor_time() - before) / seconds

    def _processor_time(self) -> float:
        both = self._owner.call("processor_time"), self._holder.call("processor_time")
        return float(sum(both))


def _outstanding(settings: Settings) -> list[Figure]:
    count, idle_count = settings.count(100_000, 1_000), settings.count(10_000, 200)
    seconds = 0.2 if settings.quick else 3.0
    found: Series = {}
    for _ in range(min(settings.rounds, settings.count(3, 1))):
        with Partner(Owner) as owner, Partner(Holder) as holder:
            pair = _Pair(owner, holder)
            for name, value in pair.measure(count, idle_count, seconds).items():
                found.setdefault(name, []).append(value)

    def figure(
        name: str, title: str, baseline: str, baseline_title: str, unit: str, target: Target
    ) -> Figure:
        return compare(
            f"file.outstanding_{name}",
            title,
            baseline_title,
            subject=found[name],
            baseline=found[baseline],
            unit=unit,
            target=target,
        )

    many = f"{count:,} outstanding"
    return [
        figure(
            "memory",
            f"each of {many}, both sides together",
            "torch_memory",
            "a pending torch.futures.Future",
            "B",
            Target(1.5 * 1024, "subject"),
        ),
        figure(
            "threads",
            f"{many}: threads of both processes",
            "threads_of_one",
            "with one",
            "threads",
            Target(1.0),
        ),
        figure(
            "descriptors",
            f"{many}: descriptors of both processes",
            "descriptors_of_one",
            "with one",
            "descriptors",
            Target(1.0),
        ),
        figure(
            "last",
            f"{many}: make and pickle one of the last tenth",
            "first",
            "one of the first tenth",
            "µs",
            Target(1.2),
        ),
        figure(
            "idle",
            f"{idle_count:,} outstanding, idle for {seconds:g} s: one core's time",
            "idle_of_one",
            "with one",
            "%",
            Target(1.0, "subject"),
        ),
    ]


def run(settings: Settings) -> list[Figure]:
    return _token(settings) + _outstanding(settings)
