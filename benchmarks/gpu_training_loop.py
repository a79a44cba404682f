"""A training loop that logs its loss in each step: with ``.item()``, and with futures."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import nn

import dtorch_ops

from .common import Figure, Settings, Target, compare, expect
from .common import measure as take
from .gpu_device import Accelerator


class Loop:
    """Always the same steps, from the same weights: both ways must log the same."""

    def __init__(self, device: torch.device, steps: int, width: int) -> None:
        self._steps, self._width = steps, width
        self._inputs = torch.linspace(-1, 1, 64 * width).reshape(64, width).to(device)
        self._targets = self._inputs.flip(0)
        self._device = device
        self.expected: list[float] = []

    def train(self, on_loss: Callable[[torch.Tensor], object]) -> None:
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Linear(self._width, self._width), nn.Tanh(), nn.Linear(self._width, self._width)
        ).to(self._device)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, foreach=False)
        for _ in range(self._steps):
            loss = (network(self._inputs) - self._targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            on_loss(loss.detach())

    def with_item(self) -> list[float]:
        logged: list[float] = []
        self.train(lambda loss: logged.append(loss.item()))
        return logged

    def with_futures(self) -> list[float]:
        """Each loss is logged as soon as it is there, and the last ones at the end."""
        logged: list[float] = []
        pending: deque[dtorch_ops.TensorFuture] = deque()

        def on_loss(loss: torch.Tensor) -> None:
            pending.append(dtorch_ops.to_torch_async(loss, device="cpu", copy=True))
            while pending and pending[0].is_ready():
                logged.append(float(pending.popleft().get()))

        self.train(on_loss)
        logged += [float(value) for value in dtorch_ops.wait_all(list(pending))]
        return logged

    def timed(self, way: Callable[[], list[float]]) -> float:
        """Microseconds for each step, up to the last loss logged."""
        begin = time.perf_counter()
        logged = way()
        used = time.perf_counter() - begin
        self.expected = self.expected or logged
        close = torch.allclose(torch.tensor(logged), torch.tensor(self.expected), rtol=1e-3)
        expect(close, "the losses logged")
        return used / self._steps * 1e6


def run(settings: Settings, here: Accelerator) -> list[Figure]:
    steps = settings.count(200, 10)
    loop = Loop(here.device, steps, width=settings.count(1024, 8))
    ways = {"item": loop.with_item, "futures": loop.with_futures}
    samples = {name: functools.partial(loop.timed, way) for name, way in ways.items()}
    series = take(samples, settings.rounds)
    # What is left of those that making the network costs, whichever way its loss is read.
    quiet = here.synchronisations(lambda: loop.train(lambda loss: None))
    waits = {name: here.synchronisations(way) - quiet for name, way in ways.items()}
    baseline = "the same with .item() in each step"
    return [
        compare(
            "gpu.training_step",
            "a training step that logs its loss with a future",
            baseline,
            subject=series["futures"],
            baseline=series["item"],
            unit="µs",
            target=Target(1.0),
        ),
        compare(
            "gpu.training_steps_per_second",
            "the same as steps in a second",
            baseline,
            subject=[1e6 / step for step in series["futures"]],
            baseline=[1e6 / step for step in series["item"]],
            unit="/s",
        ),
        compare(
            "gpu.training_waits",
            "how often a step waits for the device because of it",
            baseline,
            subject=[waits["futures"] / steps],
            baseline=[waits["item"] / steps],
            unit="",
            target=Target(0.0, "subject"),
        ),
    ]
