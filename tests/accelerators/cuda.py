"""CUDA, under the names of this package.

A stream is held by a wait of its own for a word of pinned memory (``cuStreamWaitValue32``), which
the host writes to release it: no kernel runs meanwhile, and no thread. What CUDA does behind the
scenes may wait for such a stream for ever, so :func:`hold` has it done before: kernels are loaded
when they are first used, and the first memory and streams are made. Streams share the hardware's
queues, so that a held one may hold up another: ``CUDA_DEVICE_MAX_CONNECTIONS=32`` gives as many as
there are, and no test here holds more streams than that while it wants others to go on.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import torch

from . import NAMES

__all__ = list(NAMES)

StreamLike: TypeAlias = "torch.Stream | torch.device | str"

# Asked once, by the first process, for all that it starts: it may take the driver, which would be
# in the way of forks.
_COUNT = "TEST_CUDA_DEVICES"
os.environ.setdefault(_COUNT, str(torch.cuda.device_count()))


def device_count() -> int:
    return int(os.environ[_COUNT])


DEVICE = "cuda"
DEVICES = [f"cuda:{index}" for index in range(max(1, device_count()))]
PATIENCE = 4  # a process that uses CUDA takes seconds to start and to end

_POOL = 32  # streams of each priority
_GATES = 1 << 16
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def install() -> None:
    """Nothing: torch has it."""


def prepare() -> None:
    """Nothing: it is there."""


# ---- Streams ------------------------------------------------------------------------------------


class _Gates:
    """Words of pinned memory, each of which a stream waits for; and who waits for which."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.wait_value = getattr(
            self.driver, "cuStreamWaitValue32_v2", self.driver.cuStreamWaitValue32
        )
        self.wait_value.argtypes = (
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_uint32,
            ctypes.c_uint,
        )
        self.words = torch.zeros(_GATES, dtype=torch.int32).pin_memory()
        self.numbers = itertools.count()
        self.closed: dict[tuple[int, int], collections.deque[int]] = {}

    def close(self, stream: torch.cuda.Stream) -> None:
        number = next(self.numbers)
        address = self.words.data_ptr() + 4 * number
        with torch.cuda.device(stream.device):
            error = self.wait_value(stream.cuda_stream, address, 1, 0)  # until the word is >= 1
        if error:
            raise RuntimeError(f"cuStreamWaitValue32 failed with error {error} of the driver")
        key = (stream.device_index, stream.stream_id)
        self.closed.setdefault(key, collections.deque()).append(number)

    def open_first(self, stream: torch.cuda.Stream) -> bool:
        closed = self.closed.get((stream.device_index, stream.stream_id))
        if not closed:
            return False
        self.words[closed.popleft()] = 1
        return True


_gates: _Gates | None = None
_ready: set[int] = set()  # the devices on which a stream may be held


def _of_cuda(stream: StreamLike) -> torch.cuda.Stream:
    if not isinstance(stream, torch.Stream):
        return torch.cuda.default_stream(stream)
    return torch.cuda.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def _make_ready(device: torch.device) -> None:
    """Use all once that the tests use while a stream is held."""
    global _gates
    with torch.cuda.device(device):
        _gates = _gates or _Gates()
        for priority in range(-5, 1):
            torch.cuda.Stream(priority=priority)
        for size in (3, 1000, 5000, 1_000_000):
            for dtype in (torch.float32, torch.int64):
                value = torch.full((size,), 3, dtype=dtype, device=device)
                value = torch.zeros_like(value).fill_(2).add_(1).mul(2) + value.clone()
                value[::2].clone()
                pinned = torch.empty(size, dtype=dtype, pin_memory=True)
                pinned.copy_(value, non_blocking=True)
                value.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
    _ready.add(device.index)


def hold(stream: StreamLike) -> None:
    own = _of_cuda(stream)
    if own.device_index not in _ready:
        _make_ready(own.device)
    assert _gates is not None
    _gates.close(own)


def release(stream: StreamLike) -> None:
    # A child that ends within a block where its parent holds something has nothing to release.
    if _gates is not None and _gates.owner == os.getpid():
        while _gates.open_first(_of_cuda(stream)):
            pass


@contextlib.contextmanager
def held(*streams: StreamLike) -> Iterator[None]:
    for stream in streams:
        hold(stream)
    try:
        yield
    finally:
        for stream in streams:
            release(stream)


def do_work(stream: StreamLike) -> None:
    """Nothing: a stream cannot be stopped between its kernel and the event behind that."""


def reach_event(stream: StreamLike) -> None:
    assert _gates is not None and _gates.open_first(_of_cuda(stream))


def run_all(stream: StreamLike) -> None:
    """It goes on; nothing tells how far it can."""
    release(stream)


def keep_busy(milliseconds: float) -> None:
    # Cycles of a clock that is between 1 and 2 GHz.
    torch.cuda._sleep(int(milliseconds * 1_500_000))


def drain(stream: StreamLike, timeout: float = 10) -> None:
    own = _of_cuda(stream)
    limit = time.monotonic() + timeout
    while not own.query():
        if time.monotonic() > limit:
            raise TimeoutError(f"{stream} still has something to do")
        time.sleep(0.0005)


def assert_queue(stream: StreamLike, *kinds: object) -> None:
    """That there is something to do, or that there is nothing: CUDA tells no more."""
    assert _of_cuda(stream).query() == (not kinds)


def all_streams(*indices: int) -> list[torch.Stream]:
    found: dict[tuple[int, int], torch.Stream] = {}
    for index in indices:
        for priority in range(-5, 1):  # those that there are not are the same as the last that is
            for _ in range(_POOL):
                stream = torch.cuda.Stream(index, priority=priority)
                found[index, stream.stream_id] = stream
    return list(found.values())


class Capture:
    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()

    def assert_replay(self, tensor: torch.Tensor, values: list[float]) -> None:
        self.graph.replay()
        assert tensor.tolist() == values


@contextlib.contextmanager
def capturing(mode: str) -> Iterator[Capture]:
    capture = Capture()
    # Not torch.cuda.graph, which waits for the device.
    with torch.cuda.stream(torch.cuda.Stream()):
        capture.graph.capture_begin(capture_error_mode=mode)
        try:
            yield capture
        finally:
            capture.graph.capture_end()  # raises if something has spoiled it


# ---- What has happened --------------------------------------------------------------------------


def until_waiting(count: int = 1, timeout: float = 10) -> None:
    limit = time.monotonic() + timeout
    while _sleeping_threads() < count:
        if time.monotonic() > limit:
            raise TimeoutError(f"{_sleeping_threads()} threads wait, expected {count}")
        time.sleep(0.002)


def _sleeping_threads() -> int:
    """Those of the library: what they wait for cannot be asked."""
    sleeping = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has just ended
        sleeping += name == "dtorch_ops" and rest.split()[0] == "S"
    return sleeping


@contextlib.contextmanager
def nobody_synchronises() -> Iterator[None]:
    """Any call of torch's that does raises, in any thread."""
    if 0 not in _ready:
        _make_ready(torch.device(DEVICES[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def live_blocks() -> int:
    return int(torch.cuda.memory_stats(0).get("allocation.all.current", 0))


def limit_memory(size: int) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(size / total, 0)


def is_initialized() -> bool:
    """Also if somebody has called the driver behind torch's back."""
    context = ctypes.c_void_p()
    error = ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
    return bool(error != _NOT_INITIALIZED)


def is_untouched() -> bool:
    return not is_initialized()


def has_context(index: int) -> bool:
    return bool(torch._C._cuda_hasPrimaryContext(index))
