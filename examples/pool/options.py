"""The command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from digits.arguments import OneLineParser, integer


class Options(NamedTuple):
    epochs: int
    rounds: int
    batch_size: int
    outstanding: int
    seed: int


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; a wrong argument ends the program with one line and exit code 2."""
    parser = OneLineParser(
        "Train a small convolutional network on scikit-learn's handwritten digits, and let two "
        "worker processes run it, one of which is killed in the middle.",
    )
    parser.add_argument(
        "--epochs",
        type=integer(1, 1000),
        default=6,
        metavar="N",
        help="passes over the training images (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=integer(1, 1000),
        default=40,
        metavar="N",
        help="times that all test images are predicted (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=integer(1, 1024),
        default=30,
        metavar="N",
        help="images that a worker predicts at once (default: %(default)s)",
    )
    parser.add_argument(
        "--outstanding",
        # 128 messages of jobs are 32 KiB, and a pipe takes 64: sending them never blocks.
        type=integer(1, 128),
        default=48,
        metavar="N",
        help="batches that are awaited at the same time (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=integer(0, 2**31),
        default=0,
        metavar="N",
        help="of the split, the weights and the order of the images (default: %(default)s)",
    )
    return Options(**vars(parser.parse_args(arguments)))
