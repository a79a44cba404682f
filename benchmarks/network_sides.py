"""Two processes that know each other through ``torch.distributed.rpc``, over TCP on loopback.

The owner waits for tensors, the worker makes them. Both are told what to do through pipes, which
is outside of every figure.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed
from torch.distributed import rpc

import dtorch_ops

from .common import expect
from .contents import Contents, batch
from .file_latency import PAUSE
from .partner import CONTEXT, Caller, Partner, obey

#: How RPC carries things, by name. Between two machines TensorPipe has TCP alone, for large tensors
#: over several connections; on one machine it would take shared memory or read the other process's.
TRANSPORTS: dict[str, dict[str, Any]] = {
    "tcp": {"_transports": ["uv"], "_channels": ["mpt_uv", "basic"]},
    "basic": {"_transports": ["uv"], "_channels": ["basic"]},  # one connection for all
    "init": {},  # dtorch_ops.network.init's choice
    "default": {"_transports": None},  # rpc.init_rpc's
}
#: Threads of the worker that fulfil promises where several do.
THREADS = 8
#: Seconds that whatever the two are told together may take.
LIMIT = 600


def free_port() -> int:
    """Not one that the system gives away by itself: RPC listens on such ones."""
    while True:
        port = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def join(name: str, rank: int, world_size: int, port: int, transports: str) -> None:
    dtorch_ops.network.init(
        name,
        rank=rank,
        world_size=world_size,
        init_method=f"tcp://127.0.0.1:{port}",
        interface="lo",
        **TRANSPORTS[transports],
    )


def _join_gloo(rank: int, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )


@dataclass(frozen=True)
class Took:
    """Microseconds."""

    one_way: float  # from just before the call to the tensor in hand
    call: float  # until the call has returned


# ---- What RPC runs -------------------------------------------------------------------------------

# In the owner: what came, its number, and when the function that was called had it, in ns.
_inbox: queue.SimpleQueue[tuple[torch.Tensor, int, int]] = queue.SimpleQueue()


def _take(tensor: torch.Tensor, number: int) -> None:
    _inbox.put((tensor, number, time.monotonic_ns()))


# In the worker.
_contents = Contents()


def _produce(size: int, number: int) -> tuple[torch.Tensor, int]:
    tensor = _contents.tensor(size, number)
    time.sleep(PAUSE)
    return tensor, time.monotonic_ns()


# ---- The process that makes tensors --------------------------------------------------------------


class Worker:
    """What takes a number of a tensor returns the instants before and after, in ns."""

    def __init__(self, owner: Connection, ports: tuple[int, int], transports: str) -> None:
        torch.set_num_threads(1)
        self._owner = owner
        self._ports = ports
        self._transports = transports
        self._held: list[dtorch_ops.TensorPromise] = []
        self._tensors: list[torch.Tensor] = []

    def serve(self) -> None:
        join("worker", 1, 2, self._ports[0], self._transports)
        _join_gloo(1, self._ports[1])
        obey(self._owner, self)

    def leave(self) -> None:
        self._held = []
        torch.distributed.destroy_process_group()
        rpc.shutdown()

    def processor_time(self) -> float:
        return time.process_time()

    # One tensor, after a pause in which both processes go to sleep.

    def set_value(
        self, promise: dtorch_ops.TensorPromise, size: int, number: int
    ) -> tuple[int, int]:
        tensor = _contents.tensor(size, number)
        time.sleep(PAUSE)
        began = time.monotonic_ns()
        promise.set_value(tensor)
        return began, time.monotonic_ns()

    def rpc_async(self, size: int, number: int) -> tuple[int, int]:
        tensor = _contents.tensor(size, number)
        time.sleep(PAUSE)
        began = time.monotonic_ns()
        rpc.rpc_async("owner", _take, args=(tensor, number)).wait()
        return began, time.monotonic_ns()

    def send(self, size: int, number: int) -> tuple[int, int]:
        """By gloo."""
        tensor = _contents.tensor(size, number)
        time.sleep(PAUSE)
        began = time.monotonic_ns()
        torch.distributed.send(tensor, 0)
        return began, time.monotonic_ns()

    # Many, without a pause. Each returns the instant before the first.

    def hold(self, pickled: list[bytes]) -> float:
        """Microseconds to unpickle one."""
        began = time.perf_counter()
        self._held = [pickle.loads(each) for each in pickled]
        cost = (time.perf_counter() - began) / len(pickled) * 1e6
        right = all(promise.is_pending() for promise in self._held)
        expect(right, "unpickled promises")  # the owner has heard that they are held, too
        return cost

    def ready(self, count: int, size: int) -> None:
        self._tensors = batch(count, size)

    def fulfil(self) -> int:
        began = time.monotonic_ns()
        for promise, tensor in zip(self._held, self._tensors, strict=True):
            promise.set_value(tensor)
        return began

    def fulfil_by_threads(self) -> int:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(abs, range(THREADS)))  # the threads are there
            began = time.monotonic_ns()
            pairs = zip(self._held, self._tensors, strict=True)
            list(pool.map(lambda pair: pair[0].set_value(pair[1]), pairs))
        return began

    def rpc_sync_each(self) -> int:
        began = time.monotonic_ns()
        for number, tensor in enumerate(self._tensors):
            rpc.rpc_sync("owner", _take, args=(tensor, number))
        return began

    def rpc_async_all(self) -> int:
        began = time.monotonic_ns()
        calls = [
            rpc.rpc_async("owner", _take, args=(tensor, number))
            for number, tensor in enumerate(self._tensors)
        ]
        torch.futures.wait_all(calls)
        return began

    def drop(self) -> float:
        self._held = []
        return 0.0

    def look(self, count: int) -> float:
        """Microseconds to ask the owner whether a promise is pending, and be told."""
        held = self._held[0]
        began = time.perf_counter()
        pending = sum(held.is_pending() for _ in range(count))
        ended = time.perf_counter()
        expect(pending == count, "a promise that is pending")
        return (ended - began) / count * 1e6


# ---- The process that waits ----------------------------------------------------------------------


class Owner:
    """Each method with a size takes one measurement, and checks all of what came."""

    def __init__(self, worker: Connection, ports: tuple[int, int], transports: str) -> None:
        torch.set_num_threads(1)
        self._worker = Caller(worker, LIMIT)
        self._ports = ports
        self._transports = transports
        self._contents = Contents()
        self._number = 0
        self._promises: list[dtorch_ops.TensorPromise] = []
        self._futures: list[dtorch_ops.TensorFuture] = []
        self._expected: list[torch.Tensor] = []

    def join(self) -> None:
        join("owner", 0, 2, self._ports[0], self._transports)
        _join_gloo(0, self._ports[1])

    def leave(self) -> None:
        self._promises, self._futures = [], []
        self._worker.tell("leave")
        torch.distributed.destroy_process_group()
        rpc.shutdown()
        self._worker.answer()
        self._worker.close()

    def _took(self, tensor: torch.Tensor, ended: int, what: str) -> Took:
        began, returned = self._worker.answer()
        self._contents.check(tensor, self._number, what)
        return Took((ended - began) / 1e3, (returned - began) / 1e3)

    def ours(self, size: int) -> Took:
        self._number += 1
        promise = dtorch_ops.TensorPromise(mode="network")
        future = promise.get_future()
        self._worker.tell("set_value", promise, size, self._number)
        tensor = future.wait()
        return self._took(tensor, time.monotonic_ns(), "a promise")

    def rpc_async(self, size: int, to_waiter: bool) -> Took:
        """To the function that is called, or on to the thread that waits for it."""
        self._number += 1
        self._worker.tell("rpc_async", size, self._number)
        tensor, _, called = _inbox.get()
        ended = time.monotonic_ns()
        return self._took(tensor, ended if to_waiter else called, "rpc_async")

    def rpc_result(self, size: int) -> float:
        """The way back: from the end of a function in the worker to who waits for its result."""
        self._number += 1
        future = rpc.rpc_async("worker", _produce, args=(size, self._number))
        tensor, began = future.wait()
        ended = time.monotonic_ns()
        self._contents.check(tensor, self._number, "the result of an rpc_async")
        return float(ended - began) / 1e3

    def gloo(self, size: int) -> Took:
        """Into memory that is there and warm."""
        self._number += 1
        tensor = torch.zeros(size, dtype=torch.uint8)
        self._worker.tell("send", size, self._number)
        torch.distributed.recv(tensor, 1)
        return self._took(tensor, time.monotonic_ns(), "gloo")

    # Many.

    def ready(self, count: int, size: int) -> None:
        self._expected = batch(count, size)
        self._worker.call("ready", count, size)

    def hand_out(self, count: int) -> float:
        """Microseconds that it takes the worker to unpickle one of as many promises."""
        self._promises = [dtorch_ops.TensorPromise(mode="network") for _ in range(count)]
        self._futures = [promise.get_future() for promise in self._promises]
        pickled = [pickle.dumps(promise) for promise in self._promises]
        return float(self._worker.call("hold", pickled))

    def stream(self, method: str) -> float:
        """Microseconds for each of those that are handed out, which the worker's method sets."""
        self._worker.tell(method)
        tensors = [future.get() for future in self._futures]
        ended = time.monotonic_ns()
        return self._each(tensors, ended, method)

    def stream_of_rpc(self, method: str) -> float:
        self._worker.tell(method)
        came = [_inbox.get() for _ in self._expected]
        ended = time.monotonic_ns()
        tensors = [tensor for tensor, _, _ in sorted(came, key=lambda one: one[1])]
        return self._each(tensors, ended, method)

    def _each(self, tensors: list[torch.Tensor], ended: int, what: str) -> float:
        began = self._worker.answer()
        self._promises, self._futures = [], []
        right = all(map(torch.equal, tensors, self._expected))
        expect(right and len(tensors) == len(self._expected), f"what {what} gave")
        return float(ended - began) / 1e3 / len(tensors)

    def ask_worker(self, method: str, *args: Any) -> float:
        return float(self._worker.call(method, *args))

    def processor_time(self) -> float:
        """Seconds, of both processes."""
        return time.process_time() + self.ask_worker("processor_time")


@contextlib.contextmanager
def pair(owner_of: type[Owner], transports: str) -> Iterator[Partner]:
    """The owner, in a process of its own, with a worker that it gives orders to."""
    near, far = CONTEXT.Pipe()
    ports = free_port(), free_port()
    with (
        Partner(Worker, far, ports, transports, limit=LIMIT) as worker,
        Partner(owner_of, near, ports, transports, limit=LIMIT) as owner,  # ends first
    ):
        near.close()
        far.close()
        worker.tell("serve")
        owner.call("join")
        yield owner
        owner.call("leave")
        worker.answer()
