"""Telling of futures that nobody completes."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import traceback
import warnings
import weakref
from typing import Any

import torch

from . import _C

__all__ = ["report_pending"]

_logger = logging.getLogger("dtorch_ops.pending")

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def _place() -> str:
    """The file and line of the call that is being made of us, or of torch for us."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_HERE, _TORCH)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_LONGEST_S = 3600.0  # that the thread sleeps: there are limits


class _Pending:
    """A pending future: its handles, weakly, and where the first was made."""

    __slots__ = ("due", "handles", "place")

    def __init__(self, due: float) -> None:
        self.due = due
        self.handles: set[weakref.ref[Any]] = set()
        self.place = _place()


class _Watch:
    """The futures that may have to be reported, and the thread that looks at them; while it is on.

    Nothing here takes a lock: the last reference to a handle may go anywhere, in the middle of this
    as well, and takes the future out of the table. Each step on a table is one for the interpreter.
    """

    def __init__(self, after_seconds: float) -> None:
        self._after = after_seconds
        self._known: dict[int, _Pending] = {}  # by the future's address
        self._waiting: dict[int, _Pending] = {}  # of these, those not looked at yet; oldest first
        self._news = threading.Event()
        self._on = True
        self._thread = threading.Thread(target=self._run, name="dtorch_ops-pending", daemon=True)
        self._thread.start()

    def made(self, handle: Any, address: int) -> None:
        """Called by the native side for each handle that is made on a pending future."""
        pending = self._known.get(address)
        if pending is None:
            pending = self._known[address] = _Pending(time.monotonic() + self._after)
            self._waiting[address] = pending
            # Not only for the first of them: who is first cannot be told without a lock.
            if not self._news.is_set():
                self._news.set()

        def gone(handle: weakref.ref[Any]) -> None:
            pending.handles.discard(handle)
            if not pending.handles:
                self._known.pop(address, None)
                self._waiting.pop(address, None)

        pending.handles.add(weakref.ref(handle, gone))

    def stop(self) -> None:
        self._on = False
        self._news.set()
        if self._thread is not threading.current_thread():
            self._thread.join(10)

    def _run(self) -> None:
        while self._on:
            try:
                address, pending = next(iter(self._waiting.items()))
            except RuntimeError:  # it has changed in this moment
                continue
            except StopIteration:
                self._news.wait()
                self._news.clear()
                continue
            left = pending.due - time.monotonic()
            if left > 0:
                self._news.wait(min(left, _LONGEST_S))
                self._news.clear()
                continue
            self._waiting.pop(address, None)
            try:
                self._report(pending)
            except Exception:  # of a filter: those of handlers are logging's business
                traceback.print_exc()

    def _report(self, pending: _Pending) -> None:
        for reference in list(pending.handles):
            handle = reference()
            if handle is None or handle.is_ready():
                continue
            _logger.warning(
                "the %s made at %s is still pending after %g s: see that its promise is set, and "
                "that whoever is to set it lives, or wait for it with a time limit",
                type(handle).__name__,
                pending.place,
                self._after,
            )
            return


_watch: _Watch | None = None


def report_pending(after_seconds: float | None) -> None:
    """Log a warning for each future that is pending longer than ``after_seconds``, once.

    It says where in the program the future was made, under Python's logger ``dtorch_ops.pending``,
    which writes to stderr unless :mod:`logging` was told otherwise. Futures are held weakly: one
    that is dropped is not told of. Counts for those that are made from now on, by the functions and
    promises of this package; bare futures of ``torch.ops.dtorch`` are torch's. The environment
    variable ``DTORCH_PENDING_AFTER`` does the same from the start.

    Args:
        after_seconds: more than 0; None tells of none any more, which is so at first.

    Raises:
        TypeError: not a number.
        ValueError: a number that is not above 0.

    Example:
        >>> dtorch_ops.report_pending(after_seconds=30)
        >>> dtorch_ops.report_pending(None)
    """
    global _watch
    if after_seconds is not None:
        after_seconds = _checked(after_seconds)
    if _watch is not None:
        _C.set_pending_watcher(None)
        _watch.stop()
        _watch = None
    if after_seconds is not None:
        _watch = _Watch(after_seconds)
        _C.set_pending_watcher(_watch.made)


def _checked(after_seconds: float) -> float:
    if isinstance(after_seconds, bool) or not isinstance(after_seconds, (int, float)):
        raise TypeError(
            "after_seconds: expected a number of seconds or None, got "
            f"{type(after_seconds).__name__}"
        )
    if not 0 < after_seconds < math.inf:
        raise ValueError(f"after_seconds: expected a number above 0, got {after_seconds}")
    return float(after_seconds)


def _read_environment() -> None:
    wanted = os.environ.get("DTORCH_PENDING_AFTER", "")
    if not wanted:
        return
    try:
        report_pending(float(wanted))
    except ValueError:
        warnings.warn(
            f"DTORCH_PENDING_AFTER: expected a number of seconds above 0, got {wanted!r}: nothing "
            "is reported",
            RuntimeWarning,
            stacklevel=2,
        )


def _after_fork() -> None:
    # The thread is the parent's, and so are the futures.
    global _watch
    if _watch is not None:
        after_seconds, _watch = _watch._after, None
        report_pending(after_seconds)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(report_pending, None)
_read_environment()
