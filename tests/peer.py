"""A second process that does what a test tells it, for all that crosses a process boundary."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

LIMIT = 60


def _serve(connection: Any) -> None:
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except BaseException as error:
            answer = (False, f"{type(error).__name__}: {error}")
        # Nothing of the call may live on: a promise that was passed shall be dropped.
        del function, args
        connection.send(answer)
        del answer


class Peer:
    """Runs functions in a process of its own, one after the other. Use it in a ``with``."""

    def __init__(self, method: str = "spawn") -> None:
        context: Any = multiprocessing.get_context(method)
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, function: Callable[..., object], *args: object) -> None:
        self._connection.send((function, args))

    def finish(self) -> Any:
        """The result of what was started; AssertionError with the error's text if it failed."""
        assert self._connection.poll(LIMIT), "the peer does not answer"
        done, answer = self._connection.recv()
        assert done, answer
        return answer

    def call(self, function: Callable[..., object], *args: object) -> Any:
        self.start(function, *args)
        return self.finish()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(LIMIT)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self.process.join(10)
        if self.process.is_alive():
            self.kill()
