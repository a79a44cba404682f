"""What promises that have left their process cost, and giving memory back."""

from __future__ import annotations

from typing import TypedDict

from . import _C

__all__ = ["Stats", "set_cache_limit", "stats", "trim"]


class Stats(TypedDict):
    """What :func:`stats` tells."""

    outstanding: int
    unclaimed: int
    producers: int
    received_bytes: int
    memory_bytes: int
    consumers: int
    held: int
    live_bytes: int
    cached_bytes: int
    device_bytes: int


def stats() -> Stats:
    """What this process has in shared memory, in both roles; zeros if it has none.

    As a consumer, whose promises others fulfil:

    * ``outstanding``: promises that may be fulfilled from another process, until they are;
    * ``unclaimed``: of these, those whose token nobody has unpickled yet (only a time limit ends
      the wait for one that is lost);
    * ``producers``: processes that have attached themselves, and live;
    * ``received_bytes``: of received tensors that live, those too small for a block left out;
    * ``memory_bytes``: of all its shared memory, what the producers keep for the next value
      included;
    * ``device_bytes``: of memory of devices that producers put values into, what is kept for the
      next ones included.

    As a producer, of other processes' promises:

    * ``consumers``: processes that it is attached to;
    * ``held``: promises that it may fulfil;
    * ``live_bytes``: of values it has sent that the consumers still have, and of memory that
      ``promise.empty`` has lent;
    * ``cached_bytes``: what it keeps for the next values, since memory that is used again costs a
      twentieth of fresh memory: what :func:`trim` gives back.

    Example:
        >>> dtorch_ops.stats()["outstanding"]
        0
    """
    return _C.stats()


def trim() -> None:
    """Give the memory that this process keeps for the next values back to the system.

    The next values then cost what the first ones did. Memory of values that consumers still have
    is theirs, and stays.

    Example:
        >>> dtorch_ops.trim()
        >>> dtorch_ops.stats()["cached_bytes"]
        0
    """
    _C.trim()


def set_cache_limit(bytes: int) -> None:
    """Keep at most ``bytes`` for the next values, in this process, for each consumer.

    What is freed beyond that goes back to the system at once. At first 1 GiB; 0 keeps nothing.

    Raises:
        ValueError: a negative number.

    Example:
        >>> dtorch_ops.set_cache_limit(1 << 30)
    """
    if bytes < 0:
        raise ValueError(f"bytes: expected a number >= 0, got {bytes}")
    _C.set_cache_limit(bytes)
