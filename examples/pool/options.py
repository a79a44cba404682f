"""The command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from digits.arguments import OneLineParser


class Options(NamedTuple):
    epochs: int
    rounds: int
    batch_size: int
    outstanding: int
    seed: int


def add_job_options(parser: OneLineParser) -> None:
    parser.add_integer("--epochs", 1, 1000, default=6, help="passes over the training images")
    parser.add_integer(
        "--rounds", 1, 1000, default=40, help="times that all test images are predicted"
    )
    parser.add_integer(
        "--batch-size", 1, 1024, default=30, help="images that a worker predicts at once"
    )
    # 128 messages of jobs are 32 KiB, and a pipe takes 64: sending them never blocks.
    parser.add_integer(
        "--outstanding", 1, 128, default=48, help="batches that are awaited at the same time"
    )
    parser.add_integer(
        "--seed", 0, 2**31, default=0, help="of the split, the weights and the order of the images"
    )


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; a wrong argument ends the program with one line and exit code 2."""
    parser = OneLineParser(
        "Train a small convolutional network on scikit-learn's handwritten digits, and let two "
        "worker processes run it, one of which is killed in the middle.",
    )
    add_job_options(parser)
    return Options(**vars(parser.parse_args(arguments)))
