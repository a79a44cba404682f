"""Futures in the states that tests want, every way to read one, and threads blocked on one."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers import Worker

import dtorch_ops

#: Seconds after which a test that should long have gone on says that it hangs.
LIMIT = 20


def pending() -> tuple[dtorch_ops.TensorPromise, dtorch_ops.TensorFuture]:
    promise = dtorch_ops.TensorPromise()
    return promise, promise.get_future()


def ready(value: float = 1.0) -> dtorch_ops.TensorFuture:
    promise, future = pending()
    promise.set_value(torch.tensor(value))
    return future


def failed(error: BaseException) -> dtorch_ops.TensorFuture:
    promise, future = pending()
    promise.set_exception(error)
    return future


def stock_failed(error: BaseException) -> torch.futures.Future[Any]:
    """As torch.futures leaves it: the exception is the value."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(error)
    return future


# ---- Reading ------------------------------------------------------------------------------------


async def awaited(future: Any) -> Any:
    return await future


def _in_callback(future: Any) -> Any:
    outcome: list[Any] = []

    def read(f: Any) -> None:
        try:
            outcome.append(f.value())
        except BaseException as error:
            outcome.append(error)
            outcome.append("raised")

    future.add_done_callback(read)
    if len(outcome) == 2:
        raise outcome[0]
    return outcome[0]


#: Every way to read a complete future that consumes nothing.
READ_ONLY: dict[str, Callable[[Any], Any]] = {
    "wait": lambda f: f.wait(),
    "wait_ms": lambda f: f.wait(1000),
    "value": lambda f: f.value(),
    "await": lambda f: asyncio.run(awaited(f)),
    "then": lambda f: f.then(lambda g: g.value()).get(),
    "callback": _in_callback,
    "wait_all": lambda f: dtorch_ops.wait_all([f])[0],
    "collect_all": lambda f: dtorch_ops.collect_all([f]).get()[0].value(),
    "collect_any": lambda f: dtorch_ops.collect_any([f]).get(),
    "as_completed": lambda f: next(iter(dtorch_ops.as_completed([f]))).value(),
    "wait_for_operator": lambda f: torch.ops.dtorch.wait_for(f, 1000),
    "wait_all_operator": lambda f: torch.ops.dtorch.wait_all([f])[0],
    "collect_all_operator": lambda f: torch.ops.dtorch.collect_all([f]).wait()[0].wait(),
    "collect_any_operator": lambda f: torch.ops.dtorch.collect_any([f]).wait(),
    "torch_collect_all": lambda f: torch.futures.collect_all([f]).wait()[0].wait(),
    "torch_wait_all": lambda f: torch.futures.wait_all([f])[0],
    "new_handle": lambda f: dtorch_ops.Future(f).get(),
}

#: Every way to block on a pending future.
WAITS: dict[str, Callable[[Any], Any]] = {
    "get": lambda f: f.get(),
    "wait": lambda f: f.wait(60_000),
    "wait_all": lambda f: dtorch_ops.wait_all([f])[0],
    "as_completed": lambda f: next(dtorch_ops.as_completed([f])).wait(0),
    "await": lambda f: asyncio.run(awaited(f)),
    "collect": lambda f: dtorch_ops.collect_any([f]).get(),
    "then": lambda f: f.then(lambda g: g.value()).get(),
    "operator": lambda f: torch.ops.dtorch.wait_for(f, 60_000),
}


# ---- Threads ------------------------------------------------------------------------------------


def blocked_in(call: Callable[[], object]) -> Worker:
    """A thread that runs ``call``, once it sleeps there.

    A set-up for tests of who is woken when; they hold without it, but show less.
    """
    worker = Worker(call)
    limit = time.monotonic() + LIMIT
    asleep = 0
    while asleep < 3:  # it may have slept for want of the interpreter lock, which it gets here
        assert time.monotonic() < limit, "the thread does not block"
        time.sleep(0.002)
        if not worker.is_alive():
            break
        stat = Path(f"/proc/self/task/{worker.native_id}/stat").read_text()
        asleep = asleep + 1 if stat.rpartition(")")[2].split()[0] == "S" else 0
    return worker


# ---- Memory -------------------------------------------------------------------------------------


# The fields of the C library's struct mallinfo2, all of them size_t.
_MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO.split()]


def _bytes_in_use() -> int:
    """Of the C library's allocator, and, at the least that each can take, of Python's."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd) + 16 * sys.getallocatedblocks()


def assert_memory_stays_flat(step: Callable[[], object], rounds: int) -> None:
    """What a step leaves behind must be less than the smallest thing that could be left.

    What is left by each round is left in every measurement; a table that grows once, or blocks that
    the allocator keeps for a thread, only in one.
    """
    for _ in range(rounds // 10):
        step()
    left = []
    for _ in range(3):
        before = _bytes_in_use()
        for _ in range(rounds):
            step()
        left.append((_bytes_in_use() - before) / rounds)
        if left[-1] < 8:
            return
    text = ", ".join(f"{each:.1f}" for each in left)
    raise AssertionError(f"{text} bytes are left by each round")
