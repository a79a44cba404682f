"""The future classes: torch futures with a timeout, ``await``, and a result that is taken once."""

from __future__ import annotations

import concurrent.futures
from typing import Generic, NoReturn, TypeVar

from torch import Tensor

from . import _C, _asyncio, _concurrent
from ._compile import breaks_graph
from .errors import DTorchError

__all__ = ["Future", "TensorFuture", "TreeFuture", "VoidFuture"]

T = TypeVar("T")


class Future(_C.FutureBase[T], Generic[T]):
    """A torch future that can be awaited, waited for with a timeout, and taken once.

    ``dtorch_ops.Future(f)`` makes a handle on any torch future ``f``, bare ones that operators
    return included. It is a ``torch._C.Future``: whatever takes a torch future takes it.

    A future is *pending*, then *ready* or *failed* for good. Reading never changes that, and every
    way of reading gives the same outcome, every time; only :meth:`get` consumes the handle (not
    the future). Thread-safe.

    Example:
        >>> f = dtorch_ops.Future(torch.ops.dtorch.get_tensor_async(torch.ones(2)))
        >>> f.wait(1000)
        tensor([1., 1.])
    """

    __slots__ = ()

    @breaks_graph
    def as_concurrent(self) -> concurrent.futures.Future[T]:
        """This future as a ``concurrent.futures.Future``, for whatever takes only those.

        ``concurrent.futures.wait`` and ``as_completed`` take it, and ``asyncio.wrap_future``. It is
        completed by the thread that completes this future, with the same value or error, and
        consumes nothing; its time limits are seconds. It is pending until then, never running:
        ``cancel()`` gives up that one alone, and tells all who wait for it, while this future goes
        on. Where this future is cancelled, by its promise, so is that one. Each call makes another
        one.

        Example:
            >>> f = dtorch_ops.to_torch_async(torch.ones(2)).as_concurrent()
            >>> f.result(timeout=1)
            tensor([1., 1.])
        """
        return _concurrent.as_concurrent(self)

    def set_result(self, result: object) -> NoReturn:
        """Refused: a future is completed by its promise or operator."""
        raise DTorchError(
            f"expected a promise, got a {type(self).__name__}: it is completed by the promise or "
            "the operator that it came from; make a dtorch_ops.TensorPromise and set that"
        )

    def __repr__(self) -> str:
        consumed = "" if self.valid() else ", consumed"
        return f"<{type(self).__name__} {self._state()}{consumed}>"


class TensorFuture(Future[Tensor]):
    """A :class:`Future` of one tensor."""

    __slots__ = ()


class TreeFuture(Future[T]):
    """A :class:`Future` of a tree: of the lists, tuples and dicts that were fetched together.

    To TorchScript, torch's own functions and the operators of ``torch.ops.dtorch`` it is a future
    of the list of the tensors alone. Leaves that are no tensors are kept until the future goes: one
    that has the future in it keeps both for ever.
    """

    __slots__ = ()


class VoidFuture(Future[None]):
    """A :class:`Future` without a value: ``get()`` returns None."""

    __slots__ = ()


_C.register_futures(
    future=Future,
    tensor_future=TensorFuture,
    void_future=VoidFuture,
    tree_future=TreeFuture,
    before_blocking=_asyncio.before_blocking,
)
_asyncio.install()
