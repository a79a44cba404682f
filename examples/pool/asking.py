"""What the controller asks of its workers, and how that went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .pool import LostJob, WorkerPool


class Answers(NamedTuple):
    digits: Tensor
    """The predicted ones, in the order of the batches."""
    latencies_ms: list[float]
    seconds: float
    """Of all together."""
    lost: list[LostJob]


async def ask(
    pool: WorkerPool, batches: list[slice], outstanding: int, *, kill_one: bool = True
) -> Answers:
    """Await ``batches``, ``outstanding`` at a time; half-way a worker is ended, if so wanted."""
    print(f"asking:   {len(batches)} batches, {outstanding} outstanding", flush=True)
    answers: dict[int, Tensor] = {}
    latencies_ms = []

    async def client(numbers: Iterator[int]) -> None:
        for number in numbers:
            asked = time.perf_counter()
            kill = kill_one and number == len(batches) // 2
            answers[number] = await pool.predict(batches[number], kill=kill)
            latencies_ms.append(1000 * (time.perf_counter() - asked))

    start = time.perf_counter()
    numbers = iter(range(len(batches)))  # one for all clients: each takes the next
    await asyncio.gather(*(client(numbers) for _ in range(outstanding)))
    seconds = time.perf_counter() - start
    in_order = [answers[number].argmax(1) for number in range(len(batches))]
    return Answers(torch.cat(in_order), latencies_ms, seconds, pool.lost)


def report(answers: Answers, how: str) -> None:
    """Print what became of the jobs of a worker that was ``how``, and how long the answers took."""
    lost, latencies_ms = answers.lost, answers.latencies_ms
    p50, p99 = np.percentile(latencies_ms, [50, 99])
    per_second = len(latencies_ms) / answers.seconds
    images_per_second = len(answers.digits) / answers.seconds
    if lost:
        ended = ", ".join(sorted({job.worker for job in lost}))
        broken = sum(job.was_read for job in lost)
        print(f"{how + ':':10}{ended}, in the middle of a job")
        print(f"broken:   {broken} promises that it had read; {len(lost) - broken} more it had not")
        print(f"repeated: {len(lost)} jobs, by the other worker")
    print(f"answered: {len(latencies_ms)} batches, {len(answers.digits)} images")
    print(f"latency:  p50 {p50:.2f} ms, p99 {p99:.2f} ms, at most {max(latencies_ms):.2f} ms")
    print(f"throughput: {per_second:.0f} batches/s, {images_per_second:.0f} images/s in all that")
