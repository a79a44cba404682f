"""The same training, read with ``.item()`` and read through futures, against the clock."""

from __future__ import annotations

import itertools
import statistics
import time

from .data import Digits
from .network import DigitNetwork
from .training import FutureReader, ItemReader, Step, StepReader, train

ROUNDS = 16  # many short ones: what else the machine does then meets both ways alike
STEPS = 40


def _steps_per_second(reader: StepReader, digits: Digits, batch_size: int, seed: int) -> float:
    network = DigitNetwork(seed).to(digits.train_images.device)
    batches = itertools.islice(digits.training_batches(1, batch_size, seed), STEPS)
    steps: list[Step] = []
    start = time.perf_counter()
    train(network, batches, reader, steps.append)
    return len(steps) / (time.perf_counter() - start)


def compare_readers(digits: Digits, batch_size: int, seed: int) -> None:
    """Print the steps per second of both ways, and the ratio.

    They do the same steps from the same weights, and take turns at going first. Medians are given,
    and how far the middle half of the rounds is spread: the ratio is known no better than that.
    """
    speeds: dict[type, list[float]] = {ItemReader: [], FutureReader: []}
    for round_index in range(-1, ROUNDS):
        order = list(speeds) if round_index % 2 else list(reversed(speeds))
        for kind in order:
            speed = _steps_per_second(kind(), digits, batch_size, seed)
            if round_index >= 0:  # the one before is for warming up
                speeds[kind].append(speed)

    items, futures = speeds.values()
    ratios = [f / i for f, i in zip(futures, items, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"training: {statistics.median(items):.0f} steps/s with .item(), "
        f"{statistics.median(futures):.0f} with futures: "
        f"ratio {middle:.2f} (quartiles {low:.2f} to {high:.2f}, {ROUNDS} rounds)"
    )
    if digits.train_images.is_cpu:
        print(
            "          About equal is right: on a CPU the loss is there when the step returns, so"
        )
        print("          .item() waits for nothing and the futures cost some microseconds. On an")
        print("          accelerator .item() waits for the device.")
    else:
        print(
            "          Each .item() waits for the device, which has nothing to do meanwhile; with"
        )
        print("          futures the next steps are queued while it works.")
