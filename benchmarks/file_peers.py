"""Measures the peers: each in two processes of its own, one after the other.

None of them runs while anything else is measured: some keep a core busy while they wait.
"""

from __future__ import annotations

import functools
import mmap
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .common import Figure, Series, Settings, compare, expect, in_a_row
from .common import measure as take
from .contents import Contents, batch
from .file_latency import FLOOR, PAUSE, Consumer, Producer, key, repeat, sizes
from .partner import CONTEXT, Partner
from .peers import PEERS, Request, installed

#: Seconds in which each step of a peer has to be done: a size, a stream, getting up.
LIMIT = 60

#: Bytes and number of the tensors that are outstanding at a time in a stream.
STREAM_SIZE, STREAM_BATCH = 1024, 256


@dataclass
class Measured:
    """One value for each round."""

    title: str
    floor: Series = field(default_factory=dict)  # µs, by size; without the peer
    latency: Series = field(default_factory=dict)  # µs, by size
    fetch: list[float] = field(default_factory=list)  # µs per tensor, each asked for by itself
    stream: list[float] = field(default_factory=list)  # the same, all asked for in one message


class _Clock:
    """One instant, in ns, that both processes see."""

    def __init__(self, folder: str) -> None:
        path = Path(folder) / "clock"
        if not path.exists():
            path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._instant = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")

    def stamp(self) -> None:
        self._instant[0] = time.monotonic_ns()

    def read(self) -> int:
        return self._instant[0]


class Production:
    """What makes the tensors, in the producer's process. Stamps the clock just before."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self._clock = _Clock(folder)
        self._contents = Contents()
        self._batch = batch(STREAM_BATCH, STREAM_SIZE)

    def __call__(self, request: Request) -> torch.Tensor:
        if not request.pause:
            return self._batch[request.number]
        tensor = self._contents.tensor(request.size, request.number)
        time.sleep(PAUSE)
        self._clock.stamp()
        return tensor


def _serve(kind: str, end: Any, folder: str) -> None:
    warnings.simplefilter("ignore")  # theirs
    PEERS[kind](end).serve(Production(folder))


class _Consumer:
    """In a process of its own, so that one that hangs can be ended."""

    def __init__(self, kind: str, end: Any, folder: str) -> None:
        warnings.simplefilter("ignore")  # theirs
        torch.set_num_threads(1)
        self._clock = _Clock(folder)
        self._contents = Contents()
        self._number = 0
        self._peer = PEERS[kind](end)

    def latency(self, size: int, rounds: int, count: int) -> list[float]:
        return take({"peer": in_a_row(lambda: self._one(size), count)}, rounds)["peer"]

    def _one(self, size: int) -> float:
        self._number += 1
        self._peer.ask([Request(size, self._number, True)])
        tensor = self._peer.take(size)
        ended = time.monotonic_ns()
        self._contents.check(tensor, self._number, type(self._peer).title)
        return (ended - self._clock.read()) / 1e3

    def stream(self, at_once: int, rounds: int, count: int) -> list[float]:
        """``at_once``: how many one message asks for."""
        expected = batch(STREAM_BATCH, STREAM_SIZE)
        row = in_a_row(lambda: self._batch(expected, at_once), count)
        return take({"peer": row}, rounds)["peer"]

    def _batch(self, expected: list[torch.Tensor], at_once: int) -> float:
        requests = [Request(STREAM_SIZE, number, False) for number in range(STREAM_BATCH)]
        began = time.monotonic_ns()
        for start in range(0, STREAM_BATCH, at_once):
            self._peer.ask(requests[start : start + at_once])
        tensors = [self._peer.take(STREAM_SIZE) for _ in requests]
        ended = time.monotonic_ns()
        right = all(map(torch.equal, tensors, expected))
        expect(right, f"a stream from {type(self._peer).title}")
        return (ended - began) / 1e3 / STREAM_BATCH

    def close(self) -> None:
        self._peer.ask([])
        self._peer.close()


def _floors(settings: Settings, rounds: int) -> Series:
    """Of each size, taken as the peer's are: one size after the other."""
    floors: Series = {}
    with Partner(Producer) as producer:
        consumer = Consumer(producer, max(sizes(settings).values()))
        for name, size in sizes(settings).items():
            count = repeat(size, settings)
            row = in_a_row(functools.partial(consumer.floor, size), count)
            floors[name] = take({"floor": row}, rounds)["floor"]
        consumer.close()
    return floors


def _measure(kind: str, settings: Settings) -> Measured:
    rounds = min(settings.rounds, 5)
    measured = Measured(PEERS[kind].title, _floors(settings, rounds))
    with tempfile.TemporaryDirectory(prefix="peer") as folder:
        _Clock(folder)  # makes the file
        near, far = PEERS[kind].ends(folder)
        producer = CONTEXT.Process(target=_serve, args=(kind, far, folder))
        producer.start()
        try:
            with Partner(_Consumer, kind, near, folder, limit=LIMIT) as consumer:
                for name, size in sizes(settings).items():
                    count = repeat(size, settings)
                    measured.latency[name] = consumer.call("latency", size, rounds, count)
                count = settings.count(5, 1)
                measured.fetch = consumer.call("stream", 1, rounds, count)
                measured.stream = consumer.call("stream", STREAM_BATCH, rounds, count)
                consumer.call("close")
            producer.join(5)
        finally:
            producer.kill()
            producer.join()
    return measured


def measure(settings: Settings) -> dict[str, Measured]:
    """What was measured, by name of the peer. A quick run asks the first alone.

    Prints which are not there, or do not work.
    """
    measured: dict[str, Measured] = {}
    for kind, peer in PEERS.items():
        if settings.quick and measured:
            break
        if not installed(peer):
            print(f"{peer.title}: not installed")
            continue
        try:
            measured[kind] = _measure(kind, settings)
        except (RuntimeError, TimeoutError) as error:
            print(f"{peer.title}: {str(error).strip().splitlines()[-1]}")
    return measured


def figures(peers: dict[str, Measured]) -> list[Figure]:
    latency = [
        compare(
            f"file.peer_{kind}_{key(size)}",
            f"{size}: {peer.title}",
            FLOOR,
            subject=peer.latency[size],
            baseline=floor,
            unit="µs",
        )
        for kind, peer in peers.items()
        for size, floor in peer.floor.items()
    ]
    stream = [
        compare(
            f"file.peer_{kind}_stream",
            f"1 KiB, 256 asked for one by one: {peer.title}",
            "asked for in one message",
            subject=peer.fetch,
            baseline=peer.stream,
            unit="µs",
        )
        for kind, peer in peers.items()
    ]
    return latency + stream
