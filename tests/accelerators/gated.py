"""The fake accelerator with no more than CUDA offers: what runs here can be expected to run there.

It has one device. Streams are held as those of CUDA are, by a wait that is queued, here for an
event that fires when told. Nothing goes task by task.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import fake_accelerator as fake
import torch
from fake_accelerator import drain as drain

from . import NAMES
from .fake import all_streams as all_streams
from .fake import capturing as capturing
from .fake import has_context as has_context
from .fake import install as install
from .fake import is_initialized as is_initialized
from .fake import is_untouched as is_untouched
from .fake import limit_memory as limit_memory
from .fake import live_blocks as live_blocks
from .fake import nobody_synchronises as nobody_synchronises
from .fake import prepare as prepare
from .fake import until_waiting as until_waiting

__all__ = list(NAMES)

DEVICE = "fake"
DEVICES = ["fake:0"]
PATIENCE = 1

_GATES = "fake:3"  # a stream of it has the events


def device_count() -> int:
    return 1


class _Gates:
    """Who waits for which event; and the events that have not fired, as the fake counts them."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock = threading.Lock()
        self.stream = torch.Stream(_GATES)
        self.unfired: list[torch.Event] = []
        self.closed: dict[int, collections.deque[torch.Event]] = {}
        fake.delay_events(self.stream)

    def close(self, stream: torch.Stream) -> None:
        with self.lock:
            event = torch.Event(_GATES)
            event.record(self.stream)
            stream.wait_event(event)
            self.unfired.append(event)
            self.closed.setdefault(stream.stream_id, collections.deque()).append(event)

    def open_first(self, stream: torch.Stream) -> bool:
        with self.lock:
            closed = self.closed.get(stream.stream_id)
            if not closed:
                return False
            event = closed.popleft()
            index = self.unfired.index(event)
            del self.unfired[index]
            fake.fire_events(index)
            return True


_gates: _Gates | None = None


def _stream(stream: fake.StreamLike) -> torch.Stream:
    if isinstance(stream, torch.Stream):
        return stream
    kind = torch.Stream(DEVICE).device_type
    return torch.Stream(stream_id=0, device_index=0, device_type=kind)


def hold(stream: fake.StreamLike) -> None:
    global _gates
    _gates = _gates or _Gates()
    _gates.close(_stream(stream))


def release(stream: fake.StreamLike) -> None:
    # A child that ends within a block where its parent holds something has nothing to release.
    if _gates is not None and _gates.owner == os.getpid():
        while _gates.open_first(_stream(stream)):
            pass


@contextmanager
def held(*streams: fake.StreamLike) -> Iterator[None]:
    for stream in streams:
        hold(stream)
    try:
        yield
    finally:
        for stream in streams:
            release(stream)


def do_work(stream: fake.StreamLike) -> None:
    """Nothing, as on CUDA."""


def reach_event(stream: fake.StreamLike) -> None:
    assert _gates is not None and _gates.open_first(_stream(stream))


def run_all(stream: fake.StreamLike) -> None:
    release(stream)


def keep_busy(milliseconds: float) -> None:
    stream = torch.accelerator.current_stream(DEVICE)
    hold(stream)
    threading.Timer(milliseconds / 1000, reach_event, [stream]).start()


def assert_queue(stream: fake.StreamLike, *kinds: object) -> None:
    assert bool(fake.queued(_stream(stream))) == bool(kinds)
