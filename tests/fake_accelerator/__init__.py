"""An accelerator for tests on a machine without one: the device ``fake``.

It is a PrivateUse1 device with four devices, streams that are threads, events, two caching
allocators and pinned memory. Device memory is host memory that only the streams touch, when a task
runs and not when it is queued: who reads too early sees old bytes, or :data:`POISON`. Tests steer
it with the functions below, and ask what was called.

``install()`` builds the library if need be (half a minute), loads it and renames the device for the
whole process, for good: from then on it is *the* accelerator of this torch. Tests that expect none
must not share the process. Nothing is initialised by it: the first allocation, stream or event is
what does that, and what makes a later fork useless for the child.

What is as on CUDA:

* every kernel and copy is queued on the current stream; a copy blocks the caller unless it is
  ``non_blocking`` and the host's side is pinned, or the host's side is a pageable source;
* freed memory is free at once for its own stream, and for the others only if ``record_stream`` has
  named them. A queued task keeps no memory alive;
* an error of the device is sticky: every later call for that device raises it;
* a forked child of a process that had initialised it can use nothing.

What is not: operators without a kernel of their own (all but empty, views, copies, fill, add and
mul) run on the CPU and block the caller, which is counted as ``fallback``; a capture drops what it
records; there are no random numbers, no graphs. Memory can be
shared with other processes only after ``share_memory()``.

A stream is named by a ``torch.Stream``, or by a device for that device's default stream. All
functions may be called from any thread.
"""

from __future__ import annotations

import ctypes
import functools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from . import _build, _device_module

__all__ = [
    "DEVICES",
    "POISON",
    "Capture",
    "Counters",
    "Memory",
    "capturing",
    "counters",
    "delay_events",
    "delayed_events",
    "device_memory",
    "drain",
    "fail_call",
    "fail_next",
    "fail_sharing",
    "fire_events",
    "has_context",
    "held",
    "hold",
    "install",
    "is_initialized",
    "lose_next_event",
    "pinned_memory",
    "queued",
    "release",
    "reset",
    "reset_counters",
    "reset_errors",
    "share_memory",
    "sharing_calls",
    "step",
    "stop_delaying_events",
    "streams_in_use",
    "until_blocked",
]

DEVICES = 4

#: What fresh and freed memory is filled with, on the device and pinned.
POISON = 0xCD

#: A stream, or a device (``"fake:1"``) for its default stream.
StreamLike: TypeAlias = "torch.Stream | torch.device | str"

Kind = Literal["kernel", "copy", "event"]
Call = Literal[
    "kernel",
    "copy",
    "event",
    "wait",
    "stream",
    "alloc",
    "pinned_alloc",
    "query_event",
    "synchronize_event",
    "synchronize_stream",
    "synchronize_device",
]
CaptureMode = Literal["global", "thread_local", "relaxed"]

_CAPTURE_MODES = ("global", "thread_local", "relaxed")
_STREAM = (ctypes.c_int, ctypes.c_int64)

_library: ctypes.CDLL | None = None


# ---- Loading ------------------------------------------------------------------------------------


def install() -> None:
    """Make ``fake`` a device of this process. Done once; doing it again does nothing."""
    global _library
    if _library is not None:
        return
    path = _build.built() / "libfake_accelerator.so"
    torch.utils.rename_privateuse1_backend("fake")  # type: ignore[attr-defined]
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    library = ctypes.CDLL(str(path))
    for name in ("fake_step", "fake_queued", "fake_streams_in_use", "fake_counters"):
        getattr(library, name).restype = ctypes.c_char_p
    for name in ("fake_device_memory", "fake_pinned_memory"):
        getattr(library, name).restype = ctypes.c_char_p
    for name in ("hold", "release", "step", "queued", "delay_events_of", "end_capture"):
        getattr(library, f"fake_{name}").argtypes = _STREAM
    library.fake_has_stream.argtypes = _STREAM
    library.fake_drain.argtypes = (*_STREAM, ctypes.c_int64)
    library.fake_begin_capture.argtypes = (*_STREAM, ctypes.c_int)
    library.fake_until_blocked.argtypes = (ctypes.c_int, ctypes.c_int64)
    for name in ("fake_fail_next", "fake_fail_call"):
        getattr(library, name).argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    _library = library
    torch._register_device_module(  # type: ignore[no-untyped-call]
        "fake",
        _device_module.make(DEVICES, lambda: bool(library.fake_in_bad_fork()), is_initialized),
    )


def _native() -> ctypes.CDLL:
    if _library is None:
        raise RuntimeError("fake_accelerator.install() has not been called")
    return _library


def _stream(stream: StreamLike) -> tuple[int, int]:
    if isinstance(stream, torch.Stream):
        device, index, number = stream.device, stream.device_index, stream.stream_id
    else:
        device = torch.device(stream)
        index, number = device.index or 0, 0
    if device.type != "fake" or not _native().fake_has_stream(index, number):
        raise ValueError(f"expected a stream or a device of the fake accelerator, got {stream!r}")
    return index, number


