"""The futures of others, as ours: completed by a callback, without a thread and without polling.

A promise completes ours. Only the callback holds it, and only the other future holds the callback:
so it lives as long as anybody can complete that one, and no longer. If all who could let it go, the
promise breaks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, overload

import torch
from torch import Tensor
from torch._C import Future as TorchFuture
from torch.utils import _pytree

from . import _ops
from ._compile import breaks_graph
from .errors import DTorchError
from .future import Future, TensorFuture, VoidFuture
from .promise import TensorPromise, VoidPromise

if TYPE_CHECKING:
    from torch.distributed import Work

__all__ = ["from_future"]

F = TypeVar("F", bound=Future[Any])


class _ObjectRef(Protocol):
    """A ``ray.ObjectRef``, to a type checker."""

    def future(self) -> concurrent.futures.Future[Any]: ...


Source: TypeAlias = (
    "concurrent.futures.Future[Any] | asyncio.Future[Any] | TorchFuture[Any] | Work | _ObjectRef"
)


@overload
def from_future(source: F, kind: None = None) -> F: ...  # type: ignore[overload-overlap]
@overload
def from_future(source: Work, kind: None = None) -> VoidFuture: ...  # type: ignore[overload-overlap]
@overload
def from_future(source: Source, kind: None = None) -> TensorFuture: ...
@overload
def from_future(source: Source, kind: type[F]) -> F: ...
@breaks_graph
def from_future(source: Any, kind: Any = None) -> Any:
    """A future of ours with the outcome of another engine's; returns at once.

    It is completed by a callback, in the thread that completes ``source``, or before this returns
    if ``source`` is done. No thread waits, and nothing polls. May be called from any thread: that
    of an asyncio future's loop learns of it at its next turn.

    An error arrives with its type. Where ``source`` is cancelled, ours fails with
    :class:`concurrent.futures.CancelledError`; where all who could complete it are gone, with
    :class:`BrokenPromiseError`. Ours does not hold ``source``.

    Args:
        source: a :class:`concurrent.futures.Future`, an :mod:`asyncio` future or task, a
            ``ray.ObjectRef``, a :class:`torch.distributed.Work`, or a torch future of any origin.
        kind: what is to come of it. :class:`TensorFuture`, which is the default, takes a tensor, or
            the only tensor of a Work; with a tensor of an accelerator it completes when that has
            been computed. :class:`VoidFuture`, the default for a Work, is of completion alone: a
            value is dropped, and its tensors waited for in the same way. :class:`Future` takes
            whatever comes as it is, and waits for no accelerator; an exception as a value counts as
            raised. By default a future of ours keeps its class, and the result is another handle on
            it.

    Returns:
        A future of that class. The value is the very object that ``source`` has; one that ``kind``
        does not take is a TypeError there.

    Raises:
        TypeError: a source or a kind of another type.
        NotImplementedError: a Work without a future, as gloo's of ``isend``, ``irecv`` and
            ``reduce_scatter_tensor``.
        DTorchError: a pending asyncio future of a loop that is closed.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> with ThreadPoolExecutor() as pool:
        ...     dtorch_ops.from_future(pool.submit(torch.ones, 2)).get()
        tensor([1., 1.])
    """
    is_work = _is_work(source)
    if is_work:
        source, kind = _future_of(source), kind or VoidFuture
    elif _is_object_ref(source):
        source = source.future()
    if isinstance(source, Future) and kind in (None, type(source)):
        return type(source)(source)

    # They stay here: a forked child that completes its copy of the source fulfils nothing.
    if kind is None or kind is TensorFuture:
        promise: Any = TensorPromise(mode="memory")
        future = promise.get_future()
        callback = functools.partial(_fulfil, promise, _set_only_tensor if is_work else _set_tensor)
    elif kind is VoidFuture:
        promise = VoidPromise(mode="memory")
        future = promise.get_future()
        callback = functools.partial(_fulfil, promise, _set_void)
    elif kind is Future:
        promise = VoidPromise(mode="memory")
        parcel = _Parcel()
        future = promise.get_future().then(parcel.take)
        callback = functools.partial(_fulfil, promise, parcel.send)
    else:
        raise TypeError(
            "kind: expected dtorch_ops.TensorFuture, VoidFuture, or Future for a value of any "
            f"type, a tree of tensors included; got {getattr(kind, '__name__', repr(kind))}"
        )
    _watch(source, callback)
    return future


# ---- Sources ------------------------------------------------------------------------------------


def _is_work(source: object) -> bool:
    return torch.distributed.is_available() and isinstance(source, torch.distributed.Work)


def _future_of(work: Work) -> TorchFuture[Any]:
    try:
        return work.get_future()
    except RuntimeError as error:
        raise NotImplementedError(
            "source: expected a torch.distributed.Work with a future, got one without, as gloo "
            "makes for isend, irecv and reduce_scatter_tensor: have a thread wait for it: "
            "from_future(executor.submit(work.wait), dtorch_ops.VoidFuture)"
        ) from error


def _is_object_ref(source: object) -> bool:
    # Who has none has not imported Ray, and neither do we.
    cls = getattr(sys.modules.get("ray"), "ObjectRef", None)
    return isinstance(cls, type) and isinstance(source, cls)


def _watch(source: Any, callback: Callable[[Any], None]) -> None:
    """Have ``source`` call ``callback`` with itself, or another future like it, when it is done."""
    if isinstance(source, concurrent.futures.Future):
        source.add_done_callback(callback)
    elif isinstance(source, TorchFuture):
        Future(source).add_done_callback(callback)
    elif asyncio.isfuture(source):
        _watch_asyncio(source, callback)
    else:
        raise TypeError(
            "source: expected a concurrent.futures.Future, an asyncio future or task, a "
            "ray.ObjectRef, a torch.distributed.Work or a torch future, got "
            f"{type(source).__name__}: make a task of a coroutine; for another engine make a "
            "dtorch_ops.TensorPromise, and set it in the callback that the engine has for that"
        )


def _watch_asyncio(
    source: asyncio.Future[Any], callback: Callable[[asyncio.Future[Any]], None]
) -> None:
    loop = source.get_loop()
    if source.done():
        callback(source)
    elif asyncio._get_running_loop() is loop:
        source.add_done_callback(callback)
    else:  # it belongs to the thread that runs the loop, or will
        try:
            loop.call_soon_threadsafe(source.add_done_callback, callback)
        except RuntimeError:
            raise DTorchError(
                "source: expected a future of a loop that is open, got a pending one of a closed "
                "loop: nobody completes it"
            ) from None


def _fulfil(promise: Any, set_value: Callable[[Any, Any], None], source: Any) -> None:
    """Give ``promise`` the outcome of ``source``, which is done."""
    error, value = _outcome(source)
    if isinstance(error, (asyncio.CancelledError, concurrent.futures.CancelledError)):
        # Nobody has cancelled our promise, which that would say.
        promise.set_exception(
            concurrent.futures.CancelledError("the future given to from_future was cancelled")
        )
    elif error is not None:
        promise.set_exception(error)
    else:
        try:
            set_value(promise, value)
        except Exception as refusal:
            if promise.is_pending():
                promise.set_exception(refusal)


def _outcome(source: Any) -> tuple[BaseException | None, Any]:
    if isinstance(source, TorchFuture):
        try:
            return None, source.value()
        except BaseException as error:
            return error, None
    # Without raising the error, which others have too: that would add to its traceback.
    if source.cancelled():
        return concurrent.futures.CancelledError(), None
    failure = source.exception()
    return (failure, None) if failure is not None else (None, source.result())


# ---- Values -------------------------------------------------------------------------------------


def _set_tensor(promise: TensorPromise, value: object) -> None:
    if isinstance(value, Tensor):
        promise.set_value(value)
        return
    promise.set_exception(
        TypeError(
            f"from_future: expected a tensor as the value, got {type(value).__name__}: pass "
            "kind=dtorch_ops.Future for a value of any type, dtorch_ops.VoidFuture for none"
        )
    )


def _set_only_tensor(promise: TensorPromise, outputs: object) -> None:
    # A collective has a list of them.
    only = outputs[0] if isinstance(outputs, list) and len(outputs) == 1 else outputs
    _set_tensor(promise, only)


def _set_void(promise: VoidPromise, value: object) -> None:
    tensors = [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    devices = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
    if devices:
        _ops.sync_promise(promise, list(devices))
    else:
        promise.set_value()


class _Parcel:
    """Takes a value of any type past a promise that has none."""

    def __init__(self) -> None:
        self._values: list[Any] = []

    def send(self, promise: VoidPromise, value: object) -> None:
        self._values.append(value)
        promise.set_value()

    def take(self, complete: TorchFuture[None]) -> Any:
        complete.value()  # raises the error, if there is one
        return self._values.pop()
