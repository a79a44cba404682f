"""The command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .arguments import FORMATS, OneLineParser, writable_plot

DEFAULT_OUTPUT = os.path.relpath(Path(__file__).parent.parent / "output" / "loss.png")


class Options(NamedTuple):
    epochs: int
    batch_size: int
    clients: int
    output: Path
    seed: int
    device: torch.device


def _default_device() -> str:
    """The accelerator, if there is one."""
    accelerator = torch.accelerator.current_accelerator()
    there = accelerator is not None and torch.accelerator.is_available()
    return accelerator.type if there else "cpu"


def _device(text: str) -> torch.device:
    """A device that there is."""
    expected = ["cpu"]
    if (kind := _default_device()) != "cpu":
        expected += [kind, *(f"{kind}:{i}" for i in range(torch.accelerator.device_count()))]
    if text not in expected:
        raise argparse.ArgumentTypeError(f"expected {' or '.join(expected)}, got {text!r}")
    return torch.device(text)


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; a wrong argument ends the program with one line and exit code 2."""
    parser = OneLineParser(
        description="Train two small convolutional networks on scikit-learn's handwritten digits, "
        "reading each step's loss through futures, and serve them to asyncio clients.",
    )
    parser.add_integer("--epochs", 1, 1000, default=12, help="passes over the training images")
    parser.add_integer("--batch-size", 1, 1024, default=32, help="images in a training step")
    # fewer than there are test images, so that each has some to ask for
    parser.add_integer("--clients", 1, 256, default=32, help="clients that ask at the same time")
    parser.add_argument(
        "--output",
        type=writable_plot,
        default=DEFAULT_OUTPUT,  # a string, so that it is checked as a given one is
        metavar="FILE",
        help=f"plot of the loss: {', '.join(FORMATS)} (default: output/loss.png beside the script)",
    )
    parser.add_integer(
        "--seed", 0, 2**31, default=0, help="of the split, the weights and the order of the images"
    )
    parser.add_argument(
        "--device",
        type=_device,
        default=_default_device(),  # a string, so that it is checked as a given one is
        help="where the networks are (default here: %(default)s)",
    )
    return Options(**vars(parser.parse_args(arguments)))