def _milliseconds(seconds: float) -> int:
    return max(0, int(seconds * 1000))


# ---- Streams ------------------------------------------------------------------------------------


def hold(stream: StreamLike) -> None:
    """Have ``stream`` run nothing until :func:`release`. What runs at the moment ends first.

    What is queued stays queued, so the events recorded on it do not fire.
    """
    _native().fake_hold(*_stream(stream))


def release(stream: StreamLike) -> None:
    """Have a held stream go on."""
    _native().fake_release(*_stream(stream))


@contextmanager
def held(*streams: StreamLike) -> Iterator[None]:
    """Hold the streams in a ``with`` block."""
    for stream in streams:
        hold(stream)
    try:
        yield
    finally:
        for stream in streams:
            release(stream)


def step(stream: StreamLike) -> str | None:
    """Have a held stream run one task, and wait for it.

    Returns:
        The task's kind: ``"kernel"``, ``"copy"``, ``"event"`` or ``"wait"``. None if nothing is
        queued, the first one waits for an event that has not fired, or the stream is not held.
    """
    kind = _native().fake_step(*_stream(stream))
    return None if kind is None else str(kind, "ascii")


def queued(stream: StreamLike) -> list[str]:
    """The kinds of the tasks that wait to be run, in order; without the one that runs."""
    return str(_native().fake_queued(*_stream(stream)), "ascii").split()


def drain(stream: StreamLike, timeout: float = 10) -> None:
    """Wait until all that is queued has been done, without counting as a synchronising call.

    Raises:
        TimeoutError: After ``timeout`` seconds.
    """
    if not _native().fake_drain(*_stream(stream), _milliseconds(timeout)):
        raise TimeoutError(f"{stream} still has to do: {queued(stream)}")


def until_blocked(count: int = 1, timeout: float = 10) -> None:
    """Wait until ``count`` threads or more are blocked in synchronising calls.

    Raises:
        TimeoutError: After ``timeout`` seconds.
    """
    now = _native().fake_until_blocked(count, _milliseconds(timeout))
    if now < count:
        raise TimeoutError(f"{now} threads are blocked, expected {count}")


def streams_in_use() -> list[str]:
    """``"fake:DEVICE/ID"`` of every stream that ever had a task.

    Each of them, and nothing else, has a thread of the fake, of that name.
    """
    return str(_native().fake_streams_in_use(), "ascii").split()


# ---- Events -------------------------------------------------------------------------------------


def delay_events(stream: StreamLike | None = None) -> None:
    """Have the events recorded from now on, on ``stream`` or on any, fire only when told.

    Their streams go on. :func:`fire_events` fires them, :func:`stop_delaying_events` ends it.
    """
    if stream is None:
        _native().fake_delay_events()
    else:
        _native().fake_delay_events_of(*_stream(stream))


def stop_delaying_events() -> None:
    """Have events fire by themselves again; those delayed already still wait to be told."""
    _native().fake_stop_delaying_events()


def delayed_events() -> int:
    """How many events are delayed and have not been told to fire."""
    return int(_native().fake_delayed_events())


def fire_events(index: int | None = None) -> None:
    """Fire the ``index``-th delayed event, in the order recorded, or all.

    It is then no longer among them. One that its stream has not reached fires when it has.

    Raises:
        IndexError: There are fewer.
    """
    if index is not None and index < 0:
        raise IndexError(f"expected an index that is not negative, got {index}")
    if not _native().fake_fire_events(-1 if index is None else index):
        raise IndexError(f"event {index} of {delayed_events()} that are delayed")


def lose_next_event() -> None:
    """Have the next event recorded, wherever, never fire, though its stream goes on.

    :func:`reset` fires it, so that what waits for it ends with the test.
    """
    _native().fake_lose_next_event()


# ---- Faults -------------------------------------------------------------------------------------


def fail_next(kind: Kind, message: str) -> None:
    """Have the next task of a kind that is queued fail when the device runs it.

    The error sticks to its device: what is queued there ends, and every later call raises
    ``torch.AcceleratorError`` with ``message``, until :func:`reset_errors`.
    """
    _native().fake_fail_next(kind.encode(), message.encode())


def fail_call(call: Call, message: str) -> None:
    """Have the next call of a kind raise, which sticks to nothing.

    ``"kernel"``, ``"copy"``, ``"event"`` (recording one) and ``"wait"`` (of a stream for an event)
    are those that queue a task; ``"stream"`` gets one from the pool. ``"alloc"`` and
    ``"pinned_alloc"`` raise ``torch.OutOfMemoryError``, the others ``torch.AcceleratorError``.
    """
    _native().fake_fail_call(call.encode(), message.encode())


def reset_errors() -> None:
    """Have the devices work again, and forget the faults that were asked for."""
    _native().fake_reset_errors()


# ---- Capture ------------------------------------------------------------------------------------


