"""The command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from digits.arguments import OneLineParser
from pool.options import Options as JobOptions
from pool.options import add_job_options


class Options(NamedTuple):
    job: JobOptions
    lost_after: int
    mode: str
    cut: str | None
    hosts: str | None


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; a wrong argument ends the program with one line and exit code 2."""
    parser = OneLineParser(
        "Train a small convolutional network on scikit-learn's handwritten digits, and let workers "
        "on other hosts run it, one of which is lost in the middle.",
    )
    add_job_options(parser)
    parser.add_integer(
        "--lost-after", 1, 600, default=3, help="seconds without a sign after which one is lost"
    )
    parser.add_argument(
        "--mode",
        choices=("auto", "network"),
        default="auto",
        help="under torchrun: of the promises; auto takes shared memory where that reaches the "
        "worker (default: %(default)s)",
    )
    parser.add_argument(
        "--cut",
        metavar="COMMAND",
        help="under torchrun: what the controller's shell runs half-way, so that a host is lost; "
        "WORKER and WORKER_PID in its environment say which (default: nothing is done)",
    )
    parser.add_argument(
        "--hosts",
        choices=("namespaces", "loopback"),
        help="without torchrun: how hosts are made (default: namespaces if it can be)",
    )
    options = vars(parser.parse_args(arguments))
    job = JobOptions(**{name: options.pop(name) for name in JobOptions._fields})
    return Options(job, **options)
