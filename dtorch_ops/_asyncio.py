"""``await`` for every torch future, without polling and without a thread."""

from __future__ import annotations

import asyncio
import warnings
import weakref
from typing import Any

import torch

from . import _C

_queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _C.AwaitQueue] = (
    weakref.WeakKeyDictionary()
)


def _queue_of(loop: asyncio.AbstractEventLoop) -> _C.AwaitQueue:
    queue = _queues.get(loop)
    if queue is None:
        queue = _C.AwaitQueue()
        loop.add_reader(queue.fileno(), queue.drain)  # may raise
        _queues[loop] = queue
    return queue


def watch(
    future: torch._C.Future[Any],
) -> tuple[_C.AwaitWaiter, asyncio.Future[None]] | None:
    """An asyncio future of the running loop that completes when ``future`` does; None if it has.

    The watching ends when the waiter is dropped.
    """
    loop = asyncio.get_running_loop()
    completed: asyncio.Future[None] = loop.create_future()
    waiter = _C.AwaitWaiter(_queue_of(loop), completed)
    return (waiter, completed) if waiter.link(future) else None


def flush() -> None:
    """Set the asyncio futures of the running loop whose torch futures are complete by now."""
    _queue_of(asyncio.get_running_loop()).drain()


def install() -> None:
    """Make every torch future awaitable, unless torch or somebody else has done so."""
    _C.register_queue_of(_queue_of)
    if not hasattr(torch._C.Future, "__await__"):
        _C.add_await(torch._C.Future)


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
