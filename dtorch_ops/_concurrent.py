"""A torch future as one of ``concurrent.futures``."""

from __future__ import annotations

import concurrent.futures
import functools
from typing import Any, TypeVar

import torch

from . import _C

T = TypeVar("T")


class _Follower(concurrent.futures.Future[T]):
    """Pending until the torch future is complete, or until it is cancelled itself."""

    def __init__(self) -> None:
        super().__init__()
        # Held by the torch future too, which holds us through it. Whoever takes us out tells those
        # who wait for us, which is allowed once; a callback stays where it is for ever.
        self.held = [self]

    def cancel(self) -> bool:
        cancelled = super().cancel()
        # Executors tell the waiters when they meet the cancelled job. This one may never come.
        if cancelled and _taken(self.held):
            self.set_running_or_notify_cancel()
        return cancelled


def _taken(held: list[_Follower[Any]]) -> _Follower[Any] | None:
    try:
        return held.pop()  # one step, for whichever thread is first
    except IndexError:
        return None


def _follow(held: list[_Follower[Any]], complete: torch._C.Future[Any]) -> None:
    follower = _taken(held)
    if follower is None:
        return
    value = error = None
    try:
        value = complete.value()
    except concurrent.futures.CancelledError:
        follower.cancel()
    except BaseException as raised:
        error = raised.with_traceback(None)  # which is this frame, that holds the follower: a cycle
    if not follower.set_running_or_notify_cancel():
        return
    if error is None:
        follower.set_result(value)
    else:
        follower.set_exception(error)


def as_concurrent(future: _C.FutureBase[Any]) -> concurrent.futures.Future[Any]:
    """What ``dtorch_ops.Future.as_concurrent`` returns."""
    follower: _Follower[Any] = _Follower()
    future.add_done_callback(functools.partial(_follow, follower.held))
    return follower
