"""Workers of one ``torch.distributed.rpc`` group, whose promises go through RPC alone."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import producers
from peer import LIMIT, Peer, _serve
from torch.distributed import rpc

import dtorch_ops

OWNER = "owner"


def free_port() -> int:
    """Not one that the system gives away by itself, to a listener of RPC's, say.

    TensorPipe ends its process when it is greeted by a store's client.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def join(name: str, rank: int, world_size: int, port: int, **options: Any) -> None:
    # RPC counts how often a process has initialised it, and waits for ever for others that have not
    # done so as often.
    rpc._init_counter = 0
    dtorch_ops.network.init(
        name,
        rank=rank,
        world_size=world_size,
        init_method=f"tcp://127.0.0.1:{port}",
        interface="lo",
        **options,
    )


def far_away(pickled: bytes) -> bytes:
    """Its promises as another machine sees them, which has no way to the owner's memory."""
    return bytes(pickled).replace(f"@{OWNER}".encode(), f"={OWNER}".encode())


def _serve_worker(
    connection: Any, name: str, rank: int, world_size: int, port: int, host: Host | None
) -> None:
    if host is None:
        join(name, rank, world_size, port)
    else:
        host.enter()
        dtorch_ops.network.init(
            name,
            rank=rank,
            world_size=world_size,
            init_method=f"tcp://{Host.address(0)}:{port}",
            interface="eth0",
            _channels=["basic"],  # another one sees that it is the same machine, and is no cable
        )
    connection.send((True, os.getpid()))
    _serve(connection)
    rpc.shutdown(graceful=False)


@dataclass
class Host:
    """A network namespace, whose ``eth0`` is one end of a cable between two."""

    name: str
    number: int

    @staticmethod
    def address(number: int) -> str:
        return f"10.231.77.{number + 1}"

    def enter(self) -> None:
        """For this process, which has no other thread yet. Its addresses are the host's alone."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/var/run/netns/{self.name}") as namespace:
            if libc.setns(namespace.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), "setns")

    def run(self, command: str) -> None:
        """``ip`` or ``tc``, in here."""
        program, *words = command.split()
        subprocess.run([program, "-n", self.name, *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Root only: OSError or CalledProcessError where that is not to be had."""
    hosts = (Host(f"dtorch-a{os.getpid()}", 0), Host(f"dtorch-b{os.getpid()}", 1))

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)

    try:
        for host in hosts:
            ip(f"netns add {host.name}")
        ends = [f"name eth0 netns {host.name}" for host in hosts]
        ip(f"link add {ends[0]} type veth peer {ends[1]}")
        for host in hosts:
            host.run(f"ip addr add {Host.address(host.number)}/24 dev eth0")
            host.run("ip link set lo up")
            host.run("ip link set eth0 up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)


def stop(pid: int) -> None:
    """Until it is: threads of a process that was sent the signal go on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


class Worker(Peer):
    """A :class:`Peer` that is told what to do through a pipe, and fulfils promises through RPC."""

    def __init__(self, rank: int, world_size: int, port: int, host: Host | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.name = f"worker{rank}"
        self.process = context.Process(
            target=_serve_worker,
            args=(theirs, self.name, rank, world_size, port, host),
            daemon=True,
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


class Two:
    """An owner and a worker, each a process that is told what to do."""

    def __init__(self, hosts: tuple[Host | None, Host | None] = (None, None)) -> None:
        port = free_port()
        self.owner, self.worker = (Worker(rank, 2, port, host) for rank, host in enumerate(hosts))
        for each in (self.owner, self.worker):
            each.finish()

    def held(self, count: int = 1) -> None:
        """Promises of the owner's, which the worker has."""
        pickled = self.owner.call(producers.make_promises, count)
        pickled = pickled.replace(b"@worker0", b"=worker0")
        self.worker.call(producers.load_and_hold, pickled)

    def join_again(self, *options: Any) -> None:
        """Shut RPC down, and initialise it anew."""
        self.worker.start(producers.shut_down)
        self.owner.call(producers.shut_down)
        self.worker.finish()
        port = free_port()
        self.worker.start(producers.join_again, 1, port, *options)
        self.owner.call(producers.join_again, 0, port)
        self.worker.finish()
        self.worker.call(producers.release)

    def close(self) -> None:
        for each in (self.owner, self.worker):
            if each.process.is_alive():
                each.kill()
