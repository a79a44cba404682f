"""Training with futures: what a step reports is read when it is there, and never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

import dtorch_ops


class Step(NamedTuple):
    """What a training step reports."""

    loss: float
    accuracy: float


class StepReader(Protocol):
    """Turns the loss and the accuracy of a step, which are tensors, into numbers."""

    def add(self, loss: Tensor, accuracy: Tensor) -> None: ...

    def ready(self) -> Iterator[Step]:
        """The steps that can be read now, in order; each once."""

    def remaining(self) -> Iterator[Step]:
        """All the others, after the last step."""


class FutureReader:
    """Fetches with dtorch_ops. On an accelerator the copy runs beside the steps that follow."""

    def __init__(self) -> None:
        self._pending: deque[tuple[dtorch_ops.TensorFuture, dtorch_ops.TensorFuture]] = deque()

    def add(self, loss: Tensor, accuracy: Tensor) -> None:
        # copy: the value of this moment, as .item() gives it, whatever is written to it later.
        self._pending.append(
            (
                dtorch_ops.to_torch_async(loss, device="cpu", copy=True),
                dtorch_ops.to_torch_async(accuracy, device="cpu", copy=True),
            )
        )

    def ready(self) -> Iterator[Step]:
        while self._pending and all(future.is_ready() for future in self._pending[0]):
            loss, accuracy = self._pending.popleft()
            yield Step(float(loss.get()), float(accuracy.get()))

    def remaining(self) -> Iterator[Step]:
        for futures in self._pending:
            loss, accuracy = dtorch_ops.wait_all(futures)
            yield Step(float(loss), float(accuracy))
        self._pending.clear()


class ItemReader:
    """The usual way, to compare with: each ``.item()`` waits until the device has done the step."""

    def __init__(self) -> None:
        self._read: deque[Step] = deque()

    def add(self, loss: Tensor, accuracy: Tensor) -> None:
        self._read.append(Step(loss.item(), accuracy.item()))

    def ready(self) -> Iterator[Step]:
        while self._read:
            yield self._read.popleft()

    def remaining(self) -> Iterator[Step]:
        return self.ready()


def train(
    network: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    reader: StepReader,
    on_step: Callable[[Step], None],
) -> None:
    """Train ``network``; ``on_step`` gets what each step reports, in order, once it is there."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=1e-2)
    for images, labels in batches:
        logits = network(images)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        reader.add(loss.detach(), (logits.argmax(1) == labels).float().mean())
        for step in reader.ready():
            on_step(step)
    for step in reader.remaining():
        on_step(step)
