"""One controller and more and more workers, which fulfil small promises as fast as they get them.

The machine is the same for all numbers of workers, so completions/s say how much the controller
loses by having more of them, not how much more workers do.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import queue
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import rpc

import dtorch_ops

from . import tcp
from .common import Figure, Series, Settings, Target, compare, expect
from .network_sides import LIMIT, free_port, join
from .partner import CONTEXT, Caller, Partner, obey

#: Numbers of workers. A quick run leaves the large ones out.
WORKERS = (1, 2, 4, 8, 16, 32, 64)
#: Bytes that have to be left for a number of workers to be tried: for each of them, and in all.
MEMORY_OF_WORKER, MEMORY_LEFT = 120 << 20, 2 << 30

#: Promises that go to a worker in one message, and messages that it has outstanding.
BATCH, WINDOW = 16, 2
#: Seconds without a sign after which a worker would be given up: a third of what it is by default,
#: so that there is something to count.
LOST_AFTER = 10.0


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("expected a line 'VmRSS:' in /proc/self/status, got none")


def _memory_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("expected a line 'MemAvailable:' in /proc/meminfo, got none")


def _thread_times() -> dict[int, int]:
    """Nanoseconds on a core, by thread."""
    times = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            text = Path(f"/proc/self/task/{thread}/schedstat").read_text()
            times[int(thread)] = int(text.split()[0])
    return times


def _uses() -> dict[str, int]:
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "memory": _resident(),
    }


# In the controller: the numbers that rpc_sync has brought.
_inbox: queue.SimpleQueue[int] = queue.SimpleQueue()


def _take(tensor: torch.Tensor) -> None:
    _inbox.put(int(tensor.item()))


def _nothing() -> None:
    pass


class Worker:
    """Fulfils promises, each with the number that came with it."""

    def __init__(self, controller: Connection, rank: int, *group: Any) -> None:
        torch.set_num_threads(1)
        self._controller = controller
        self._rank, self._group = rank, group
        self._held: list[dtorch_ops.TensorPromise] = []

    def serve(self) -> None:
        join(f"worker{self._rank}", self._rank, *self._group)
        obey(self._controller, self)

    def fulfil(self, pickled: bytes, first: int) -> None:
        for number, promise in enumerate(pickle.loads(pickled), first):
            promise.set_value(torch.tensor(number))

    def rpc_sync(self, count: int) -> None:
        for number in range(count):
            rpc.rpc_sync("controller", _take, args=(torch.tensor(number),))

    def hold(self, pickled: bytes) -> None:
        self._held = pickle.loads(pickled)
        expect(all(promise.is_pending() for promise in self._held), "promises that are held")

    def leave(self) -> None:
        self._held = []
        rpc.shutdown()


class Controller:
    """Makes the promises, and waits for their values."""

    def __init__(self, workers: list[Connection], *group: Any) -> None:
        torch.set_num_threads(1)
        self._workers = [Caller(worker, LIMIT) for worker in workers]
        self._group = group
        self._number = 0

    def join(self, lost_after: float) -> dict[str, float]:
        """What it costs to have the workers, by name. By then RPC has all its connections."""
        dtorch_ops.network.set_lost_after(lost_after)
        before = _uses()
        began = time.perf_counter()
        join("controller", 0, *self._group)
        found = {"start": time.perf_counter() - began}
        names = [f"worker{rank}" for rank in range(1, len(self._workers) + 1)]
        torch.futures.wait_all([rpc.rpc_async(name, _nothing) for name in names])
        self._joined = _uses()
        return found | {f"rpc_{what}": self._joined[what] - before[what] for what in before}

    def run(self, count: int) -> dict[str, float]:
        """At least ``count`` completions, by all workers alike, and what each costs."""
        messages = -(-count // (BATCH * len(self._workers)))
        self._pump(WINDOW)  # a warm-up
        before = tcp.traffic()
        threads = _thread_times()
        wall, cpu = time.perf_counter(), time.process_time()
        completed = self._pump(messages)
        cpu = time.process_time() - cpu
        wall = time.perf_counter() - wall
        times = {each: spent - threads.get(each, 0) for each, spent in _thread_times().items()}
        done = tcp.traffic().since(before)
        main = times.pop(os.getpid())
        return {
            "rate": completed / wall,
            "cpu": cpu / completed * 1e6,
            "main": main / completed / 1e3,
            "busiest": max(times.values()) / completed / 1e3,
            "bytes": done.bytes / completed,
        }

    def run_rpc(self, count: int) -> dict[str, float]:
        """The same with a call of RPC for each, from each worker one after the other."""
        each = -(-count // len(self._workers))
        wall, cpu = time.perf_counter(), time.process_time()
        for worker in self._workers:
            worker.tell("rpc_sync", each)
        came = sorted(_inbox.get() for _ in range(each * len(self._workers)))
        cpu = time.process_time() - cpu
        wall = time.perf_counter() - wall
        for worker in self._workers:
            worker.answer()
        expect(came[:: len(self._workers)] == list(range(each)), "what rpc_sync gave")
        return {"rpc_rate": len(came) / wall, "rpc_cpu": cpu / len(came) * 1e6}

    def _pump(self, messages: int) -> int:
        """So many for each worker, ``WINDOW`` of them outstanding."""
        outstanding = collections.deque[tuple[Caller, int, list[dtorch_ops.TensorFuture]]]()
        for _ in range(min(WINDOW, messages)):
            outstanding.extend(self._send(worker) for worker in self._workers)
        left = {worker: messages - min(WINDOW, messages) for worker in self._workers}
        completed = 0
        while outstanding:
            worker, first, futures = outstanding.popleft()
            values = [future.get().item() for future in futures]
            expect(values == list(range(first, first + BATCH)), "what workers gave")
            completed += BATCH
            worker.answer()
            if left[worker]:
                left[worker] -= 1
                outstanding.append(self._send(worker))
        return completed

    def _send(self, worker: Caller) -> tuple[Caller, int, list[dtorch_ops.TensorFuture]]:
        promises = [dtorch_ops.TensorPromise(mode="network") for _ in range(BATCH)]
        futures = [promise.get_future() for promise in promises]
        first = self._number
        self._number += BATCH
        worker.tell("fulfil", pickle.dumps(promises), first)
        return worker, first, futures

    def uses(self) -> dict[str, float]:
        """What there is more of than RPC and its connections need, with promises outstanding."""
        self._hold()
        now = _uses()
        return {f"our_{what}": now[what] - self._joined[what] for what in now}

    def _hold(self) -> None:
        """Each worker holds a promise that nobody fulfils."""
        promises = [dtorch_ops.TensorPromise(mode="network") for _ in self._workers]
        self._futures = [promise.get_future() for promise in promises]
        for worker, promise in zip(self._workers, promises, strict=True):
            worker.tell("hold", pickle.dumps([promise]))
        for worker in self._workers:
            worker.answer()

    def idle(self, lost_after: float, signs: int) -> dict[str, float]:
        """What watching over a worker takes, while each gives so many signs that it is there."""
        seconds = signs * lost_after / 4
        before = tcp.traffic()
        cpu = time.process_time()
        time.sleep(seconds)
        cpu = time.process_time() - cpu
        done = tcp.traffic().since(before)
        signs *= len(self._workers)
        expect(not any(future.is_ready() for future in self._futures), "that workers are watched")
        return {
            "idle": 100 * cpu / seconds,
            "watch_cpu": cpu / signs * 1e6,
            "watch_bytes": done.bytes / signs,
            "watch_segments": done.segments / signs,
        }

    def leave(self) -> None:
        for worker in self._workers:
            worker.tell("leave")
        rpc.shutdown()
        for worker in self._workers:
            worker.answer()
            worker.close()


@contextlib.contextmanager
def _group(workers: int, transports: str = "tcp") -> Iterator[Partner]:
    """The controller. Its workers have not joined yet, nor has it."""
    pipes = [CONTEXT.Pipe() for _ in range(workers)]
    group = workers + 1, free_port(), transports
    with contextlib.ExitStack() as stack:
        partners = [
            stack.enter_context(Partner(Worker, far, rank, *group, limit=LIMIT))
            for rank, (_, far) in enumerate(pipes, 1)
        ]
        nears = [near for near, _ in pipes]
        controller = stack.enter_context(Partner(Controller, nears, *group, limit=LIMIT))
        for pipe in pipes:
            for end in pipe:
                end.close()
        for partner in partners:
            partner.tell("serve")
        yield controller
        controller.call("leave")
        for partner in partners:
            partner.answer()


def _measure(workers: int, settings: Settings) -> dict[str, float]:
    lost_after = 4.0 if settings.quick else LOST_AFTER
    count = settings.count(4_000, 64)
    with _group(workers) as controller:
        found: dict[str, float] = controller.call("join", lost_after)
        found |= controller.call("run", count)
        found |= controller.call("run_rpc", count)
        found |= controller.call("uses")
        found |= controller.call("idle", lost_after, settings.count(4, 1))
    with _group(workers, "basic") as controller:
        joined: dict[str, float] = controller.call("join", lost_after)
    found |= {f"basic_{what}": joined[f"rpc_{what}"] for what in ("memory", "descriptors")}
    return {name: value / 1e6 if "memory" in name else value for name, value in found.items()}


#: What is shown, in the order of the table: its name, what it is, its unit, what it may be at most,
#: as a multiple of what it is with one worker.
_SHOWN = (
    ("rate", "completions of promises", "/s", None),
    ("cpu", "the controller's processor time for each", "µs", 1.25),
    ("main", "of its main thread, which makes, sends and takes them", "µs", None),
    ("busiest", "of the thread that is busiest beside it", "µs", None),
    ("bytes", "TCP payload for each, both ways", "B", 1.25),
    ("rpc_rate", "rpc_sync in place of promises", "/s", None),
    ("rpc_cpu", "the controller's processor time for each", "µs", None),
    ("start", "init_rpc", "s", None),
    ("rpc_memory", "memory of the controller that RPC takes", "MB", None),
    ("rpc_descriptors", "descriptors that RPC takes", "descriptors", None),
    ("rpc_threads", "threads that RPC takes", "threads", None),
    ("basic_memory", "memory that RPC takes with one connection for all", "MB", None),
    ("basic_descriptors", "descriptors with one connection for all", "descriptors", None),
    ("our_memory", "memory that promises take in addition", "MB", None),
    ("our_descriptors", "descriptors in addition", "descriptors", None),
    ("our_threads", "threads in addition", "threads", 1.0),
    ("idle", "idle, all watched: the controller's share of a core", "%", None),
    ("watch_cpu", "watching: the controller's processor time for a sign", "µs", None),
    ("watch_bytes", "watching: TCP payload for a sign, both ways", "B", None),
    ("watch_segments", "watching: TCP segments for a sign, both ways", "segments", None),
)


def _of(workers: int) -> str:
    return f"{workers} worker" + "s" * (workers > 1)


def _figures(series: dict[int, Series]) -> list[Figure]:
    """What is of one kind stands together. The first number of workers is the baseline."""
    first = min(series)
    return [
        compare(
            f"scale.{name}_{workers}",
            f"{_of(workers)}: {title}",
            f"{_of(first)}: the same",
            subject=series[workers][name],
            baseline=series[first][name],
            unit=unit,
            target=None if at_most is None else Target(at_most),
        )
        for name, title, unit, at_most in _SHOWN
        for workers in series
    ]


def _has_room(workers: int) -> bool:
    return _memory_available() - MEMORY_LEFT > workers * MEMORY_OF_WORKER


def run(settings: Settings) -> list[Figure]:
    counts = [n for n in WORKERS[: settings.count(len(WORKERS), 2)] if _has_room(n)]
    series: dict[int, Series] = {workers: {} for workers in counts}
    for _ in range(min(settings.rounds, settings.count(3, 1))):
        for workers in counts:
            for name, value in _measure(workers, settings).items():
                series[workers].setdefault(name, []).append(value)
    return _figures(series)
