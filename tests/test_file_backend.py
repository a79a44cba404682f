"""Promises that are fulfilled by another process of this machine, through shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import producers
import pytest
import torch
from helpers import ROOT, check_python
from peer import Peer
from producers import Promise

import dtorch_ops

LIMIT_MS = 30_000


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with Peer() as process:
        yield process


# ---- Values -------------------------------------------------------------------------------------


def test_slots_are_used_again_while_their_last_events_are_told(peer: Peer) -> None:
    for _ in range(50):
        promises = [Promise() for _ in range(20)]
        for index, promise in enumerate(promises):
            peer.start(producers.set_full, promise, float(index))
        values = dtorch_ops.wait_all([p.get_future() for p in promises], LIMIT_MS)
        assert [v[0].item() for v in values] == [float(i) for i in range(20)]
        for _ in promises:
            peer.finish()


def test_thousands_outstanding_cost_no_descriptor_and_no_thread(peer: Peer) -> None:
    def count(folder: str) -> int:
        return len(os.listdir(f"/proc/self/{folder}"))

    first = Promise()
    peer.call(producers.set_full, first, 0.0)
    first.get_future().wait(LIMIT_MS)
    descriptors, threads = count("fd"), count("task")
    promises = [Promise() for _ in range(3000)]
    peer.call(producers.hold, *promises)
    assert count("fd") <= descriptors
    assert count("task") <= threads
    peer.start(producers.set_held)
    values = dtorch_ops.wait_all([p.get_future() for p in promises], LIMIT_MS)
    assert peer.finish() == "none"
    peer.call(producers.release)
    assert [v.item() for v in values] == [float(i) for i in range(3000)]
    assert count("fd") <= descriptors


# ---- Errors and ends ----------------------------------------------------------------------------


def test_the_last_of_several_producers_breaks_it(peer: Peer) -> None:
    promise = Promise()
    future = promise.get_future()
    with Peer() as second:
        peer.call(producers.hold, promise)
        second.call(producers.hold, promise)
        second.kill()
    with pytest.raises(TimeoutError):
        future.wait(200)
    assert peer.call(producers.set_held) == "none"
    peer.call(producers.release)
    assert future.wait(LIMIT_MS).item() == 0.0


def test_one_of_two_producers_wins_and_the_other_is_told(peer: Peer) -> None:
    promises = [Promise() for _ in range(300)]
    with Peer() as second:
        peer.call(producers.hold, *promises)
        second.call(producers.hold, *promises)
        peer.start(producers.set_held)
        second.start(producers.set_held)
        values = dtorch_ops.wait_all([p.get_future() for p in promises], LIMIT_MS)
        told = [peer.finish(), second.finish()]
        peer.call(producers.release)
    assert "PromiseAlreadySatisfiedError" in told
    assert [v.item() for v in values] == [float(i) for i in range(300)]


def test_the_owner_that_died_is_told_to_the_producer(peer: Peer) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    code = (
        "import os, sys, dtorch_ops\n"
        "promise = dtorch_ops.TensorPromise()\n"
        "os.write(int(sys.argv[1]), promise.token().encode())\n"
        "os.close(int(sys.argv[1]))\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(write)], stdin=subprocess.PIPE, pass_fds=[write], cwd=ROOT
    )
    os.close(write)
    with os.fdopen(read) as pipe:
        token = pipe.read()
    promise = Promise.from_token(token)
    assert promise.is_pending()
    owner.kill()
    owner.communicate(timeout=60)
    with pytest.raises(dtorch_ops.BrokenPromiseError, match="ended"):
        promise.set_value(torch.ones(1))


def test_the_owner_s_object_may_go_first(peer: Peer) -> None:
    promise = Promise()
    future = promise.get_future()
    peer.call(producers.hold, promise)
    del promise
    with pytest.raises(TimeoutError):
        future.wait(100)
    assert peer.call(producers.set_held) == "none"
    peer.call(producers.release)
    assert future.wait(LIMIT_MS).item() == 0.0


# ---- What is left behind ------------------------------------------------------------------------


def test_short_lived_workers_leave_nothing() -> None:
    """Workers one after the other: descriptors and mappings do not grow with their number."""

    def counts() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            mappings = sum("dtorch_ops (deleted)" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), mappings

    def one_worker() -> None:
        promise = Promise()
        code = (
            "import sys, torch, dtorch_ops\n"
            "promise = dtorch_ops.TensorPromise.from_token(sys.argv[1])\n"
            "promise.set_value(torch.ones(100_000))\n"
        )
        arguments = [sys.executable, "-c", code, promise.token()]
        subprocess.run(arguments, check=True, timeout=60, cwd=ROOT)
        assert promise.get_future().get().sum().item() == 100_000

    one_worker()
    settled = threading.Event()
    before = counts()
    for _ in range(4):
        one_worker()
    for _ in range(100):
        if counts() <= before:
            break
        settled.wait(0.05)
    assert counts() <= before


def test_exit_with_promises_outstanding_is_clean() -> None:
    check_python(
        """
        import pickle
        promises = [dtorch_ops.TensorPromise() for _ in range(10)]
        futures = [p.get_future() for p in promises]
        tokens = [pickle.dumps(p) for p in promises]
        futures[0].add_done_callback(print)
        """
    )
