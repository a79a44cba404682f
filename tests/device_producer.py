"""A process that fulfils promises with values of the fake accelerator."""

from __future__ import annotations

import atexit
import gc
import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import fake_accelerator as fake
import torch
from on_accelerator import forked
from torch import Tensor

SIZE = 100_000  # of float32: large enough not to go through the host


def calls(allocated: int = 0, freed: int = 0, opened: int = 0, closed: int = 0) -> tuple[int, ...]:
    return allocated, freed, opened, closed


class Producer:
    """A child that sets the promises it is sent: to ``make(number)``, counted from 1."""

    def __init__(
        self, make: Callable[[int], Tensor], before: Callable[[], object] = lambda: None
    ) -> None:
        fake.share_memory()
        self.child = forked(lambda link: self._serve(link, make, before))

    @staticmethod
    def _serve(
        link: Connection, make: Callable[[int], Tensor], before: Callable[[], object]
    ) -> None:
        before()
        number = 0
        while (message := link.recv()) is not None:
            if callable(message):
                link.send(message())
                continue
            number += 1
            promise = pickle.loads(message)
            promise.set_value(make(number))
            del promise
            link.send("set")

    def fulfil(self, promise: Any) -> None:
        self.child.say(pickle.dumps(promise))
        assert self.child.hear() == "set"

    def ask(self, function: Callable[[], Any]) -> Any:
        self.child.say(function)
        return self.child.hear()

    def end(self) -> None:
        self.child.say(None)
        self.child.end()


def full(number: float) -> Tensor:
    return torch.full((SIZE,), float(number), device="fake:1")


def check(value: Tensor, number: float) -> None:
    assert value.device == torch.device("fake:1") and value.shape == (SIZE,)
    assert value.unique().tolist() == [number]


def pinned_allocations() -> int:
    return fake.pinned_memory().allocations


KINDS = {
    "transposed": lambda: torch.arange(SIZE * 2.0, device="fake:1").view(2, SIZE).t(),
    "strided": lambda: torch.arange(SIZE * 2.0, device="fake:1")[::2],
    "expanded": lambda: torch.ones(1, device="fake:1").expand(SIZE),
    "conjugate": lambda: torch.ones(SIZE, dtype=torch.complex64, device="fake:1").conj(),
    "half": lambda: torch.ones(SIZE, dtype=torch.float16, device="fake:1"),
    "bool": lambda: torch.ones(SIZE, dtype=torch.bool, device="fake:1"),
    "with a gradient": lambda: torch.ones(SIZE, device="fake:1", requires_grad=True),
    "of eight dimensions": lambda: torch.ones((SIZE,) + (1,) * 7, device="fake:1"),
    "of nine dimensions": lambda: torch.ones((SIZE,) + (1,) * 8, device="fake:1"),
    "small": lambda: torch.ones(10, device="fake:1"),
}


def release() -> None:
    fake.release("fake:1")


def syncs() -> dict[str, int]:
    return fake.counters().my_syncs()


def fail_copy() -> None:
    fake.fail_next("copy", "the copy has failed")


def fail_open() -> None:
    fake.fail_sharing("open")


def leave_python() -> None:
    atexit._run_exitfuncs()
    os._exit(0)


class WriteAndRelease:
    """Pickled by name, run in the child: all that it has made is written to, and goes on."""

    def __call__(self) -> None:
        for each in gc.get_objects():
            if (
                isinstance(each, torch.Tensor)
                and each.shape == (SIZE,)
                and each.device.type == "fake"
            ):
                each.fill_(7)
        fake.release("fake:1")
