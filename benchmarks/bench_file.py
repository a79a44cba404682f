"""Promises that are fulfilled by another process of the machine, beside the floor and the peers."""

from __future__ import annotations

from . import file_latency, file_peers, file_promises, file_stream
from .common import Figure, Settings


def run(settings: Settings) -> list[Figure]:
    latency = file_latency.run(settings)
    peers = file_peers.measure(settings)
    return [
        *latency,
        *file_peers.figures(peers),
        *file_stream.run(settings, peers),
        *file_promises.run(settings),
    ]
