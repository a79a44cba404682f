"""What the library logs of its own doings, under Python's logger ``dtorch_ops``. Off at first.

The native side logs from threads that must not wait for the interpreter: it queues, and a thread
here hands on to :mod:`logging`. It starts when the logger first has a level of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
import warnings
from multiprocessing import util
from typing import Any

from . import _C

NAME = "dtorch_ops"
_OFF = logging.CRITICAL
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_FORMAT = "%(asctime)s %(levelname)s [%(threadName)s] %(name)s: %(message)s"


def _thread_name(native_id: int) -> str:
    for thread in threading.enumerate():
        if thread.native_id == native_id:
            return thread.name
    return f"native {native_id}"


def _emit(level: int, component: str, text: str, when: float, thread: int) -> None:
    logger = logging.getLogger(f"{NAME}.{component}")
    # The level that all share was heeded when this was queued, and may be another one by now.
    if level < logger.level or level <= logger.manager.disable:
        return
    record = logger.makeRecord(logger.name, level, "(native)", 0, text, (), None)
    record.created, record.msecs = when, when % 1 * 1000  # when it happened, not when it was read
    record.thread, record.threadName = thread, _thread_name(thread)
    logger.handle(record)


class _Reader:
    """The thread that reads the queue: one at most, from the first level to the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def follow(self, level: int) -> None:
        """Log from ``level`` on; ``NOTSET`` is nothing. What is queued is still handed on.

        Waits for nobody: whoever sets a level may hold locks of :mod:`logging`.
        """
        on = logging.NOTSET < level < _OFF
        with self._lock:
            _C.queue_log(level if on else _OFF)
            if on and self._thread is None:
                _C.open_log()
                self._thread = threading.Thread(target=self._run, name=f"{NAME}-log", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Log nothing more, once all is handed on."""
        with self._lock:
            _C.queue_log(_OFF)
            ended, self._thread = self._thread, None
        if ended is not None and ended is not threading.current_thread():
            _C.close_log()
            ended.join(10)  # one that hangs shall not keep the program for ever

    def forget(self) -> None:
        """In a forked child, which has no such thread."""
        self._lock, self._thread = threading.Lock(), None

    def _run(self) -> None:
        while messages := _C.next_log_messages():
            for message in messages:
                try:
                    _emit(*message)
                except Exception:  # of a filter: those of handlers are logging's business
                    traceback.print_exc()


class _Followed(logging.Logger):
    """A logger that says so when its level changes: the native side cannot ask."""

    def setLevel(self, level: Any) -> None:
        super().setLevel(level)
        _reader.follow(self.level)


_reader = _Reader()
_logger = logging.getLogger(NAME)


def _stop_at_exit() -> None:
    # Unlike those of atexit these are called in processes that multiprocessing has started, too;
    # and in one process only, so that each needs its own.
    util.Finalize(None, _reader.stop, exitpriority=0)


def _after_fork() -> None:
    _reader.forget()
    _reader.follow(_logger.level)
    _stop_at_exit()


def _read_environment() -> None:
    wanted = os.environ.get("DTORCH_LOG", "")
    if not wanted:
        return
    if wanted.lower() not in _LEVELS:
        warnings.warn(
            f"DTORCH_LOG: expected debug, info, warning or error, got {wanted!r}: nothing is "
            "logged",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    _logger.addHandler(handler)
    _logger.propagate = False  # a handler of the root's would write it again
    _logger.setLevel(_LEVELS[wanted.lower()])


def install() -> None:
    """Follow the logger's level, and what the environment asks for."""
    _logger.__class__ = type("Logger", (_Followed, type(_logger)), {})
    _reader.follow(_logger.level)
    _read_environment()
    os.register_at_fork(after_in_child=_after_fork)
    _stop_at_exit()
    util.register_after_fork(_reader, lambda _: _stop_at_exit())


install()
