"""The errors that the plugin itself raises, and how an exception travels through a future.

Wrong arguments are :class:`TypeError` and :class:`ValueError`, a time limit that has passed is the
builtin :class:`TimeoutError`, and a cancelled promise is
:class:`concurrent.futures.CancelledError`.
"""

from __future__ import annotations

import builtins
import concurrent.futures
import json
import sys
import traceback
from collections.abc import Iterator
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple, cast

from . import _C

__all__ = [
    "BrokenPromiseError",
    "DTorchError",
    "FutureAlreadyRetrievedError",
    "PromiseAlreadySatisfiedError",
    "RemoteError",
]


class DTorchError(RuntimeError):
    """Base of the plugin's own errors."""


class BrokenPromiseError(DTorchError):
    """All who could set the value are gone; or, for whoever sets it, the process that waits is."""


class PromiseAlreadySatisfiedError(DTorchError):
    """The promise has been set, cancelled or broken before."""


class FutureAlreadyRetrievedError(DTorchError):
    """A second ``get()`` on one handle. ``wait()`` does not consume."""


class RemoteError(DTorchError):
    """The producer set an exception whose type cannot be rebuilt here.

    Attributes:
        type_name: the qualified name of the producer's exception type.
        message: what ``str()`` of it gave.
        traceback_text: its formatted traceback, empty if it had none.
    """

    def __init__(self, type_name: str, message: str, traceback_text: str = "") -> None:
        super().__init__(type_name, message, traceback_text)
        self.type_name = type_name
        self.message = message
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        text = f"{self.type_name}: {self.message}" if self.message else self.type_name
        return f"{text}\n\n{self.traceback_text}" if self.traceback_text else text


class ProducerTraceback(Exception):
    """The text of the traceback that an exception had when it was set; shown as its cause."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


# What a future keeps of an exception: no frames, since these hold the setter's locals (often the
# promise itself), and a cycle through a native future can never be collected.
class _Kept(NamedTuple):
    prototype: BaseException
    traceback_text: str


def _native_class(cls: type[BaseException]) -> Any:
    return next(c for c in cls.__mro__ if c.__module__ == "builtins")


# What is not copied with the other fields of a native class: args and what makes frames reachable.
# An AttributeError's obj may be the very promise that the error is set on.
_LEFT_BEHIND = {"args", "obj", "__cause__", "__context__", "__suppress_context__", "__traceback__"}


def _is_group(exc: BaseException) -> bool:
    group = getattr(builtins, "BaseExceptionGroup", None)  # Python 3.11
    return group is not None and isinstance(exc, group)


def _fields(cls: type) -> Iterator[str]:
    """The names of what instances of ``cls`` keep outside of their ``__dict__``."""
    for base in cls.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, MemberDescriptorType | GetSetDescriptorType):
                yield name


def _copy_without_frames(exc: BaseException) -> BaseException:
    """A new exception of the same type, args and attributes, made without calling ``__init__``.

    The constructor of a user's class may take other arguments than ``args``, or have side effects;
    its ``__setattr__`` may refuse.
    """
    cls = type(exc)
    native = _native_class(cls)
    arguments, args = native.__reduce__(exc)[1], exc.args
    if _is_group(exc):
        message, members = arguments
        arguments = message, [_copy_without_frames(member) for member in members]
        args = (*args[:1], arguments[1], *args[2:])
    # Both fill the fields of OSError, StopIteration and their like.
    copy: BaseException = native.__new__(cls, *arguments)
    native.__init__(copy, *arguments)
    vars(BaseException)["args"].__set__(copy, args)
    for name in _fields(cls):
        if name in _LEFT_BEHIND or name in ("__dict__", "__weakref__", "__class__"):
            continue
        try:
            value = object.__getattribute__(exc, name)
            # What is unset reads as None in some classes, and would read as None set afterwards:
            # an OSError says its file name then.
            if value is not None or hasattr(copy, name) is False:
                object.__setattr__(copy, name, value)
        except (AttributeError, TypeError):
            continue  # unset, or read-only
    copy.__dict__.update(exc.__dict__)
    if isinstance(notes := copy.__dict__.get("__notes__"), list):
        copy.__dict__["__notes__"] = list(notes)  # add_note() of one reader is not for the others
    return copy


_AGAIN = "\nand was raised again:\n\n"


def _traceback_text(exc: BaseException) -> str:
    if isinstance(exc.__cause__, ProducerTraceback):  # read from a future, and set on another one
        # Of a long chain the first and the last: each link would add its own to the text.
        earlier = str(exc.__cause__.args[0]).split(_AGAIN)[0]
        if exc.__traceback__ is None:
            return earlier
        again = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__, chain=False))
        return earlier + _AGAIN + again
    if exc.__traceback__ is None and exc.__cause__ is None and not _is_group(exc):
        return ""
    return "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))


def _preserve(exc: BaseException) -> _Kept:
    try:
        text = _traceback_text(exc)
    except Exception:
        text = ""
    try:
        return _Kept(_copy_without_frames(exc), text)
    except Exception:
        return _Kept(exc, text)  # a class that cannot be copied is raised as the object it is


def _revive(kept: _Kept) -> BaseException:
    try:
        fresh = _copy_without_frames(kept.prototype)
    except Exception:
        fresh = kept.prototype.with_traceback(None)
    if kept.traceback_text:
        cause = ProducerTraceback(kept.traceback_text)
        vars(BaseException)["__cause__"].__set__(fresh, cause)
    return fresh


def _to_plain(value: object) -> object:
    """``value`` as JSON holds it: of Python's own types, to any depth. TypeError for another."""
    cls = type(value)
    if value is None or cls in (bool, int, float, str):
        return value
    if cls is list:
        return [_to_plain(item) for item in cast("list[object]", value)]
    if cls in (tuple, set, frozenset):
        return {cls.__name__: [_to_plain(item) for item in cast("tuple[object, ...]", value)]}
    if cls in (bytes, bytearray):
        return {cls.__name__: cast("bytes", value).decode("latin-1")}
    if isinstance(value, complex) and cls is complex:
        return {"complex": [value.real, value.imag]}
    if cls is dict:
        items = cast("dict[object, object]", value).items()
        return {"dict": [[_to_plain(key), _to_plain(item)] for key, item in items]}
    raise TypeError(f"expected a value of a type of Python's own, got a {cls.__name__}")


