"""What the benchmarks share: one way to measure, one way to compare, one way to show."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import queue
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

#: Takes one measurement, and gives it in the unit that is shown. Checks what it computed, too.
Sample = Callable[[], float]
#: What was measured in each round, by name.
Series = dict[str, list[float]]


@dataclass(frozen=True)
class Settings:
    """How long to measure."""

    rounds: int
    quick: bool = False  # shows that everything works; the figures mean nothing
    device: str | None = None  # of the accelerator; None: the one that there is

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full


class NothingToMeasure(Exception):
    """What is to be measured is not there; the message says what, in one line."""


# ---- Measuring -----------------------------------------------------------------------------------


def measure(samples: Mapping[str, Sample], rounds: int, per_round: int = 1) -> Series:
    """Take the samples in turn, A B A B ..., after a warm-up.

    What slows the machine down for a while thus slows all of them down, and the ratio within a
    round stays what it is.

    Args:
        samples: by name.
        rounds: how many values to get of each.
        per_round: how many samples of each, still in turn, make one value, which is their median.
            For samples so short that a single one says little.
    """
    series: Series = {name: [] for name in samples}
    with frozen_garbage():
        for sample in samples.values():
            sample()
        for _ in range(rounds):
            taken: Series = {name: [] for name in samples}
            gc.collect()
            for _ in range(per_round):
                for name, sample in samples.items():
                    if per_round == 1:
                        gc.collect()  # each starts without the garbage of the one before
                    taken[name].append(sample())
            for name, values in taken.items():
                series[name].append(statistics.median(values))
    return series


@contextlib.contextmanager
def frozen_garbage() -> Iterator[None]:
    """No collection starts by itself, and one that is asked for skips what is there by now."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def per_operation(body: Callable[[int], None], count: int) -> Sample:
    """Microseconds per operation of ``body``, which does as many as it is told."""

    def sample() -> float:
        start = time.perf_counter()
        body(count)
        return (time.perf_counter() - start) / count * 1e6

    return sample


def in_a_row(sample: Sample, count: int) -> Sample:
    """The median of ``count`` samples with nothing between them.

    For what depends on where the kernel has put the processes, and on what they did last: samples
    of another kind between them would change it.
    """
    return lambda: statistics.median(sample() for _ in range(count))


def expect(right: bool, what: str) -> None:
    """A benchmark of something that gives wrong results is worth nothing: it ends here."""
    if not right:
        raise AssertionError(f"wrong result: {what}")


class Helper:
    """One thread for all samples, that acts when told: none of them pays for starting a thread."""

    #: Seconds; enough for the thread that waits for the action to go to sleep in the kernel.
    DELAY = 0.001

    def __init__(self) -> None:
        self.acted_at = math.nan
        self._actions: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def act_soon(self, action: Callable[[], object]) -> None:
        """Call ``action`` after ``DELAY``; ``acted_at`` is then the instant before the call."""
        self._actions.put(action)

    def close(self) -> None:
        self._actions.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (action := self._actions.get()) is not None:
                time.sleep(self.DELAY)
                self.acted_at = time.perf_counter()
                action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the main thread would wait for ever


# ---- Comparing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """The middle of some values, and where four fifths of them lie."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(set(values)) == 1:  # quantiles would round
            return cls(values[0], values[0], values[0])
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), tenths[0], tenths[-1])


@dataclass(frozen=True)
class Target:
    """What is aimed at: at most so much, of the ratio or of the subject's own value."""

    at_most: float
    of: Literal["ratio", "subject"] = "ratio"


@dataclass(frozen=True)
class Figure:
    """A subject beside its baseline."""

    key: str
    title: str
    baseline_title: str
    unit: str
    subject: Spread
    baseline: Spread
    ratio: Spread | None  # None: the baseline is 0
    target: Target | None

    @property
    def met(self) -> bool | None:
        """Whether the median is within the target; None if there is no target."""
        if self.target is None:
            return None
        spread = self.subject if self.target.of == "subject" else self.ratio
        return spread is not None and spread.median <= self.target.at_most


def compare(
    key: str,
    title: str,
    baseline_title: str,
    *,
    subject: Sequence[float],
    baseline: Sequence[float],
    unit: str,
    target: Target | None = None,
) -> Figure:
    """The figure of two series. The ratio is taken round by round."""
    pairs = zip(subject, baseline, strict=True)
    ratio = None if 0 in baseline else Spread.of([mine / theirs for mine, theirs in pairs])
    return Figure(
        key, title, baseline_title, unit, Spread.of(subject), Spread.of(baseline), ratio, target
    )


# ---- Showing -------------------------------------------------------------------------------------

_HEADINGS = ("figure", "measured", "baseline", "", "ratio", "target", "met")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def _spread(spread: Spread, unit: str) -> str:
    text = f"{_number(spread.median)} {unit}"
    if spread.p10 == spread.p90:
        return text
    return f"{text} ({_number(spread.p10)}..{_number(spread.p90)})"


def _target(figure: Figure) -> str:
    if figure.target is None:
        return ""
    unit = "x" if figure.target.of == "ratio" else figure.unit
    return f"<= {figure.target.at_most:g} {unit}"


def _cells(figure: Figure) -> tuple[str, ...]:
    return (
        figure.title,
        _spread(figure.subject, figure.unit),
        figure.baseline_title,
        _spread(figure.baseline, figure.unit),
        "-" if figure.ratio is None else _spread(figure.ratio, "x"),
        _target(figure),
        {True: "yes", False: "NO", None: ""}[figure.met],
    )


def table(figures: Sequence[Figure]) -> str:
    """The figures as lines of text."""
    rows = [_HEADINGS, *map(_cells, figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])
