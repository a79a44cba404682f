"""Worker processes that share jobs, and stand in for each other."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

import dtorch_ops

from .contact import Contact
from .process import WorkerProcess


class WorkersEndedError(Exception):
    """There is no worker to do the job."""


class LostJob(NamedTuple):
    """A job that had to be given to another worker."""

    worker: str
    was_read: bool
    """Whether the worker had the promise, which then broke; otherwise it was still on the way."""


class WorkerPool:
    """Gives each job to the worker that has the fewest, and to another one if that dies."""

    def __init__(self, workers: Sequence[Contact]) -> None:
        self.workers = workers
        self.lost: list[LostJob] = []

    async def predict(self, images: slice, *, kill: bool = False) -> Tensor:
        """The probability of each digit for each of ``images``.

        Args:
            images: which ones.
            kill: end the worker that is the first to have the job in the middle of it.

        Raises:
            WorkersEndedError: no worker is alive.
            Exception: what the network raised.
        """
        while True:
            worker = self._least_loaded()
            try:
                if kill:
                    kill = False
                    return await worker.predict_and_die(images)
                return await worker.predict(images)
            except dtorch_ops.BrokenPromiseError:
                self.lost.append(LostJob(worker.name, was_read=True))
            except concurrent.futures.CancelledError:
                self.lost.append(LostJob(worker.name, was_read=False))

    def _least_loaded(self) -> Contact:
        alive = [worker for worker in self.workers if worker.is_alive()]
        if not alive:
            raise WorkersEndedError("expected a worker that is alive, but all have ended")
        return min(alive, key=lambda worker: worker.load)


@contextlib.asynccontextmanager
async def open_pool(count: int, network: nn.Module, images: Tensor) -> AsyncIterator[WorkerPool]:
    """A pool of ``count`` workers that are ready. ``network`` and ``images`` become shared memory.

    Raises:
        WorkersEndedError: one ended before it was ready.
    """
    async with contextlib.AsyncExitStack() as stack:
        workers = []
        for number in range(1, count + 1):
            workers.append(WorkerProcess(f"worker {number}", network, images))
            stack.callback(workers[-1].close)
        await all_ready(workers)
        yield WorkerPool(workers)


async def all_ready(workers: Sequence[Contact]) -> None:
    """Wait until they are.

    Raises:
        WorkersEndedError: one ended before.
    """
    try:
        await asyncio.gather(*(worker.ready() for worker in workers))
    except (dtorch_ops.BrokenPromiseError, concurrent.futures.CancelledError):
        raise WorkersEndedError("a worker ended before it was ready: see above for why") from None
