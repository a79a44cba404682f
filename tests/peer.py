"""A second process (or a thread) that does what a test tells it, for all that crosses a border."""

from __future__ import annotations

import multiprocessing
import multiprocessing.dummy
import os
import signal
from collections.abc import Callable
from typing import Any

import torch

LIMIT = 30


def _answer(connection: Any, function: Callable[..., object], args: tuple[object, ...]) -> None:
    try:
        answer = (True, function(*args))
    except BaseException as error:
        answer = (False, f"{type(error).__name__}: {error}")
    # Nothing of the call may live on: a promise that was passed shall be dropped.
    del function, args
    connection.send(answer)


def _receive(connection: Any) -> Any:
    assert connection.poll(LIMIT), "the peer does not answer"
    done, answer = connection.recv()
    assert done, answer
    return answer


def _answer_forked(connection: Any, *call: Any) -> None:
    # As torch's own workers: the threads of the parent's OpenMP are missing in a forked child.
    torch.set_num_threads(1)
    _answer(connection, *call)


def _serve_forked(connection: Any) -> None:
    torch.set_num_threads(1)
    _serve(connection)


def _serve(connection: Any) -> None:
    while True:
        try:
            call = [connection.recv()]
        except EOFError:
            return
        if call[0] is None:
            return
        _answer(connection, *call.pop())


class Peer:
    """Runs functions in a process of its own, one after the other. Use it in a ``with``.

    Args:
        method: how the process is started: spawn, fork, or forkserver; or "thread", which is none.
            What is passed to a function is pickled, but for a thread.
    """

    def __init__(self, method: str = "spawn") -> None:
        thread = method == "thread"
        context: Any = multiprocessing.dummy if thread else multiprocessing.get_context(method)
        self._connection, theirs = context.Pipe()
        serve = _serve_forked if method == "fork" else _serve
        self.process = context.Process(target=serve, args=(theirs,))
        self.process.daemon = True
        self.process.start()
        if not thread:
            theirs.close()

    def start(self, function: Callable[..., object], *args: object) -> None:
        self._connection.send((function, args))

    def finish(self) -> Any:
        """The result of what was started; AssertionError with the error's text if it failed."""
        return _receive(self._connection)

    def call(self, function: Callable[..., object], *args: object) -> Any:
        self.start(function, *args)
        return self.finish()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(LIMIT)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            # Not by closing alone: a process that was forked later has a copy of this end.
            self._connection.send(None)
        except OSError:
            pass  # it has ended already
        self._connection.close()
        self.process.join(10)
        if isinstance(self.process, multiprocessing.process.BaseProcess) and (
            self.process.is_alive()
        ):
            self.kill()


class Inheritor:
    """As a :class:`Peer`, each function in a forked process of its own: nothing is pickled."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("fork")
        self._started: list[tuple[Any, Any]] = []

    def start(self, function: Callable[..., object], *args: object) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_answer_forked, args=(theirs, function, args), daemon=True
        )
        process.start()
        theirs.close()
        # A process object keeps no arguments once it was started.
        self._started.append((process, ours))

    def finish(self) -> Any:
        process, connection = self._started.pop(0)
        try:
            return _receive(connection)
        finally:
            connection.close()
            process.join(LIMIT)

    def call(self, function: Callable[..., object], *args: object) -> Any:
        self.start(function, *args)
        return self.finish()

    def __enter__(self) -> Inheritor:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._started:
            connection.close()
            process.kill()
            process.join(LIMIT)
