"""The producing ends of futures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
        return type(self).from_token, (self.token(),)

    def __repr__(self: Any) -> str:
        return f"<{type(self).__name__} {'pending' if self.is_pending() else 'satisfied'}>"

    __str__ = __repr__

    def __bool__(self) -> bool:
        return True

    def __copy__(self: Any) -> Any:
        return self


class TensorPromise(_Promise, _C.TensorPromiseBase):
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


class VoidPromise(_Promise, _C.VoidPromiseBase):
    """The producing end of a :class:`~dtorch_ops.VoidFuture`: as :class:`TensorPromise`, valueless.

    Example:
        >>> promise = dtorch_ops.VoidPromise()
        >>> future = promise.get_future()
        >>> promise.set_value()
        >>> future.get()
    """

    __slots__ = ()