@dataclass
class Capture:
    """A capture; ``intact`` is known when it has ended: no call has spoiled it."""

    intact: bool | None = None


@contextmanager
def capturing(stream: StreamLike, mode: CaptureMode = "global") -> Iterator[Capture]:
    """As if a graph were captured on ``stream`` in a ``with`` block.

    What is queued on it is dropped. Queries and synchronising calls raise
    ``torch.AcceleratorError`` and spoil the capture: with ``"global"`` those of all threads, with
    ``"thread_local"`` those of this one, with ``"relaxed"`` none.
    """
    where = _stream(stream)
    capture = Capture()
    _native().fake_begin_capture(*where, _CAPTURE_MODES.index(mode))
    try:
        yield capture
    finally:
        capture.intact = bool(_native().fake_end_capture(*where))


# ---- What has happened --------------------------------------------------------------------------


@dataclass
class Counters:
    """What was called since :func:`reset_counters`.

    Calls that block until the device has done something are ``synchronize_event``,
    ``synchronize_stream``, ``synchronize_device``, ``blocking_copy``, ``item``, and ``fallback``
    (an operator that ran on the CPU).
    """

    kernels: int
    copies: int
    events_created: int
    events_recorded: int
    events_destroyed: int
    event_queries: int
    stream_queries: int
    stream_waits: int
    device_counts: int
    captured_tasks: int
    captures_invalidated: int
    #: By native thread id, then by name; zeros left out.
    syncs_by_thread: dict[int, dict[str, int]] = field(default_factory=dict)

    def syncs(self, thread: int | None = None) -> dict[str, int]:
        """The synchronising calls of one thread (a native id), or of all."""
        total: dict[str, int] = {}
        for owner, counts in self.syncs_by_thread.items():
            if thread in (None, owner):
                for name, count in counts.items():
                    total[name] = total.get(name, 0) + count
        return total

    def my_syncs(self) -> dict[str, int]:
        """Those of the calling thread: empty if it never waited for the device."""
        return self.syncs(threading.get_native_id())

    def other_syncs(self) -> dict[str, int]:
        """Those of all other threads."""
        mine = self.my_syncs()
        rest = {name: count - mine.get(name, 0) for name, count in self.syncs().items()}
        return {name: count for name, count in rest.items() if count}


def counters() -> Counters:
    """The counters as they are now."""
    state = json.loads(_native().fake_counters())
    by_thread = {
        int(thread): {name: count for name, count in counts.items() if count}
        for thread, counts in state["syncs"].items()
    }
    return Counters(
        **state["calls"],
        syncs_by_thread={thread: counts for thread, counts in by_thread.items() if counts},
    )


def reset_counters() -> None:
    """Set them all to zero."""
    _native().fake_reset_counters()


def is_initialized() -> bool:
    """Whether any device is in use; False in a forked child that can use none."""
    return bool(_native().fake_is_initialized())


def has_context(device: int) -> bool:
    """The same of one device: what torch calls ``hasPrimaryContext``."""
    return bool(_native().fake_has_context(device))


@dataclass
class Memory:
    """Memory handed out and cached. Sizes are rounded up to 512 bytes."""

    live_bytes: int
    live_blocks: int
    cached_blocks: int
    #: Freed, but a stream that was recorded may still use them.
    deferred_blocks: int
    allocations: int
    #: Allocations that got a block which had been freed.
    reuses: int


def device_memory(device: int = -1) -> Memory:
    """Of one device, or of all."""
    return Memory(**json.loads(_native().fake_device_memory(device)))


def pinned_memory() -> Memory:
    """Of pinned host memory."""
    return Memory(**json.loads(_native().fake_pinned_memory()))


# ---- Memory that processes share ----------------------------------------------------------------


@functools.cache
def _sharing() -> ctypes.CDLL:
    _native()
    library = ctypes.CDLL(str(_build.built() / "libfake_sharing.so"))
    library.fake_sharing_fail.argtypes = (ctypes.c_char_p,)
    library.fake_sharing_calls.argtypes = (ctypes.POINTER(ctypes.c_int),)
    return library


def share_memory() -> None:
    """From now on dtorch_ops may share the device's memory between processes."""
    _sharing().fake_sharing_install()


def fail_sharing(call: Literal["allocate", "open"]) -> None:
    """Have the next such call throw, in this process."""
    _sharing().fake_sharing_fail(call.encode())


def sharing_calls() -> tuple[int, int, int, int]:
    """How often this process has allocated, freed, opened and closed such memory."""
    counts = (ctypes.c_int * 4)()
    _sharing().fake_sharing_calls(counts)
    allocated, freed, opened, closed = counts
    return allocated, freed, opened, closed


# ---- The end of a test --------------------------------------------------------------------------


def reset() -> None:
    """Undo all that was asked for: streams go on, every event fires, errors and captures end.

    Counters, memory and what is initialised stay.
    """
    _native().fake_reset()
