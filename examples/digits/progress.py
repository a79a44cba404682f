"""A progress bar on stderr."""

from __future__ import annotations

import sys

WIDTH = 24


class Progress:
    """A bar in a terminal; elsewhere, where it would fill a log, a line each tenth of the way."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._is_terminal = sys.stderr.isatty()
        self._granularity = 100 if self._is_terminal else 10
        self._shown = 0

    def show(self, done: int, text: str) -> None:
        reached = done * self._granularity // self._total
        if reached == self._shown:
            return
        self._shown = reached
        line = f"{done / self._total:4.0%}  {text}"
        if not self._is_terminal:
            print(f"{self._label}: {line}", file=sys.stderr)
            return
        bar = "#" * (WIDTH * done // self._total)
        end = "\n" if done == self._total else ""
        print(f"\r{self._label} [{bar:.<{WIDTH}}] {line}", end=end, file=sys.stderr, flush=True)
