"""What is of interest in the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

#: The steps that are shown, in the order of the legend.
SHOWN = ("make", "dtorch::shm.write", "dtorch::wait", "dtorch::shm.read", "compute")


class Span(NamedTuple):
    name: str
    process: int
    thread: int
    begin: float  # in milliseconds
    end: float


class Loop(NamedTuple):
    name: str
    begin: float
    end: float
    spans: list[Span]


def read_loops(trace: Path, names: list[str]) -> list[Loop]:
    """The loops, which the trace has as spans of these ``names``, and the steps in each."""
    with open(trace) as file:
        events = json.load(file)["traceEvents"]
    spans = [
        Span(e["name"], e["pid"], e["tid"], e["ts"] / 1000, (e["ts"] + e["dur"]) / 1000)
        for e in events
        if e.get("ph") == "X" and e["name"] in (*SHOWN, *names)
    ]
    loops = []
    for name in names:
        (loop,) = (span for span in spans if span.name == name)
        inside = [s for s in spans if s.name in SHOWN and loop.begin <= s.begin < loop.end]
        loops.append(Loop(name, loop.begin, loop.end, inside))
    return loops


def overlap_ms(loop: Loop) -> float:
    """For how long a batch was made while another one was computed with."""
    return sum(
        max(0.0, min(makes.end, computes.end) - max(makes.begin, computes.begin))
        for makes in loop.spans
        if makes.name == "make"
        for computes in loop.spans
        if computes.name == "compute"
    )
