"""Serving with promises: clients are coroutines, and a network sets what they await."""

from __future__ import annotations

import asyncio
import time
import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn

import dtorch_ops

BATCH_LIMIT = 64
# TorchScript optimises in its first calls, which no client should have to wait for.
WARM_UP_CALLS = 3
Promise = torch.classes.dtorch.TensorPromise  # the name that TorchScript knows the class by


class Answering(nn.Module):
    """Runs a network on a batch and gives each client its row. Works in eager and scripted."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, promises: list[Promise]) -> None:
        probabilities = self.network(images).softmax(1)
        for row, promise in zip(probabilities.unbind(), promises):  # noqa: B905 (TorchScript)
            torch.ops.dtorch.get_tensor(row, promise)


def scripted(answering: Answering) -> nn.Module:
    """The same as TorchScript, which fulfils the promises by itself, without Python."""
    with warnings.catch_warnings():
        # torch 2.13 calls torch.jit.script deprecated. Those who have models in TorchScript still
        # need it, which is what this shows.
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(answering)


class Server:
    """Collects what clients ask for into batches, and answers these in a worker thread."""

    def __init__(self, answering: nn.Module) -> None:
        self._answering = answering
        self._requests: asyncio.Queue[tuple[Tensor, dtorch_ops.TensorPromise]] = asyncio.Queue()

    def ask(self, image: Tensor) -> dtorch_ops.TensorFuture:
        """The probabilities of the ten digits, to be awaited."""
        promise = dtorch_ops.TensorPromise()
        self._requests.put_nowait((image, promise))
        return promise.get_future()

    async def run(self) -> None:
        """Serve until cancelled. While a batch is computed, the requests of the next gather."""
        while True:
            batch = [await self._requests.get()]
            while not self._requests.empty() and len(batch) < BATCH_LIMIT:
                batch.append(self._requests.get_nowait())
            images, promises = zip(*batch, strict=True)
            await asyncio.to_thread(self._answer, torch.stack(images), list(promises))

    def _answer(self, images: Tensor, promises: list[dtorch_ops.TensorPromise]) -> None:
        try:
            with torch.no_grad():
                self._answering(images, promises)
        except Exception as error:
            for promise in promises:  # whoever awaits one gets this error, and the server goes on
                if promise.is_pending():
                    promise.set_exception(error)


class Answers(NamedTuple):
    probabilities: Tensor
    """Of each image, by each network, of each digit."""
    latencies_ms: list[float]


async def _client(
    servers: list[Server], images: Tensor, indices: range
) -> list[tuple[int, Tensor, float]]:
    answers = []
    for index in indices:
        start = time.perf_counter()
        rows = await asyncio.gather(*(server.ask(images[index]) for server in servers))
        milliseconds = 1000 * (time.perf_counter() - start)
        answers.append((index, torch.stack(rows), milliseconds))
    return answers


async def serve(answerings: list[nn.Module], images: Tensor, clients: int) -> Answers:
    """Serve ``answerings`` to ``clients`` that share ``images`` and ask for one at a time each."""
    servers = [Server(answering) for answering in answerings]
    running = [asyncio.create_task(server.run()) for server in servers]
    shares = [range(first, len(images), clients) for first in range(clients)]
    try:
        for _ in range(WARM_UP_CALLS):
            await asyncio.gather(*(server.ask(images[0]) for server in servers))
        answered = await asyncio.gather(*(_client(servers, images, share) for share in shares))
    finally:
        for task in running:
            task.cancel()
    in_order = sorted((answer for share in answered for answer in share), key=lambda a: a[0])
    _, rows, latencies = zip(*in_order, strict=True)
    return Answers(torch.stack(rows), list(latencies))
