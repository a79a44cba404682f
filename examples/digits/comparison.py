"""The same training, read with ``.item()`` and read through futures, against the clock."""

from __future__ import annotations

import statistics
import time

from .data import Digits
from .network import DigitNetwork
from .training import FutureReader, ItemReader, StepReader, train

ROUNDS = 8
EPOCHS = 2


def _steps_per_second(reader: StepReader, digits: Digits, batch_size: int, seed: int) -> float:
    network = DigitNetwork(seed)
    steps = []
    start = time.perf_counter()
    train(network, digits.training_batches(EPOCHS, batch_size, seed), reader, steps.append)
    return len(steps) / (time.perf_counter() - start)


def compare_readers(digits: Digits, batch_size: int, seed: int) -> None:
    """Print the medians of alternating rounds, and the ratio.

    Both ways do the same steps from the same weights. They take turns, and take turns at going
    first, so that what else the machine does meets both alike.
    """
    speeds: dict[type, list[float]] = {ItemReader: [], FutureReader: []}
    for round_index in range(ROUNDS):
        order = list(speeds) if round_index % 2 else list(reversed(speeds))
        for kind in order:
            speeds[kind].append(_steps_per_second(kind(), digits, batch_size, seed))

    items, futures = speeds.values()
    ratio = statistics.median(f / i for f, i in zip(futures, items, strict=True))
    print(
        f"training: {statistics.median(items):.0f} steps/s with .item(), "
        f"{statistics.median(futures):.0f} with futures: ratio {ratio:.3f} "
        f"(medians of {ROUNDS} rounds)"
    )
    print("          About equal is what to expect here: on a CPU a loss is computed when the step")
    print("          returns, so .item() has nothing to wait for. An accelerator is where it has.")
