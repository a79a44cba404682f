"""Who waits for events: what it costs the caller, how many threads, and what is stuck.

On the fake accelerator, or CUDA; each test in a process of its own (on_accelerator.py).
"""

from __future__ import annotations

import asyncio
import threading
import time

import fake_accelerator as fake
import pytest
import torch
from on_accelerator import *  # noqa: F403

import dtorch_ops

pytestmark = pytest.mark.timeout(600)  # the first one may have to build the fake


# ---- What it costs the caller -------------------------------------------------------------------


@on_accelerator()
def test_the_caller_never_synchronises_and_nobody_polls():
    tensor = torch.ones(3, device=DEVICE)
    value_of(dtorch_ops.to_torch_async(tensor))
    drain(DEVICE)
    with nobody_synchronises():
        with held(DEVICE):
            futures = [dtorch_ops.to_torch_async(tensor) for _ in range(100)]
            futures += [dtorch_ops.to_torch_async(tensor, copy=True) for _ in range(10)]
            futures[0].add_done_callback(lambda f: f.value())
            assert_pending(*futures[::20])
        dtorch_ops.wait_all(futures, LIMIT_MS)
        futures[1].get()
        asyncio_value = []

        async def main():
            asyncio_value.append(await futures[2])

        asyncio.run(main())
        dtorch_ops.to_torch(tensor)


@on_fake(DEPTH)
def test_ten_thousand_pending_futures_on_four_streams_cost_four_threads():
    tensor = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    remote = torch.ones(3, device=DEVICES[-1])
    drain(DEVICES[-1])
    streams = [current_stream(), *new_streams(2), torch.Stream(DEVICES[-1])]
    assert our_threads() == []
    futures = []
    with held(*streams):
        for stream in streams:
            with stream:
                source = tensor if stream.device == tensor.device else remote
                futures += [dtorch_ops.to_torch_async(source) for _ in range(2500)]
        until_waiting(1)
        assert 1 <= len(our_threads()) <= 4
        assert not any(future.is_ready() for future in futures[::100])
    dtorch_ops.wait_all(futures, LIMIT_MS)
    assert len(our_threads()) <= 4
    until(lambda: our_threads() == [], 2 * LIMIT)
    # And they come again.
    assert value_of(dtorch_ops.to_torch_async(tensor)).tolist() == [1, 1, 1]


@on_accelerator()
def test_no_thread_for_what_is_not_used():
    dtorch_ops.to_torch_async(torch.ones(3)).get()
    promise = dtorch_ops.TensorPromise()
    promise.get_future()
    dtorch_ops.sync()
    torch.ones(3, device=DEVICE)
    assert our_threads() == []


@on_fake(CPU_TIME)
def test_a_thousand_pending_futures_cost_no_cpu_time():
    """Nobody polls: the threads sleep through it, and so does the loop."""
    tensor = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    streams = new_streams(4)
    futures = []

    def switches():
        total = 0
        for thread in our_threads():
            with open(f"/proc/self/task/{thread}/status") as status:
                total += sum(int(line.split()[1]) for line in status if "ctxt_switches" in line)
        return total

    async def main():
        waiting = [asyncio.ensure_future(future) for future in futures[::10]]
        await asyncio.sleep(0.1)
        before, used = switches(), time.process_time()
        await asyncio.sleep(1)
        assert switches() - before <= 20
        assert time.process_time() - used < 0.1
        for stream in streams:
            release(stream)
        await asyncio.gather(*waiting)

    with held(*streams):
        for stream in streams:
            with stream:
                futures += [dtorch_ops.to_torch_async(tensor) for _ in range(250)]
        asyncio.run(main())
    dtorch_ops.wait_all(futures, LIMIT_MS)


@on_accelerator()
def test_a_callback_that_blocks_holds_back_no_other_future_of_its_stream():
    tensor = torch.ones(3, device=DEVICE)
    gate, entered = threading.Event(), threading.Semaphore(0)

    def block(future):
        entered.release()
        assert gate.wait(LIMIT)

    with held(DEVICE):
        blocking = [dtorch_ops.to_torch_async(tensor) for _ in range(3)]
        for future in blocking:
            future.add_done_callback(block)
        others = [dtorch_ops.to_torch_async(tensor) for _ in range(5)]
        called = threading.Event()
        others[-1].add_done_callback(lambda f: called.set())
    dtorch_ops.wait_all([*blocking, *others], LIMIT_MS)
    assert called.wait(LIMIT)
    for _ in blocking:
        assert entered.acquire(timeout=LIMIT)
    value_of(dtorch_ops.to_torch_async(tensor))  # one that comes while they block
    assert not gate.is_set()
    gate.set()
    until(lambda: our_threads() == [], 2 * LIMIT)


