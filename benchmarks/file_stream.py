"""Many small tensors, whose tokens were sent ahead, beside what the best peer needs for as many.

From just before the first ``set_value`` in the one process to just after the last wait in the
other; microseconds per tensor. The producer's tensors are made before.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from pathlib import Path

import torch

import dtorch_ops

from . import native
from .common import Figure, Sample, Settings, Target, compare, expect
from .common import measure as take
from .contents import batch
from .file_latency import PAUSE
from .file_peers import STREAM_BATCH, STREAM_SIZE, Measured
from .partner import Partner


@functools.cache
def _library() -> ctypes.CDLL:
    """Takes half a minute to build, the first time."""
    packages = [Path(str(package.__file__)).parent for package in (torch, dtorch_ops)]
    flags = [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{package / 'include'}" for package in packages),
        *(f"-L{package / 'lib'}" for package in packages),
        "-ldtorch_ops",
        "-ltorch_cpu",
        "-lc10",
    ]
    library = native.load("stream.cpp", flags)
    library.StreamMake.argtypes = [ctypes.c_uint64]
    library.StreamMake.restype = ctypes.c_void_p
    library.StreamTokens.argtypes = [ctypes.c_void_p]
    library.StreamTokens.restype = ctypes.c_char_p
    library.StreamTake.argtypes = [ctypes.c_void_p]
    library.StreamTake.restype = ctypes.c_int64
    library.StreamFinish.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.StreamFinish.restype = None
    library.StreamHold.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64]
    library.StreamHold.restype = ctypes.c_void_p
    library.StreamSet.argtypes = [ctypes.c_void_p]
    library.StreamSet.restype = ctypes.c_int64
    library.StreamDrop.argtypes = [ctypes.c_void_p]
    library.StreamDrop.restype = None
    return library


# ---- The process that sets -----------------------------------------------------------------------


class Producer:
    """Its methods return the instant just before the first value was set, in ns."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._tensors = batch(STREAM_BATCH, STREAM_SIZE)
        self._all = torch.cat(self._tensors)

    def set_values(self, promises: list[dtorch_ops.TensorPromise], pause: bool) -> int:
        if pause:
            time.sleep(PAUSE)
        began = time.monotonic_ns()
        for promise, tensor in zip(promises, self._tensors, strict=True):
            promise.set_value(tensor)
        return began

    def set_values_from_cpp(self, tokens: bytes) -> int:
        library = _library()
        holding = library.StreamHold(tokens, self._all.data_ptr(), STREAM_SIZE)
        time.sleep(PAUSE)
        began: int = library.StreamSet(holding)
        library.StreamDrop(holding)
        return began


# ---- The process that waits ----------------------------------------------------------------------


class Consumer:
    """Each sample is one batch, in microseconds per tensor."""

    def __init__(self, producer: Partner) -> None:
        torch.set_num_threads(1)
        self._producer = producer
        self._tensors = batch(STREAM_BATCH, STREAM_SIZE)
        self._all = torch.cat(self._tensors)

    def python(self) -> float:
        """The tokens are there before."""
        return self._python(ahead=True)

    def whole(self) -> float:
        """Making, pickling, sending and unpickling the promises is a part of it."""
        return self._python(ahead=False)

    def _python(self, ahead: bool) -> float:
        made = time.monotonic_ns()
        promises = [dtorch_ops.TensorPromise() for _ in range(STREAM_BATCH)]
        futures = [promise.get_future() for promise in promises]
        self._producer.tell("set_values", promises, ahead)
        tensors = [future.get() for future in futures]
        ended = time.monotonic_ns()
        began = self._producer.answer()
        expect(all(map(torch.equal, tensors, self._tensors)), "a stream")
        return float(ended - (began if ahead else made)) / 1e3 / STREAM_BATCH

    def cpp(self) -> float:
        library = _library()
        waiting = library.StreamMake(STREAM_BATCH)
        self._producer.tell("set_values_from_cpp", library.StreamTokens(waiting))
        ended = library.StreamTake(waiting)
        began = self._producer.answer()
        got = torch.empty_like(self._all)
        library.StreamFinish(waiting, got.data_ptr())
        expect(torch.equal(got, self._all), "a stream from C++")
        return float(ended - began) / 1e3 / STREAM_BATCH


# ---- The figures ---------------------------------------------------------------------------------


def run(settings: Settings, peers: dict[str, Measured]) -> list[Figure]:
    """A quick run leaves C++ out, which would have to be compiled."""
    with Partner(Producer) as producer:
        consumer = Consumer(producer)
        samples: dict[str, Sample] = {"python": consumer.python, "whole": consumer.whole}
        if not settings.quick:
            samples["cpp"] = consumer.cpp
        series = take(samples, settings.rounds, per_round=settings.count(10, 2))

    best = min(peers.values(), key=lambda peer: statistics.median(peer.fetch))
    baseline = [statistics.median(best.fetch)] * settings.rounds
    titles = {
        "python": "tokens sent ahead, from Python",
        "cpp": "tokens sent ahead, from C++",
        "whole": "from making the promise on, from Python",
    }
    targets = {"python": Target(1 / 3), "cpp": Target(0.1)}

    def figure(name: str) -> Figure:
        return compare(
            f"file.stream_{name}",
            f"1 KiB, 256 outstanding: {titles[name]}",
            f"the best peer, {best.title}",
            subject=series[name],
            baseline=baseline,
            unit="µs",
            target=targets.get(name),
        )

    return [figure(name) for name in series]
