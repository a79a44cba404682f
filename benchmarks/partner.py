"""The other process of a benchmark: it does what it is told, and is ended when it overstays."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

#: New processes are forked from one that has imported torch and done nothing else, so each starts
#: at once, with no memory of another that ran before. They import dtorch_ops themselves, as any
#: program does: RPC starts threads, and what was loaded before a fork cannot know whose they are.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch"])


class Caller:
    """Has an object on the other side of a connection, which is obeyed there, do something.

    Args:
        limit: seconds that one call may take.
    """

    def __init__(self, connection: Connection, limit: float = 60) -> None:
        self._connection = connection
        self._limit = limit

    def tell(self, method: str, *args: Any) -> None:
        """Starts a call, and returns at once."""
        self._connection.send((method, args))

    def answer(self) -> Any:
        """What the call gave. TimeoutError if it takes too long, RuntimeError if it failed."""
        if not self._connection.poll(self._limit):
            raise TimeoutError(f"no answer within {self._limit:g} s")
        error, result = self._connection.recv()
        if error is not None:
            raise RuntimeError(error)
        return result

    def call(self, method: str, *args: Any) -> Any:
        self.tell(method, *args)
        return self.answer()

    def close(self) -> None:
        """Whoever obeys on the other side ends when it has nothing left to read."""
        self._connection.close()


class Partner(Caller):
    """A process with one object, whose methods are called from here. Use it in a ``with``.

    Args:
        make: makes the object, there. What it takes is sent there as ``args``.
        limit: seconds that one call may take. After that the process is killed.
    """

    def __init__(self, make: Callable[..., Any], *args: Any, limit: float = 60) -> None:
        connection, theirs = CONTEXT.Pipe()
        super().__init__(connection, limit)
        self._process = CONTEXT.Process(target=_serve, args=(theirs, make, args))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def answer(self) -> Any:
        try:
            return super().answer()
        except TimeoutError:
            self._process.kill()
            raise
        except EOFError:
            self._process.join(self._limit)
            raise RuntimeError(f"it ended with code {self._process.exitcode}") from None

    def __enter__(self) -> Partner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
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
    obey(connection, thing)


def obey(connection: Connection, thing: Any) -> None:
    """Does with ``thing`` what a :class:`Caller` on the other side says, until that has gone."""
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
