"""The fake accelerator, under the names of this package."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import fake_accelerator as fake
import torch
from fake_accelerator import drain as drain
from fake_accelerator import held as held
from fake_accelerator import hold as hold
from fake_accelerator import is_initialized as is_initialized
from fake_accelerator import release as release
from fake_accelerator import until_blocked as until_waiting  # noqa: F401
from fake_accelerator._build import built

from . import NAMES

__all__ = list(NAMES)

DEVICE = "fake"
DEVICES = [f"fake:{index}" for index in range(fake.DEVICES)]
PATIENCE = 1

_POOL = range(1, 65)  # ids of a device's pool, from which internal streams may come


_asked_by_install = 0


def install() -> None:
    global _asked_by_install
    fake.install()
    _asked_by_install = fake.counters().device_counts


def prepare() -> None:
    """Build it."""
    built()


def device_count() -> int:
    return fake.DEVICES


# ---- Streams ------------------------------------------------------------------------------------


def do_work(stream: fake.StreamLike) -> None:
    assert fake.step(stream) == "kernel"


def reach_event(stream: fake.StreamLike) -> None:
    assert fake.step(stream) == "event"


def run_all(stream: fake.StreamLike) -> None:
    while fake.step(stream) is not None:
        pass


def keep_busy(milliseconds: float) -> None:
    stream = torch.accelerator.current_stream(DEVICE)
    hold(stream)
    threading.Timer(milliseconds / 1000, release, [stream]).start()


def assert_queue(stream: fake.StreamLike, *kinds: object) -> None:
    queued = fake.queued(stream)
    if kinds[-1:] == (...,):
        assert queued[: len(kinds) - 1] == [*kinds[:-1]], queued
    elif kinds[:1] == (...,):
        assert queued[1 - len(kinds) :] == [*kinds[1:]], queued
    else:
        assert queued == [*kinds], queued


def all_streams(*indices: int) -> list[torch.Stream]:
    kind = torch.Stream("fake:0").device_type
    named = [name.removeprefix("fake:").split("/") for name in fake.streams_in_use()]
    ids = {(index, number) for index in indices for number in _POOL}
    ids |= {(int(d), int(n)) for d, n in named if int(d) in indices and int(n) != 0}
    return [
        torch.Stream(stream_id=number, device_index=index, device_type=kind)
        for index, number in sorted(ids)
    ]


class Capture:
    def assert_replay(self, tensor: torch.Tensor, values: list[float]) -> None:
        """Nothing: what it captures is dropped."""


@contextmanager
def capturing(mode: str) -> Iterator[Capture]:
    with torch.Stream(DEVICE) as stream, fake.capturing(stream, mode) as capture:  # type: ignore
        yield Capture()
    assert capture.intact


# ---- What has happened --------------------------------------------------------------------------


@contextmanager
def nobody_synchronises() -> Iterator[None]:
    """Nor does anybody poll; other threads wait for events, and for nothing else."""
    fake.reset_counters()
    yield
    counts = fake.counters()
    assert counts.my_syncs() == {}
    assert counts.event_queries == counts.stream_queries == 0
    assert set(counts.other_syncs()) <= {"synchronize_event"}, counts.other_syncs()


def is_untouched() -> bool:
    asked = fake.counters().device_counts > _asked_by_install
    return not (asked or is_initialized() or fake.streams_in_use())


def has_context(index: int) -> bool:
    return fake.has_context(index)


def live_blocks() -> int:
    return fake.device_memory(0).live_blocks


def limit_memory(size: int) -> None:
    """Nothing: it gives what was freed at once."""
