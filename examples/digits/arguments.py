"""What the command lines of all examples share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

#: What a plot can be written as.
FORMATS = (".png", ".pdf", ".svg")


class OneLineParser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, and takes no abbreviations."""

    def __init__(self, description: str) -> None:
        super().__init__(description=description, allow_abbrev=False)

    def add_integer(self, name: str, low: int, high: int, *, default: int, help: str) -> None:
        """An option that takes an integer from ``low`` to ``high``."""
        self.add_argument(
            name,
            type=integer(low, high),
            default=default,
            metavar="N",
            help=f"{help} (default: %(default)s)",
        )

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, without the usage; exit with 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see --help)\n")


def integer(low: int, high: int) -> Callable[[str], int]:
    """A ``type`` of argument: an integer from ``low`` to ``high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"expected an integer from {low} to {high}, got {text!r}"
            )
        return value

    return parse


def writable_plot(text: str) -> Path:
    """The path, once it is known that it can be written: better now than after the work."""
    path = Path(text)
    if path.suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(
            f"expected a name that ends in {', '.join(FORMATS)}, got {text!r}"
        )
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {reason}") from None
    return path
