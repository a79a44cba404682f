"""Several futures at once."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch._C import Future as TorchFuture

from . import _C, _asyncio
from ._compile import breaks_graph
from .future import Future

__all__ = ["as_completed", "collect_all", "collect_any", "wait_all"]

T = TypeVar("T")
F = TypeVar("F", bound="TorchFuture[Any]")


@breaks_graph
def collect_all(futures: Iterable[F]) -> Future[list[F]]:
    """A future of the list of ``futures``, complete when all are.

    The first error of any member completes it with that error at once, while the rest still run.
    The list holds the very objects that were passed. Of nothing: complete, and empty. No member is
    consumed.

    Raises:
        TypeError: a member is no torch future.

    Example:
        >>> fs = [dtorch_ops.to_torch_async(torch.ones(2)) for _ in range(3)]
        >>> len(dtorch_ops.collect_all(fs).get())
        3
    """
    return _C.collect_all(futures)


@breaks_graph
def collect_any(futures: Iterable[TorchFuture[T]]) -> Future[T]:
    """A future of the value, or the error, of whichever of ``futures`` completes first.

    Of those that are complete already, the first in the list.

    Raises:
        TypeError: a member is no torch future.
        ValueError: no future, of which none can ever complete.

    Example:
        >>> promise = dtorch_ops.TensorPromise()
        >>> ready = dtorch_ops.to_torch_async(torch.ones(2))
        >>> dtorch_ops.collect_any([promise.get_future(), ready]).get()
        tensor([1., 1.])
    """
    return _C.collect_any(futures)


@breaks_graph
def wait_all(futures: Iterable[TorchFuture[T]], timeout_ms: float | None = None) -> list[T]:
    """Block until all ``futures`` are complete, and return their values in the order given.

    Raises the first error at once, while the rest still run. Consumes nothing. Ctrl-C ends the
    wait.

    Args:
        futures: torch futures of any origin.
        timeout_ms: milliseconds on the monotonic clock for all together; None is no limit.

    Raises:
        TimeoutError: some are pending when the time is over; they can be waited for again.
        TypeError: a member is no torch future.
        ValueError: a negative time.

    Example:
        >>> dtorch_ops.wait_all([dtorch_ops.to_torch_async(torch.ones(2))], timeout_ms=1000)
        [tensor([1., 1.])]
    """
    return _C.wait_all(futures, timeout_ms)


class as_completed(Generic[F]):
    """Iterate over ``futures`` in the order in which they complete; ``async for`` works too.

    Gives the objects that were passed. Stopping early leaves nothing on the pending ones.

    Args:
        futures: torch futures of any origin.
        timeout_ms: milliseconds on the monotonic clock from now on for all together; when they
            are over the iteration raises TimeoutError. None is no limit.

    Raises:
        TypeError: a member is no torch future.
        ValueError: a negative time.

    Example:
        >>> fs = [dtorch_ops.to_torch_async(torch.full((1,), float(i))) for i in range(2)]
        >>> for f in dtorch_ops.as_completed(fs):
        ...     print(f.get())
        tensor([0.])
        tensor([1.])
    """

    def __init__(self, futures: Iterable[F], timeout_ms: float | None = None) -> None:
        self._futures = list(futures)
        self._queue = _C.CompletionQueue(self._futures, timeout_ms)
        self._watch: _Watch[F] | None = None

    def __iter__(self) -> Iterator[F]:
        return self

    def __next__(self) -> F:
        index = self._queue.pop()
        if index is None:
            raise StopIteration
        return self._futures[index]

    def __aiter__(self) -> AsyncIterator[F]:
        return self

    async def __anext__(self) -> F:
        if self._watch is None:
            self._watch = _Watch(self._futures)
        return await self._watch.next(self._queue.seconds_left())


class _Watch(Generic[F]):
    """Completions of a group, as one event loop sees them."""

    def __init__(self, futures: list[F]) -> None:
        self._size = self._remaining = len(futures)
        self._done: asyncio.Queue[F] = asyncio.Queue()
        self._waiters = []  # the watching ends when they are dropped
        for future in futures:
            watched = _asyncio.watch(future)
            if watched is None:
                self._done.put_nowait(future)
                continue
            waiter, completed = watched
            self._waiters.append(waiter)
            # Held weakly: the collector cannot see through the waiter.
            completed.add_done_callback(functools.partial(_Watch._put, weakref.ref(self), future))

    @staticmethod
    def _put(weak_self: weakref.ref[_Watch[F]], future: F, _: object) -> None:
        self = weak_self()
        if self is not None:
            self._done.put_nowait(future)

    async def next(self, seconds: float | None) -> F:
        if self._remaining == 0:
            raise StopAsyncIteration
        self._remaining -= 1  # before the wait: other tasks may share the iteration
        try:
            if self._done.empty() and seconds is not None:
                # What has completed since the loop last looked.
                _asyncio.flush()
                await asyncio.sleep(0)
            if not self._done.empty():
                return self._done.get_nowait()
            return await asyncio.wait_for(self._done.get(), seconds)
        except BaseException as error:
            self._remaining += 1
            if not isinstance(error, asyncio.TimeoutError):
                raise
            raise TimeoutError(
                f"{self._remaining} of {self._size} futures did not complete within the time "
                "limit; they can be waited for again"
            ) from None
