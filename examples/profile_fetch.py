"""See with torch.profiler how fetching and computing overlap.

The third example of dtorch_ops. Another process makes batches, this one computes with them: first
each batch is waited for when it is wanted, then the next one is asked for before the work on the
one at hand. Two files show it:

* ``profiling/maker.py``: how each process is profiled, and how the batches come.
* this one: the two loops, and how the two traces become one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from profiling.maker import COLUMNS, Maker, traced
from profiling.options import Options, parse_options
from profiling.picture import save_picture
from profiling.spans import overlap_ms, read_loops
from torch import Tensor
from torch.profiler import record_function

from dtorch_ops.profiler import merge_traces


def compute(batch: Tensor, weights: Tensor) -> Tensor:
    with record_function("compute"):
        return (batch @ weights).relu().mean()


def one_after_the_other(maker: Maker, weights: Tensor, steps: int) -> None:
    for _ in range(steps):
        compute(maker.ask().get(), weights)


def side_by_side(maker: Maker, weights: Tensor, steps: int) -> None:
    coming = maker.ask()
    for step in range(steps):
        batch = coming.get()
        if step + 1 < steps:
            coming = maker.ask()
        compute(batch, weights)


LOOPS: dict[str, Callable[[Maker, Tensor, int], None]] = {
    "one after the other": one_after_the_other,
    "side by side": side_by_side,
}


def write_trace(options: Options, trace: Path) -> None:
    """Run both loops under a profiler, in both processes, and write one trace."""
    weights = torch.rand(COLUMNS, 4 * COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "ours.json", Path(folder) / "theirs.json"
        with Maker(options.megabytes, theirs) as maker:
            compute(maker.ask().get(), weights)  # the first of everything takes longer
            with traced(ours):
                for name, loop in LOOPS.items():
                    with record_function(name):
                        loop(maker, weights, options.steps)
        merge_traces([ours, theirs], trace)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # a core for each of the two processes
    trace = options.output.with_suffix(".json")
    write_trace(options, trace)
    loops = read_loops(trace, list(LOOPS))
    for loop in loops:
        print(
            f"{loop.name + ':':<21}{options.steps} batches of {options.megabytes} MB in "
            f"{loop.end - loop.begin:.0f} ms, {overlap_ms(loop):.0f} ms of it doing both"
        )
    save_picture(options.output, loops)
    print(f"trace:   {trace} (for chrome://tracing or ui.perfetto.dev)")
    print(f"picture: {options.output}")


if __name__ == "__main__":
    main()
