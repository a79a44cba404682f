"""Workers of one ``torch.distributed.rpc`` group, whose promises go through RPC alone."""

from __future__ import annotations

import multiprocessing
import os
import socket
from multiprocessing.reduction import ForkingPickler
from typing import Any

from peer import LIMIT, Peer, _serve
from torch.distributed import rpc

import dtorch_ops

OWNER = "owner"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join(name: str, rank: int, world_size: int, port: int) -> None:
    dtorch_ops.network.init(
        name,
        rank=rank,
        world_size=world_size,
        init_method=f"tcp://127.0.0.1:{port}",
        interface="lo",
    )


def far_away(pickled: bytes) -> bytes:
    """Its promises as another machine sees them, which has no way to the owner's memory."""
    return bytes(pickled).replace(f"@{OWNER}".encode(), f"={OWNER}".encode())


def _serve_worker(connection: Any, name: str, rank: int, world_size: int, port: int) -> None:
    join(name, rank, world_size, port)
    connection.send((True, os.getpid()))
    _serve(connection)
    rpc.shutdown(graceful=False)


class Worker(Peer):
    """A :class:`Peer` that is told what to do through a pipe, and fulfils promises through RPC."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.name = f"worker{rank}"
        self.process = context.Process(
            target=_serve_worker, args=(theirs, self.name, rank, world_size, port), daemon=True
        )
        self.process.start()
        theirs.close()

    def start(self, function: Any, *args: object) -> None:
        self._connection.send_bytes(far_away(ForkingPickler.dumps((function, args))))


class Group:
    """This process, ``OWNER``, and some workers, which are handed out one after the other."""

    def __init__(self, workers: int) -> None:
        port = free_port()
        self._workers = [Worker(rank, workers + 1, port) for rank in range(1, workers + 1)]
        join(OWNER, 0, workers + 1, port)
        for worker in self._workers:
            worker.finish()
        self._free = iter(self._workers)

    def take(self) -> Worker:
        return next(self._free)

    def close(self) -> None:
        rpc.shutdown(graceful=False)
        for worker in self._workers:
            if worker.process.is_alive():
                worker.kill()
            worker.process.join(LIMIT)
