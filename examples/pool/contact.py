"""A worker, as the controller sees it."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

import dtorch_ops

from .worker import Job

# The library breaks the promises that a worker had unpickled within 100 ms of knowing its end.
# What is still pending this long after it was never unpickled.
SETTLED_S = 0.25

Promise = dtorch_ops.TensorPromise | dtorch_ops.VoidPromise


class Contact(ABC):
    """Gives jobs to one worker, wherever it is. Belongs to one event loop.

    Whatever is awaited here ends when the worker does: with
    :class:`~dtorch_ops.BrokenPromiseError` if the worker had unpickled the promise, with
    :class:`concurrent.futures.CancelledError` if not. Only the library knows the former, and only
    the controller the latter: nobody holds a promise that lies unread on the way.
    """

    def __init__(self, name: str, mode: str = "auto") -> None:
        self.name = name
        self._mode = mode
        # Held here while awaited, so that they can be cancelled.
        self._promises: set[Promise] = set()
        self._ready = dtorch_ops.VoidPromise(mode=mode)
        self._has_ended = False
        self._loop = asyncio.get_running_loop()

    @property
    def load(self) -> int:
        """How much it has been asked for that has not come."""
        return len(self._promises)

    def is_alive(self) -> bool:
        return not self._has_ended

    async def ready(self) -> None:
        with self._held(self._ready):
            await self._ready.get_future()

    async def predict(self, images: slice) -> Tensor:
        """The probability of each digit for each of ``images``."""
        answer = dtorch_ops.TensorPromise(mode=self._mode)
        with self._held(answer):
            self._send(Job(images, answer))
            return await answer.get_future()

    async def predict_and_die(self, images: slice) -> Tensor:
        """As predict(), but the worker is ended when it is in the middle of that."""
        answer = dtorch_ops.TensorPromise(mode=self._mode)
        stuck = dtorch_ops.VoidPromise(mode=self._mode)
        with self._held(answer), self._held(stuck):
            self._send(Job(images, answer, stuck))
            await stuck.get_future()
            await self._end()
            return await answer.get_future()

    @abstractmethod
    def _send(self, job: Job) -> None:
        """Does not block, nor fail if the worker has ended."""

    @abstractmethod
    async def _end(self) -> None:
        """End the worker at once, without a word to it."""

    @contextlib.contextmanager
    def _held(self, promise: Promise) -> Iterator[None]:
        self._promises.add(promise)
        try:
            yield
        finally:
            self._promises.discard(promise)

    def _ended(self) -> None:
        """To be called when it is known that the worker has ended."""
        self._has_ended = True
        self._loop.call_later(SETTLED_S, self._cancel_pending)

    def _cancel_pending(self) -> None:
        for promise in tuple(self._promises):
            promise.cancel()