@on_accelerator()
def test_a_callback_may_wait_for_a_later_future_of_the_same_stream():
    tensor = torch.ones(3, device=DEVICE)
    results = []
    done = threading.Event()
    with held(DEVICE):
        futures = [dtorch_ops.to_torch_async(tensor) for _ in range(20)]

        def chain(index):
            def callback(future):
                if index + 1 < len(futures):
                    results.append(futures[index + 1].wait(LIMIT_MS))
                else:
                    done.set()

            return callback

        for index, future in enumerate(futures):
            future.add_done_callback(chain(index))
    assert done.wait(LIMIT)
    until(lambda: len(results) == 19)


@on_accelerator()
def test_a_callback_that_raises_harms_no_other():
    """What it raised is reported where a callback's error is."""
    tensor = torch.ones(3, device=DEVICE)
    errors = []
    with held(DEVICE):
        first = dtorch_ops.to_torch_async(tensor)
        chained = first.then(lambda f: 1 / 0)
        chained.add_done_callback(lambda f: errors.append(error_of(f.value)))
        second = dtorch_ops.to_torch_async(tensor)
    assert value_of(first) is tensor and value_of(second) is tensor
    assert isinstance(error_of(lambda: chained.wait(LIMIT_MS)), ZeroDivisionError)


@on_accelerator()
def test_callers_of_many_threads_and_streams_at_once():
    def call(index):
        stream = torch.Stream(DEVICES[index % len(DEVICES)])
        with stream:
            tensor = torch.zeros(2, device=stream.device)
            for number in range(100):
                tensor = tensor + 1
                value = dtorch_ops.to_torch_async(tensor).wait(LIMIT_MS)
                if number % 25 == 0:
                    assert value.tolist() == [number + 1] * 2

    workers = [Worker(lambda index=index: call(index)) for index in range(8)]
    for worker in workers:
        worker.finish()


# ---- Work that is stuck -------------------------------------------------------------------------


@on_accelerator()
def test_a_stuck_stream_holds_up_no_other():
    tensor = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    stuck = new_streams(8)
    with held(*stuck):
        pending = []
        for stream in stuck:
            with stream:
                pending += [dtorch_ops.to_torch_async(tensor) for _ in range(3)]
        for stream in [current_stream(), torch.Stream(DEVICE), torch.Stream(DEVICES[-1])]:
            with stream:
                value_of(dtorch_ops.to_torch_async(torch.ones(2, device=stream.device)))
        assert_pending(*pending)
        # In any order.
        for index in reversed(range(8)):
            release(stuck[index])
            dtorch_ops.wait_all(pending[3 * index : 3 * index + 3], LIMIT_MS)
            assert_pending(*pending[: 3 * index])


@on_fake(DELAYS)
def test_an_event_that_never_fires_beside_ten_that_do():
    tensor = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    fake.lose_next_event()
    lost = dtorch_ops.to_torch_async(tensor)
    drain(DEVICE)
    futures = []
    for stream in [*new_streams(7), *[torch.Stream(device) for device in DEVICES[1:4]]]:
        with stream:
            futures.append(dtorch_ops.to_torch_async(torch.ones(2, device=stream.device)))
    dtorch_ops.wait_all(futures, LIMIT_MS)
    assert_pending(lost)
    assert isinstance(error_of(lambda: lost.wait(50)), TimeoutError)

    async def main():
        try:
            await asyncio.wait_for(lost, 0.05)
            raise AssertionError("no timeout")
        except asyncio.TimeoutError:
            pass

    asyncio.run(main())
    any_of = dtorch_ops.collect_any([lost, futures[0]])
    assert value_of(any_of).tolist() == [1, 1]
    # And the process ends with it pending.


@on_accelerator(timeout=60)
def test_a_callback_that_comes_as_its_future_completes_may_wait_for_the_next():
    """It is run by the very thread that waits for the stream."""
    tensor = torch.ones(3, device=DEVICE)
    for attempt in range(1500):
        first = dtorch_ops.to_torch_async(tensor)
        second = dtorch_ops.to_torch_async(tensor)
        for _ in range(attempt % 60):
            pass
        done = threading.Event()
        outcome = []

        def wait(_, second=second, outcome=outcome, done=done):
            try:
                outcome.append(second.wait(LIMIT_MS))
            except BaseException as error:
                outcome.append(error)
            done.set()

        first.add_done_callback(wait)
        assert done.wait(LIMIT)
        assert isinstance(outcome[0], torch.Tensor), outcome
