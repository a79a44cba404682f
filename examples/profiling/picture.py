"""The picture of the trace."""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .spans import SHOWN, Loop, Span

ROWS = ("the other process", "this one, listening", "this one, main thread")


def _row(span: Span) -> int:
    if span.process != os.getpid():
        return 0
    return 2 if span.thread == span.process else 1


def save_picture(path: Path, loops: list[Loop]) -> None:
    """Draw each loop on the same scale of time: what each process does when."""
    figure = Figure(figsize=(9, 4), layout="constrained")  # not pyplot: needs no display
    rows = figure.subplots(len(loops), sharex=True)
    colors = {name: f"C{index}" for index, name in enumerate(SHOWN)}
    for axes, loop in zip(rows, loops, strict=True):
        for span in loop.spans:
            extent = (span.begin - loop.begin, span.end - span.begin)
            axes.broken_barh(
                [extent], (_row(span) - 0.4, 0.8), facecolor=colors[span.name], edgecolor="white"
            )
        axes.set(title=f"{loop.name}: {loop.end - loop.begin:.0f} ms", ylim=(-0.6, 2.6))
        axes.set_yticks(range(len(ROWS)), ROWS)
    rows[-1].set(xlabel="ms")
    patches = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=patches, loc="outside right upper")
    figure.savefig(path, dpi=150)
