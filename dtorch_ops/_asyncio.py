"""``await`` for every torch future, without polling and without a thread."""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Generator
from typing import Any

import torch

from . import _C

_queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _C.AwaitQueue] = (
    weakref.WeakKeyDictionary()
)


def _queue_of(loop: asyncio.AbstractEventLoop) -> _C.AwaitQueue:
    queue = _queues.get(loop)
    if queue is None:

        def drain() -> None:
            for awaited in queue.take():
                if not awaited.done():
                    awaited.set_result(None)

        queue = _queues[loop] = _C.AwaitQueue(weakref.ref(loop), drain)
    return queue


def watch(
    future: torch._C.Future[Any],
) -> tuple[_C.AwaitWaiter, asyncio.Future[None]] | None:
    """An asyncio future of the running loop that completes when ``future`` does; None if it has.

    The watching ends when the waiter is unlinked or dropped.
    """
    if future.done():
        return None
    loop = asyncio.get_running_loop()
    completed: asyncio.Future[None] = loop.create_future()
    waiter = _C.AwaitWaiter(_queue_of(loop), completed)
    return (waiter, completed) if waiter.link(future) else None


def await_future(self: torch._C.Future[Any]) -> Generator[Any, None, Any]:
    """``__await__`` of a future: its value or its error. Cancelling leaves the future alone."""
    watched = watch(self)
    if watched is not None:
        waiter, completed = watched
        try:
            yield from completed
        finally:
            waiter.unlink()
    return self.wait()


def install() -> None:
    """Make every torch future awaitable, unless torch or somebody else has done so."""
    if not hasattr(torch._C.Future, "__await__"):
        torch._C.Future.__await__ = await_future  # type: ignore[attr-defined]


_warned = False


def before_blocking() -> None:
    """Warn, once, of a ``get()`` that is about to block a running event loop."""
    global _warned
    if _warned or asyncio._get_running_loop() is None:
        return
    _warned = True
    warnings.warn(
        "get() blocks the event loop of this thread until the future is complete: use "
        "'await future' in a coroutine",
        RuntimeWarning,
        stacklevel=2,
    )
