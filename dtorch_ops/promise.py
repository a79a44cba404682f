"""The producing ends of futures."""

from __future__ import annotations

from collections.abc import Callable

from . import _C
from . import _library as _library  # registers the native classes

__all__ = ["TensorPromise", "VoidPromise"]


class TensorPromise(_C.TensorPromiseBase):
    """The producing end of a :class:`~dtorch_ops.TensorFuture`, to be fulfilled once.

    Operators and scripted functions take it as a ``torch.classes.dtorch.TensorPromise``. Pickled,
    it travels to another process of this machine, and the tensor comes back through shared memory.
    When its last holder drops it unset, or ends, the future fails with
    :class:`~dtorch_ops.BrokenPromiseError`. Thread-safe.

    Args:
        mode: where it may be fulfilled: "memory", in this process; "file", in any process of this
            machine; "auto", wherever it travels.

    Example:
        >>> promise = dtorch_ops.TensorPromise()
        >>> future = promise.get_future()
        >>> promise.set_value(torch.ones(2))
        >>> future.get()
        tensor([1., 1.])
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return type(self).from_token, (self.token(),)

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

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return type(self).from_token, (self.token(),)

    def __repr__(self) -> str:
        return f"<VoidPromise {'pending' if self.is_pending() else 'satisfied'}>"

    __str__ = __repr__  # the base class has one of its own