def _from_plain(value: Any) -> Any:
    """The reverse. Raises for what :func:`_to_plain` does not give."""
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(name, content)] = value.items()
    if name in ("bytes", "bytearray"):
        data = content.encode("latin-1")
        return data if name == "bytes" else bytearray(data)
    if name == "complex":
        return complex(*content)
    items = [_from_plain(item) for item in content]
    return {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}[name](items)


#: What builtin errors keep beside their arguments.
_ATTRIBUTES = ("name", "name_from", "path", "__notes__")


def _attributes(exc: BaseException) -> dict[str, object]:
    """Those of :data:`_ATTRIBUTES` that have a plain value."""
    found: dict[str, object] = {}
    for name in _ATTRIBUTES:
        try:
            value = _to_plain(BaseException.__getattribute__(exc, name))
        except Exception:  # it has none, or one of another type
            continue
        if value is not None:
            found[name] = value
    return found


def _encode_arguments(exc: BaseException) -> str:
    """What the exception is made of, as JSON; empty if that cannot hold it."""
    native = _native_class(type(exc))
    try:
        if _is_group(exc):
            message, members = native.__reduce__(exc)[1]
            return json.dumps([message, [_encode(_Kept(member, "")) for member in members], {}])
        arguments = [_to_plain(list(exc.args)), _to_plain(list(native.__reduce__(exc)[1]))]
        return json.dumps([*arguments, _attributes(exc)])
    except Exception:
        return ""


def _encode(kept: _Kept) -> tuple[str, str, str, str, str]:
    """The texts that go to another process; what is no plain value in ``args`` stays behind."""
    exc = kept.prototype
    try:
        message = str(exc)
    except Exception:
        message = "(its __str__ raised)"
    arguments = _encode_arguments(exc)
    cls = type(exc)
    texts = (cls.__module__, cls.__qualname__, message, kept.traceback_text, arguments)
    return cast(
        "tuple[str, str, str, str, str]",
        tuple(t.encode("utf-8", "replace").decode("utf-8", "replace") for t in texts),
    )


def _is_trusted(module: str) -> bool:
    """Whether exceptions of ``module`` are rebuilt: Python's own, torch's and ours."""
    return (
        module == "builtins"
        or module.split(".")[0] in ("torch", "dtorch_ops")
        or module.startswith("concurrent.futures")
    )


def _decode(module: str, name: str, message: str, traceback_text: str, arguments: str) -> _Kept:
    """What arrived from another process. Text alone: nothing is imported, nothing called for it."""
    cls: Any = sys.modules.get(module) if _is_trusted(module) else None
    for part in name.split("."):
        cls = getattr(cls, part, None)
    if isinstance(cls, type) and issubclass(cls, BaseException) and arguments:
        try:
            args, native_args, attributes = json.loads(arguments)
            native = _native_class(cls)
            if native.__name__ in ("BaseExceptionGroup", "ExceptionGroup"):
                members = [_decode(*member).prototype for member in native_args]
                return _Kept(native(args, members), traceback_text)
            native_args = _from_plain(native_args)
            exc = native.__new__(cls, *native_args)
            native.__init__(exc, *native_args)
            exc.args = tuple(_from_plain(args))
            for name in _ATTRIBUTES:
                if name in attributes:
                    setattr(exc, name, _from_plain(attributes[name]))
            return _Kept(exc, traceback_text)
        except Exception:
            pass
    return _Kept(RemoteError(name, message, traceback_text), "")


_C.register_errors(
    dtorch_error=DTorchError,
    broken_promise=BrokenPromiseError,
    already_satisfied=PromiseAlreadySatisfiedError,
    already_retrieved=FutureAlreadyRetrievedError,
    cancelled=concurrent.futures.CancelledError,
    preserve=_preserve,
    revive=_revive,
    encode=_encode,
    decode=_decode,
)
