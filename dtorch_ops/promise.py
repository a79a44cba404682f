"""The producing ends of futures."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import process, util
from typing import Any

import torch

from . import _C
from . import _library as _library  # registers the native classes

__all__ = ["TensorPromise", "VoidPromise"]


class _Promise:
    """What both classes of promise share."""

    __slots__ = ()

    # torch.ScriptObject forwards these to methods of the native class, which has none.
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__
    __setattr__ = object.__setattr__

    def __reduce__(self: Any) -> tuple[Callable[[str], object], tuple[str]]:
        cls = type(self)
        return _LOADERS.get(cls, cls.from_token), (self.token(),)

    def __repr__(self: Any) -> str:
        return f"<{type(self).__name__} {self._describe()}>"

    __str__ = __repr__

    def __bool__(self) -> bool:
        return True

    def __copy__(self: Any) -> Any:
        return self

    def __deepcopy__(self: Any, memo: object) -> Any:
        return self


class TensorPromise(_Promise, _C.TensorPromiseBase):
    """The producing end of a :class:`~dtorch_ops.TensorFuture`, to be fulfilled once.

    Operators and scripted functions take it as a ``torch.classes.dtorch.TensorPromise``. Pickled,
    it travels to another process, and the tensor comes back through shared memory, or from another
    machine through ``torch.distributed.rpc`` (:func:`dtorch_ops.network.init`).
    When its last holder drops it unset, or ends, the future fails with
    :class:`~dtorch_ops.BrokenPromiseError`. While its pickle has not been loaded anywhere, in a
    queue, say, it has no holder that could: wait with a limit, or cancel it. Thread-safe.

    Args:
        mode: where it may be fulfilled: "memory", in this process; "file", in any process of this
            machine; "network", wherever RPC leads, through that alone; "auto", wherever it
            travels, by the shortest way.
        device: where the value is to be, whatever device it comes from; the copy is made before
            the future completes. None: the device it comes from, if this process has that.
            Whether there is such a device shows when the value comes: making a promise asks no
            driver.

    Example:
        >>> promise = dtorch_ops.TensorPromise()
        >>> future = promise.get_future()
        >>> promise.set_value(torch.ones(2))
        >>> future.get()
        tensor([1., 1.])
    """

    __slots__ = ()

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor, not initialised, that the value can be computed straight into.

        Setting the promise with this very tensor copies nothing, where the promise came from
        another process: the memory is what both processes share. Anything else may be set as well.
        What is written to the tensor after it was set shows at the consumer's, too.

        Args:
            size: as for :func:`torch.empty`: numbers, or one sequence of them.
            dtype: of its elements; None is the default dtype.

        Raises:
            DTorchError: no room for it in the shared memory.
            TypeError, ValueError: a size or dtype of no tensor.

        Example:
            >>> promise = dtorch_ops.TensorPromise()
            >>> future = promise.get_future()
            >>> t = promise.empty(2, 3)
            >>> promise.set_value(torch.ones(2, 3, out=t))
            >>> future.get().sum()
            tensor(6.)
        """
        one_sequence = len(size) == 1 and not isinstance(size[0], int)
        extents: Any = tuple(size[0]) if one_sequence else size  # type: ignore[arg-type]
        return self._empty(extents, torch.get_default_dtype() if dtype is None else dtype)


class VoidPromise(_Promise, _C.VoidPromiseBase):
    """The producing end of a :class:`~dtorch_ops.VoidFuture`: as :class:`TensorPromise`, valueless.

    Example:
        >>> promise = dtorch_ops.VoidPromise()
        >>> future = promise.get_future()
        >>> promise.set_value()
        >>> future.get()
    """

    __slots__ = ()


def _tensor_promise(token: str) -> TensorPromise:
    return TensorPromise.from_token(token)


def _void_promise(token: str) -> VoidPromise:
    return VoidPromise.from_token(token)


# A function is pickled, and found again, in half the time that a method of a class is.
_LOADERS: dict[type, Callable[[str], object]] = {
    TensorPromise: _tensor_promise,
    VoidPromise: _void_promise,
}

_DEPTH = 10  # of containers in containers


def _promises_in(value: object, depth: int = 0) -> Iterator[_Promise]:
    """The promises in ``value``: itself, or in its items, down to some depth."""
    if isinstance(value, _Promise):
        yield value
    elif depth < _DEPTH and isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _promises_in(item, depth + 1)
    elif depth < _DEPTH and isinstance(value, dict):
        yield from _promises_in(tuple(value.values()), depth + 1)


def _adopt_arguments(_: object) -> None:
    # Process(target=f, args=(promise,)) hands the promise over, as it does where it is pickled. A
    # forked process inherits all others too, which it was not given: those it does not adopt.
    started = process.current_process()
    given = (getattr(started, "_args", ()), getattr(started, "_kwargs", {}))
    for promise in _promises_in(given):
        try:
            promise._adopt()  # type: ignore[attr-defined]
        except Exception:
            continue  # using it says why


# How long a process that ends waits for the device. One that hangs shall not keep it for ever.
_FLUSH_MS = 2000


def _flush() -> None:
    # What an accelerator was still computing when it was set is lost with its process.
    _C.flush_promises(_FLUSH_MS)


def _flush_at_exit() -> None:
    # Processes that multiprocessing has started call no exit handlers, but these.
    util.Finalize(None, _flush, exitpriority=0)


def _after_fork(promises: object) -> None:
    _adopt_arguments(promises)
    _flush_at_exit()


atexit.register(_flush)
_flush_at_exit()
util.register_after_fork(_Promise, _after_fork)
