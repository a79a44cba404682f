"""The producing ends of futures."""

from __future__ import annotations

from typing import NoReturn

from . import _C
from . import _library as _library  # registers the native classes
from .errors import DTorchError

__all__ = ["TensorPromise", "VoidPromise"]


def _refuse_to_travel(promise: object) -> NoReturn:
    raise DTorchError(
        f"expected a promise that can leave its process, got a {type(promise).__name__} of the "
        "memory backend, which cannot: give it to a thread of this process, or send the value by "
        "other means"
    )


class TensorPromise(_C.TensorPromiseBase):
    """The producing end of a :class:`~dtorch_ops.TensorFuture`, to be fulfilled once.

    Operators and scripted functions take it as a ``torch.classes.dtorch.TensorPromise``. When its
    last holder drops it unset, the future fails with :class:`~dtorch_ops.BrokenPromiseError`.
    Thread-safe.

    Args:
        mode: where it may be fulfilled: "memory", a thread of this process; "auto", wherever it
            travels (in this version the same).

    Example:
        >>> promise = dtorch_ops.TensorPromise()
        >>> future = promise.get_future()
        >>> promise.set_value(torch.ones(2))
        >>> future.get()
        tensor([1., 1.])
    """

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        _refuse_to_travel(self)

    def __repr__(self) -> str:
        return f"<TensorPromise {'pending' if self.is_pending() else 'satisfied'}>"

    __str__ = __repr__  # the base class has one of its own


class VoidPromise(_C.VoidPromiseBase):
    """The producing end of a :class:`~dtorch_ops.VoidFuture`: as :class:`TensorPromise`, valueless.

    Example:
        >>> promise = dtorch_ops.VoidPromise()
        >>> future = promise.get_future()
        >>> promise.set_value()
        >>> future.get()
    """

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        _refuse_to_travel(self)

    def __repr__(self) -> str:
        return f"<VoidPromise {'pending' if self.is_pending() else 'satisfied'}>"

    __str__ = __repr__  # the base class has one of its own
