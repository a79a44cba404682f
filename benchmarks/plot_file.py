"""Draws the latency between two processes over the size: ours, the peers and the floor.

Takes the figures that ``python -m benchmarks file --json FILE`` has left.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .file_latency import FLOOR, SIZES, key
from .peers import PEERS

Points = dict[int, float]  # microseconds, by bytes


def _points(figures: Mapping[str, Any], prefix: str, side: str = "subject") -> Points:
    found = {size: figures.get(f"file.{prefix}_{key(name)}") for name, size in SIZES.items()}
    return {size: figure[side]["median"] for size, figure in found.items() if figure}


def _draw(figures: Mapping[str, Any], machine: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")

    def line(points: Points, label: str, **style: Any) -> None:
        if points:
            axes.plot(list(points), list(points.values()), label=label, **style)

    for name, peer in PEERS.items():
        line(_points(figures, f"peer_{name}"), peer.title, marker=".", linewidth=1)
    wait = _points(figures, "wait")
    ours: dict[str, Any] = {"color": "black", "marker": "o", "linewidth": 2.5}
    line(wait, "dtorch_ops: set_value", **ours)
    line(_points(figures, "lent"), "dtorch_ops: set_value of lent memory", linestyle=":", **ours)
    floor = _points(figures, "wait", "baseline")
    line(floor, FLOOR, color="grey", linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(wait), [name for name, size in SIZES.items() if size in wait])
    axes.set_xlabel("size of the tensor")
    axes.set_ylabel("µs from the producer's call to the tensor in the consumer's hand")
    axes.set_title(f"From one sleeping process to another, medians\n{machine}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot_file", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    result = json.loads(arguments.json.read_text())
    about = ("cores", "kernel", "python", "torch", "dtorch_ops")
    machine = ", ".join(f"{name} {result['machine'][name]}" for name in about)
    _draw(result["figures"], machine, arguments.out)


if __name__ == "__main__":
    main()
