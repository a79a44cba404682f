"""The other process of a benchmark: it does what it is told, and is ended when it overstays."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

#: New processes are forked from one that has imported torch and done nothing else, so each starts
#: at once, with no memory of another that ran before.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "dtorch_ops"])


class Partner:
    """A process with one object, whose methods are called from here. Use it in a ``with``.

    Args:
        make: makes the object, there. What it takes is sent there as ``args``.
        limit: seconds that one call may take. After that the process is killed.
    """

    def __init__(self, make: Callable[..., Any], *args: Any, limit: float = 60) -> None:
        self._limit = limit
        self._connection, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(theirs, make, args))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, method: str, *args: Any) -> None:
        """Starts a call, and returns at once."""
        self._connection.send((method, args))

    def answer(self) -> Any:
        """What the call gave. TimeoutError if it takes too long, RuntimeError if it failed."""
        if not self._connection.poll(self._limit):
            self._process.kill()
            raise TimeoutError(f"no answer within {self._limit:g} s")
        try:
            error, result = self._connection.recv()
        except EOFError:
            self._process.join(self._limit)
            raise RuntimeError(f"it ended with code {self._process.exitcode}") from None
        if error is not None:
            raise RuntimeError(error)
        return result

    def call(self, method: str, *args: Any) -> Any:
        self.tell(method, *args)
        return self.answer()

    def __enter__(self) -> Partner:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()  # it ends when it has nothing left to read
        self._process.join(self._limit)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(connection: Connection, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        thing = make(*args)
    except Exception:
        connection.send((traceback.format_exc(), None))
        return
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            reply: tuple[str | None, Any] = (None, getattr(thing, method)(*args))
        except Exception:
            reply = (traceback.format_exc(), None)
        del args  # a promise that was passed is dropped before the answer
        try:
            connection.send(reply)
        except BrokenPipeError:
            return  # nobody waits for it any more
        del reply
