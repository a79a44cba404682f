"""A worker process, as the controller sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from multiprocessing.context import SpawnContext

from torch import Tensor, nn

import dtorch_ops

from .worker import Job, work

# The library breaks a promise within 100 ms of the death of the process that had unpickled it.
# What is still pending this long after the death was never unpickled.
SETTLED_S = 0.25
PATIENCE_S = 10

Promise = dtorch_ops.TensorPromise | dtorch_ops.VoidPromise


class WorkerProcess:
    """Starts a process with an inbox of its own, and gives it jobs. Belongs to one event loop.

    Whatever is awaited here ends when the process does: with
    :class:`~dtorch_ops.BrokenPromiseError` if the process had unpickled the promise, with
    :class:`concurrent.futures.CancelledError` if not. Only the library knows the former, and only
    the controller the latter: nobody holds a promise that lies unread in a pipe.
    """

    def __init__(self, name: str, network: nn.Module, images: Tensor) -> None:
        context = SpawnContext()
        inbox, self._outbox = context.Pipe(duplex=False)
        # Held here while awaited, so that they can be cancelled.
        self._promises: set[Promise] = set()
        self._ready = dtorch_ops.VoidPromise()
        # Daemonic: ended with the controller, whatever way that takes out of this program.
        self.process = context.Process(
            target=work, args=(inbox, network, images, self._ready), name=name, daemon=True
        )
        self.process.start()
        inbox.close()  # the process has the only one, and ours is the only other end
        self._has_ended = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.process.sentinel, self._ended)

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def load(self) -> int:
        """How much it has been asked for that has not come."""
        return len(self._promises)

    def is_alive(self) -> bool:
        # The loop may not have been told yet, when the library has been, and the reverse.
        return not self._has_ended and self.process.is_alive()

    async def ready(self) -> None:
        with self._held(self._ready):
            await self._ready.get_future()

    async def predict(self, images: slice) -> Tensor:
        """The probability of each digit for each of ``images``."""
        answer = dtorch_ops.TensorPromise()
        with self._held(answer):
            self._send(Job(images, answer))
            return await answer.get_future()

    async def predict_and_die(self, images: slice) -> Tensor:
        """As predict(), but the process is killed when it is in the middle of that."""
        answer, stuck = dtorch_ops.TensorPromise(), dtorch_ops.VoidPromise()
        with self._held(answer), self._held(stuck):
            self._send(Job(images, answer, stuck))
            await stuck.get_future()
            self.process.kill()
            return await answer.get_future()

    def close(self) -> None:
        """End the process. Blocks until it has ended."""
        self._loop.remove_reader(self.process.sentinel)
        self._outbox.close()
        self.process.join(PATIENCE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()

    @contextlib.contextmanager
    def _held(self, promise: Promise) -> Iterator[None]:
        self._promises.add(promise)
        try:
            yield
        finally:
            self._promises.discard(promise)

    def _send(self, job: Job) -> None:
        # A process that has just ended takes nothing. Its promises are cancelled soon.
        with contextlib.suppress(BrokenPipeError):
            self._outbox.send(job)

    def _ended(self) -> None:
        self._has_ended = True
        self._loop.remove_reader(self.process.sentinel)
        self._loop.call_later(SETTLED_S, self._cancel_pending)

    def _cancel_pending(self) -> None:
        for promise in tuple(self._promises):
            promise.cancel()
