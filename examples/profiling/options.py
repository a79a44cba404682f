"""The command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from digits.arguments import FORMATS, OneLineParser, writable_plot

DEFAULT_OUTPUT = os.path.relpath(Path(__file__).parent.parent / "output" / "fetch.png")


class Options(NamedTuple):
    steps: int
    megabytes: int
    output: Path


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; a wrong argument ends the program with one line and exit code 2."""
    parser = OneLineParser(
        "Compute with batches that another process makes, first one after the other and then side "
        "by side, and show with torch.profiler what happens when.",
    )
    parser.add_integer("--steps", 2, 1000, default=5, help="batches in each of the two loops")
    parser.add_integer("--megabytes", 1, 1024, default=16, help="size of a batch")
    parser.add_argument(
        "--output",
        type=writable_plot,
        default=DEFAULT_OUTPUT,  # a string, so that it is checked as a given one is
        metavar="FILE",
        help=f"picture: {', '.join(FORMATS)}; the trace, for chrome://tracing or ui.perfetto.dev, "
        "has the same name with .json (default: output/fetch.png beside the script)",
    )
    return Options(**vars(parser.parse_args(arguments)))
