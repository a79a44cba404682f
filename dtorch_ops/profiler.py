"""What ``torch.profiler`` shows of this library, in all threads and in several processes.

Under a profiler each step is a span, whose name begins with ``dtorch::``; docs/seeing.md lists
them. With none, they cost nothing that could be measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["merge_traces", "profile"]


def profile(**arguments: Any) -> torch.profiler.profile:
    """A ``torch.profiler.profile`` that shows every thread, and so where a fetch completes.

    Torch's own shows the thread that starts it, and those that this one starts work in. Ours wait
    for devices and for other processes beside it.

    Args:
        arguments: those of :class:`torch.profiler.profile`, but ``experimental_config``.

    Raises:
        TypeError: an argument that torch does not know, or ``experimental_config``.

    Example:
        >>> with dtorch_ops.profiler.profile() as prof:
        ...     _ = dtorch_ops.to_torch(torch.ones(2), copy=True)
        >>> any(event.name == "dtorch::copy" for event in prof.events())
        True
    """
    if "experimental_config" in arguments:
        raise TypeError(
            "experimental_config: expected none, since that is how all threads are asked for: use "
            "torch.profiler.profile, with profile_all_threads=True in yours"
        )
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(experimental_config=all_threads, **arguments)


# Each is one end of a step that two processes have a part in; the number of both is the same.
_WRITES, _READS = "dtorch::shm.write", "dtorch::shm.read"
_NUMBER = "Sequence number"


def _span_ends(events: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Arrows from what has written a value to what has read it, in another process."""
    written = {e["args"][_NUMBER]: e for e in events if e.get("name") == _WRITES}
    reads = [e for e in events if e.get("name") == _READS]
    for read in reads:
        write = written.get(read["args"][_NUMBER])
        if write is None or write["pid"] == read["pid"]:
            continue
        for phase, end in (("s", write), ("f", read)):
            arrow = {key: end[key] for key in ("pid", "tid", "ts")}
            arrow |= {"ph": phase, "cat": "dtorch", "name": "dtorch::shm"}
            yield arrow | {"id": str(read["args"][_NUMBER])} | ({"bp": "e"} if phase == "f" else {})


def merge_traces(traces: Iterable[str | os.PathLike[str]], output: str | os.PathLike[str]) -> None:
    """Write one chrome trace of several, of processes of one machine, on one scale of time.

    Arrows lead from ``dtorch::shm.write`` in the one to ``dtorch::shm.read`` in the other. (Those
    within a process are torch's, and are there without this.)

    Args:
        traces: what ``export_chrome_trace`` has written, of each process.
        output: the file to write; may be one of them.

    Raises:
        OSError: a file that cannot be read, or written.
        ValueError: a file that is no chrome trace of ``torch.profiler``.
    """
    events: list[dict[str, Any]] = []
    merged: dict[str, Any] = {}
    for number, path in enumerate(traces):
        with open(path) as file:
            try:
                trace = json.load(file)
                base, own = trace["baseTimeNanoseconds"], trace["traceEvents"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"traces: expected what torch.profiler's export_chrome_trace has written, got "
                    f"{os.fspath(path)!r}, which is none"
                ) from None
        merged = merged or trace
        shift = (base - merged["baseTimeNanoseconds"]) / 1000
        for event in own:
            if "ts" in event:
                event["ts"] += shift
            if event.get("ph") in "stf" and "id" in event:
                event["id"] = f"{number}.{event['id']}"  # each process counts from 1
            events.append(event)
    if not merged:
        raise ValueError("traces: expected the name of at least one file, got none")
    events += _span_ends(events)
    with open(output, "w") as file:
        json.dump(merged | {"traceEvents": events}, file)
