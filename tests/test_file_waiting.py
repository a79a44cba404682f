"""Threads that wait, with limits and callbacks, for what other processes fulfil."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import producers
import pytest
import torch
import uvloop
from forked import check
from futures import WAITS, assert_memory_stays_flat, blocked_in
from helpers import Worker
from peer import Peer
from producers import Promise

import dtorch_ops

LIMIT_MS = 30_000


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with Peer("fork") as process:
        yield process


def pending() -> tuple[Any, Any]:
    promise = Promise()
    return promise, promise.get_future()


_SETTER = """
def setter(link):
    while data := hear(link):
        for index, promise in enumerate(pickle.loads(data)):
            promise.set_value(torch.tensor(float(index)))
setter = forked(setter)

def ended():
    setter.say(b"")
    setter.end()
"""


# ---- Threads ------------------------------------------------------------------------------------


def test_a_blocked_thread_and_a_callback_on_one_future(peer: Peer) -> None:
    for index in range(50):
        promise, future = pending()
        called: list[float] = []
        done = threading.Event()

        def callback(f: Any, called: Any = called, done: Any = done) -> None:
            called.append(f.value().item())
            done.set()

        if index % 2:
            future.add_done_callback(callback)
        worker = (
            blocked_in(lambda f=future: f.wait(LIMIT_MS)) if index < 10 else Worker(future.wait)
        )
        if not index % 2:
            future.add_done_callback(callback)
        peer.call(producers.set_many, [promise], float(index))
        assert worker.finish().item() == index  # type: ignore[attr-defined]
        assert done.wait(20)
        assert called == [index]


@pytest.mark.parametrize("callback_too", [False, True])
def test_threads_that_wait_for_one_future_in_every_way(peer: Peer, callback_too: bool) -> None:
    for _ in range(5):
        promise, future = pending()
        seen = threading.Event()
        if callback_too:
            future.add_done_callback(lambda f, seen=seen: seen.set())
        workers = [
            blocked_in(functools.partial(way, promise.get_future()))
            for way in [*WAITS.values(), WAITS["wait"]]
        ]
        peer.call(producers.set_full, promise, 2.0)
        for worker in workers:
            assert worker.finish().tolist() == [2.0] * 3  # type: ignore[attr-defined]
        assert not callback_too or seen.wait(20)


@pytest.mark.parametrize("size", [(3,), (100_000,), (0,)], ids=str)
def test_the_mode_of_the_thread_that_waits_makes_no_difference_to_the_value(
    peer: Peer, size: tuple[int, ...]
) -> None:
    """Another reader may be training with it."""

    def wait_in_inference_mode(future: Any) -> Any:
        with torch.inference_mode():
            return future.wait(LIMIT_MS)

    for _ in range(20):
        promise, future = pending()
        promise.token()  # from here on it may be fulfilled elsewhere, and is waited for there
        waiter = blocked_in(functools.partial(wait_in_inference_mode, future))
        peer.call(producers.set_full, promise, 2.0, size)
        waiter.finish()
        value = future.get()
        assert not value.is_inference()
        value.requires_grad_()
        (value * 3).sum().backward()
        assert torch.equal(value.grad, torch.full(size, 3.0))


def test_a_waiter_whose_time_is_up_leaves_the_others_alone(peer: Peer) -> None:
    for _ in range(20):
        promise, future = pending()
        patient = blocked_in(future.wait)
        with pytest.raises(TimeoutError):
            future.wait(1)
        peer.call(producers.set_full, promise, 2.0)
        assert patient.finish().tolist() == [2.0] * 3  # type: ignore[attr-defined]


def test_a_broken_promise_wakes_waiters_and_callbacks(peer: Peer) -> None:
    promise, future = pending()
    called = threading.Event()
    future.add_done_callback(lambda f: called.set())
    workers = [blocked_in(future.wait) for _ in range(3)]
    peer.call(producers.drop, promise)
    for worker in workers:
        with pytest.raises(dtorch_ops.BrokenPromiseError):
            worker.finish()
    assert called.wait(20)


# ---- Event loops --------------------------------------------------------------------------------


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop() if request.param == "asyncio" else uvloop.new_event_loop()
    yield made
    made.close()


def test_as_completed_of_what_another_process_fulfils(
    peer: Peer, loop: asyncio.AbstractEventLoop
) -> None:
    promises = [pending() for _ in range(100)]
    futures = [future for _, future in promises]

    async def main() -> list[float]:
        peer.start(producers.set_many, [promise for promise, _ in promises])
        return [f.value().item() async for f in dtorch_ops.as_completed(futures, LIMIT_MS)]

    assert sorted(loop.run_until_complete(main())) == [float(i) for i in range(100)]
    peer.finish()


def test_a_cancelled_await_leaves_the_future_alone(
    peer: Peer, loop: asyncio.AbstractEventLoop
) -> None:
    promise, future = pending()
    peer.call(producers.hold, promise)

    async def main() -> float:
        for _ in range(3):
            task = asyncio.ensure_future(future)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(future, 0.01)
        assert not future.is_ready() and future.valid()
        waiting = asyncio.gather(future, future)
        peer.start(producers.set_held)
        first, second = await asyncio.wait_for(waiting, LIMIT_MS / 1000)
        assert first is second
        return first.item()

    assert loop.run_until_complete(main()) == 0.0
    assert peer.finish() == "none"
    peer.call(producers.release)


def test_a_loop_that_was_closed_before_the_value_came_is_no_error() -> None:
    """It is the listening thread that finds it closed."""
    check(
        _SETTER
        + textwrap.dedent("""
        promise, future = pending()
        loop = asyncio.new_event_loop()
        async def wait():
            await future
        task = loop.create_task(wait())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        called = threading.Event()
        future.add_done_callback(lambda f: called.set())
        setter.say(pickle.dumps([promise]))
        assert called.wait(LIMIT)
        assert future.get().item() == 0
        task._log_destroy_pending = False
        ended()
        """)
    )


# ---- Time limits --------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_values_that_arrive_while_time_limits_pass(peer: Peer, threads: int) -> None:
    """Whether a wait ends by the value or by its limit, nothing is lost."""
    rng = random.Random(7)
    for _ in range(15):
        promises = [pending() for _ in range(40)]
        peer.start(producers.set_many, [promise for promise, _ in promises])

        def read(seed: int, promises: Any = promises) -> list[float]:
            rng = random.Random(seed)
            values = []
            for _, future in promises:
                while True:
                    try:
                        values.append(future.wait(rng.choice([0, 0.01, 0.05, 0.1, 1])).item())
                        break
                    except TimeoutError:
                        continue
            return values

        workers = [Worker(functools.partial(read, rng.random())) for _ in range(threads)]
        for worker in workers:
            assert worker.finish() == [float(i) for i in range(40)]
        peer.finish()


HUGE = [None, 2**31, 2**53, 2**62, 2**63, 2**200, 9.3e18, float("inf")]


@pytest.mark.parametrize("ms", HUGE, ids=str)
def test_a_huge_limit_is_no_overflow(peer: Peer, ms: Any) -> None:
    for wait in (
        lambda f: f.wait(ms),
        lambda f: dtorch_ops.wait_all([f], ms)[0],
        lambda f: next(dtorch_ops.as_completed([f], ms)).value(),
    ):
        promise, future = pending()
        promise.token()
        waiter = blocked_in(functools.partial(wait, future))
        assert waiter.is_alive()
        peer.call(producers.set_full, promise, 2.0)
        assert waiter.finish().tolist() == [2.0] * 3  # type: ignore[attr-defined]


def test_zero_only_looks_and_a_negative_limit_is_a_value_error() -> None:
    promise, future = pending()
    promise.token()
    begin = time.monotonic()
    for _ in range(100):
        for look in (
            lambda: future.wait(0),
            lambda: dtorch_ops.wait_all([future], 0),
            lambda: torch.ops.dtorch.wait_for(future, 0),
        ):
            with pytest.raises(TimeoutError):
                look()
    assert time.monotonic() - begin < 10, "300 looks have blocked"
    for ms in (-1, -(2**200), float("nan")):
        with pytest.raises(ValueError, match="timeout_ms"):
            future.wait(ms)
    promise.set_value(torch.ones(1))
    assert future.wait(0).item() == 1


def test_a_group_with_time_limits(peer: Peer) -> None:
    for _ in range(10):
        promises = [pending() for _ in range(30)]
        futures = [future for _, future in promises]
        peer.start(producers.set_many, [promise for promise, _ in promises])
        while True:
            try:
                values = dtorch_ops.wait_all(futures, 0.05)
                break
            except TimeoutError:
                continue
        assert [v.item() for v in values] == [float(i) for i in range(30)]
        peer.finish()


# ---- Ctrl-C -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wait", ["future.get()", "future.wait()", "future.wait(60000)", "dtorch_ops.wait_all([future])"]
)
def test_ctrl_c_and_then_the_value(wait: str) -> None:
    check(
        f"""
        def worker(link):
            promise = pickle.loads(hear(link))
            # Once the main thread sleeps in its wait.
            stat = f"/proc/{{os.getppid()}}/stat"
            asleep = 0
            while asleep < 5:
                time.sleep(0.005)
                with open(stat) as file:
                    asleep = asleep + 1 if file.read().rpartition(")")[2].split()[0] == "S" else 0
            say(link, repr(time.monotonic()).encode())
            os.kill(os.getppid(), signal.SIGINT)
            hear(link)
            promise.set_value(torch.tensor(5.0))
        child = forked(worker)
        promise, future = pending()
        child.say(pickle.dumps(promise))
        try:
            {wait}
            raise AssertionError("not interrupted")
        except KeyboardInterrupt:
            now = time.monotonic()
        assert now - float(child.hear()) < 1
        assert not future.is_ready() and future.valid()
        child.say()
        assert future.wait(LIMIT * 1000).item() == 5.0
        assert future.get().item() == 5.0
        child.end()
        """
    )


# ---- Callbacks that block -----------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True], ids=["side by side", "and nested"])
def test_callbacks_that_block_on_what_arrives_in_the_same_instant(nested: bool) -> None:
    """However deep: each blocked callback leaves another thread to listen."""
    check(
        _SETTER
        + textwrap.dedent(f"""
        for round in range(20):
            promises = [pending() for _ in range(7)]
            futures = [future for _, future in promises]
            chained = [
                first.then(lambda f, second=second: f.value() + second.wait(5000))
                for first, second in zip(futures, futures[1:])
            ]
            sum_of_all = futures[0]
            for i in range(1, 7 if {nested} else 1):
                sum_of_all = sum_of_all.then(
                    lambda f, i=i, futures=futures: f.value() + futures[i].wait(5000)
                )
            setter.say(pickle.dumps([promise for promise, _ in promises]))
            assert [value_of(child).item() for child in chained] == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
            assert value_of(sum_of_all).item() == (21.0 if {nested} else 0.0)
        ended()
        """)
    )


@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_callbacks_that_block_on_each_other_in_turn(order: str) -> None:
    check(
        _SETTER
        + textwrap.dedent(f"""
        values = list(range(7)) if {order!r} == "forwards" else list(range(6, -1, -1))
        for _ in range(20):
            promises = [pending() for _ in range(7)]
            futures = [future for _, future in promises]
            results = [None] * 7
            done = threading.Semaphore(0)
            def block(f, i, futures=futures, results=results, done=done):
                following = futures[i + 1].wait(5000).item() if i < 6 else 0
                results[i] = f.value().item() + following
                done.release()
            for i, future in enumerate(futures):
                future.add_done_callback(lambda f, i=i, block=block: block(f, i))
            setter.say(pickle.dumps([promises[i][0] for i in values]))
            for _ in range(7):
                assert done.acquire(timeout=10), "a callback hangs"
            following = [*values[1:], 0]
            assert results == [a + b for a, b in zip(values, following)]
        ended()
        """)
    )


def test_each_blocked_callback_costs_one_thread_until_it_returns() -> None:
    """Those that come meanwhile are called all the same."""
    check(
        _SETTER
        + textwrap.dedent("""
        def threads():
            return len(os.listdir("/proc/self/task"))
        def set_all(promises):
            setter.say(pickle.dumps([promise for promise, _ in promises]))
        first = [pending()]
        first[0][1].add_done_callback(lambda f: None)
        set_all(first)
        value_of(first[0][1])
        until(lambda: threads() == 2)  # this one, and the one that listens
        for count in (1, 6, 20):
            gate, entered = threading.Event(), threading.Semaphore(0)
            def block(f, gate=gate, entered=entered):
                entered.release()
                gate.wait(LIMIT)
            promises = [pending() for _ in range(count)]
            for _, future in promises:
                future.add_done_callback(block)
            set_all(promises)
            for _ in range(count):
                assert entered.acquire(timeout=LIMIT), "a blocked callback holds up another"
            until(lambda: threads() <= 2 + count)
            others = [pending() for _ in range(100)]
            called = threading.Semaphore(0)
            for _, future in others:
                future.add_done_callback(lambda f: called.release())
            set_all(others)
            for _ in others:
                assert called.acquire(timeout=LIMIT)
            until(lambda: threads() <= 2 + count)
            gate.set()
            until(lambda: threads() == 2)
        ended()
        """)
    )


def test_a_callback_that_blocks_while_the_main_thread_waits(peer: Peer) -> None:
    for _ in range(20):
        first, second = pending(), pending()
        child = first[1].then(lambda f, s=second[1]: f.value() + s.wait(LIMIT_MS))
        waiting = Worker(lambda c=child: c.wait(LIMIT_MS))
        peer.start(producers.set_many, [first[0], second[0]], 1.0)
        assert second[1].wait(LIMIT_MS).item() == 2.0
        assert waiting.finish().item() == 3.0  # type: ignore[attr-defined]
        peer.finish()


def test_a_time_limit_on_a_child_whose_callback_blocks(peer: Peer) -> None:
    first, second = pending(), pending()
    child = first[1].then(lambda f: f.value() + second[1].wait(LIMIT_MS))
    peer.call(producers.set_many, [first[0]], 1.0)
    with pytest.raises(TimeoutError):
        child.wait(20)
    peer.call(producers.set_many, [second[0]], 2.0)
    assert child.wait(LIMIT_MS).item() == 3.0


# ---- What is left -------------------------------------------------------------------------------


def _timed_out(future: Any) -> None:
    for wait in (
        lambda: future.wait(0.001),
        lambda: dtorch_ops.wait_all([future], 0),
        lambda: next(dtorch_ops.as_completed([future], 0)),
        lambda: torch.ops.dtorch.wait_for(future, 0),
    ):
        with pytest.raises(TimeoutError):
            wait()


async def _cancelled(future: Any) -> None:
    task = asyncio.ensure_future(future)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("way", ["timed out", "cancelled", "group", "promises"])
def test_waits_that_came_to_nothing_leave_nothing(way: str) -> None:
    promise, future = pending()
    promise.token()
    loop = asyncio.new_event_loop()

    def made_and_dropped() -> None:
        mine, its_future = pending()
        mine.token()
        with pytest.raises(TimeoutError):
            its_future.wait(0)

    steps = {
        "timed out": lambda: _timed_out(future),
        "cancelled": lambda: loop.run_until_complete(_cancelled(future)),
        "group": lambda: dtorch_ops.collect_any([dtorch_ops.collect_all([future]), future]),
        "promises": made_and_dropped,
    }
    assert_memory_stays_flat(steps[way], 1000)
    loop.close()
    promise.set_value(torch.ones(1))
    assert future.get().item() == 1


# ---- While nothing happens ----------------------------------------------------------------------


def test_thousands_that_are_outstanding_cost_no_core() -> None:
    """With every way to wait for some of them; and then each gets its value."""
    check(
        _SETTER
        + textwrap.dedent("""
        promises = [pending() for _ in range(5000)]
        futures = [future for _, future in promises]
        data = pickle.dumps([promise for promise, _ in promises])
        called = threading.Semaphore(0)
        for future in futures[:1000]:
            future.add_done_callback(lambda f: called.release())
        group = dtorch_ops.collect_all(futures)
        threads = [threading.Thread(target=wait, daemon=True) for wait in (
            futures[0].wait, lambda: dtorch_ops.wait_all(futures), group.wait,
            lambda: list(dtorch_ops.as_completed(futures)),
        )]
        for thread in threads:
            thread.start()
        def switches():
            total = 0
            for task in os.listdir("/proc/self/task"):
                with open(f"/proc/self/task/{task}/status") as status:
                    total += sum(int(line.split()[1]) for line in status if "ctxt_switches" in line)
            return total
        async def main():
            async def one(future):
                return await future
            tasks = [asyncio.ensure_future(one(future)) for future in futures[1000:2000]]
            await asyncio.sleep(0.2)
            count = len(os.listdir("/proc/self/task"))
            before, woken = time.process_time(), switches()
            await asyncio.sleep(1)
            used, woken = time.process_time() - before, switches() - woken
            assert woken < 50, f"{woken} times a thread was woken in an idle second"
            assert used < 0.02, f"{used} s of processor time in an idle second"
            assert count <= 2 + len(threads), count
            setter.say(data)
            values = await asyncio.wait_for(asyncio.gather(*tasks), 20)
            assert [v.item() for v in values] == [float(i) for i in range(1000, 2000)]
        asyncio.run(main())
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        for _ in range(1000):
            assert called.acquire(timeout=20)
        ended()
        """)
    )


def test_signals_stay_with_the_main_thread(peer: Peer) -> None:
    """The thread that listens takes none: a handler runs where it should."""
    promise, future = pending()
    peer.call(producers.set_full, promise, 1.0)
    future.wait(LIMIT_MS)
    handled: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.append(threading.get_ident()))
    try:
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert set(handled) == {threading.main_thread().ident}
