"""The process that makes batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function

import dtorch_ops

COLUMNS = 256


def make_batch(megabytes: int) -> Tensor:
    """Rows of numbers, each sorted: about as much work as what the other process does with them."""
    batch = torch.rand(megabytes << 20 >> 10, COLUMNS)
    return batch.sort(1).values


@contextmanager
def traced(file: Path) -> Iterator[None]:
    """Writes what happens meanwhile, in all threads of this process, to a chrome trace."""
    with dtorch_ops.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield
    profiler.export_chrome_trace(str(file))


def _serve(inbox: Connection, ready: dtorch_ops.VoidPromise, megabytes: int, trace: Path) -> None:
    torch.set_num_threads(1)
    with traced(trace):
        ready.set_value()
        while (promise := inbox.recv()) is not None:
            with record_function("make"):
                batch = make_batch(megabytes)
            promise.set_value(batch)


class Maker:
    """Starts the process, and asks it for batches. On leaving the scope its trace is written."""

    def __init__(self, megabytes: int, trace: Path) -> None:
        context = SpawnContext()
        inbox, self._outbox = context.Pipe(duplex=False)
        self._ready = dtorch_ops.VoidPromise()
        self._process = context.Process(
            target=_serve, args=(inbox, self._ready, megabytes, trace), daemon=True
        )
        self._process.start()
        inbox.close()

    def __enter__(self) -> Maker:
        self._ready.get_future().get()
        return self

    def __exit__(self, *_: object) -> None:
        self._outbox.send(None)
        self._process.join()

    def ask(self) -> dtorch_ops.TensorFuture:
        """The next batch, once it is made. Returns at once."""
        promise = dtorch_ops.TensorPromise()
        self._outbox.send(promise)
        return promise.get_future()
