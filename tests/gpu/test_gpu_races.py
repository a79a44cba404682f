"""Long kernels against reads from other streams and threads: nobody ever sees an earlier value.

Run on the fake accelerator too, where they show at least that they can be run.
"""

from __future__ import annotations

import asyncio
import collections
import queue
import random
import threading

import pytest
import torch
from on_accelerator import *  # noqa: F403

import dtorch_ops

pytestmark = pytest.mark.timeout(600)  # the first one may have to build the fake


@pytest.mark.parametrize("kind", ["itself", "snapshot", "to the host", "promise"])
@on_accelerator(timeout=60)
def test_a_thousand_reads_from_side_streams_see_the_work_before_the_fetch(kind):
    races, chosen = 250, random.Random(0)
    writers = new_streams(4)
    to_read = queue.Queue(maxsize=16)

    def fetch(tensor):
        if kind == "promise":
            promise = dtorch_ops.TensorPromise()
            promise.set_value(tensor)
            return promise.get_future()
        options = {"snapshot": {"copy": True}, "to the host": {"device": "cpu"}}.get(kind, {})
        return dtorch_ops.to_torch_async(tensor, **options)

    def read():
        side = torch.Stream(DEVICE)
        with side:
            while (item := to_read.get()) is not None:
                number, future = item
                value = future.wait(LIMIT_MS)
                assert value.to("cpu").unique().tolist() == [number]

    readers = [Worker(read) for _ in range(4)]
    for number in range(races):
        with writers[number % 4]:
            # Below, and above, what is worth another copy.
            tensor = torch.full((chosen.choice((30_000, 500_000)),), -1.0, device=DEVICE)
            keep_busy(chosen.uniform(0, 2))
            tensor.fill_(number)
            future = fetch(tensor)
            if kind in ("snapshot", "to the host"):
                tensor.fill_(-2)  # is not to be seen either
        to_read.put((number, future))
        del tensor, future
    for _ in readers:
        to_read.put(None)
    for reader in readers:
        reader.finish(3 * LIMIT)


@on_accelerator(timeout=60)
def test_results_that_are_written_to_are_not_those_of_another_fetch():
    """Each has memory of its own, for as long as anybody has it, whatever is in flight."""
    tensor = torch.zeros(300_000, device=DEVICE)
    in_flight = collections.deque()
    for number in range(300):
        tensor.fill_(number)
        in_flight.append((number, dtorch_ops.to_torch_async(tensor, device="cpu")))
        if len(in_flight) > 8:
            expected, future = in_flight.popleft()
            value = value_of(future)
            assert value.unique().tolist() == [expected]
            value.fill_(-1)
    for expected, future in in_flight:
        assert value_of(future).unique().tolist() == [expected]


@on_accelerator()
def test_callbacks_and_coroutines_see_it_too():
    async def main():
        side = torch.Stream(DEVICE)

        async def one(number):
            tensor = torch.full((1000,), -1.0, device=DEVICE)
            keep_busy(1)
            value = await dtorch_ops.to_torch_async(tensor.fill_(number))
            with side:
                assert value.to("cpu").unique().tolist() == [number]

        await asyncio.gather(*(one(number) for number in range(100)))

    asyncio.run(main())
    seen, done = [], threading.Event()
    for number in range(100):
        tensor = torch.full((1000,), -1.0, device=DEVICE)
        keep_busy(1)
        future = dtorch_ops.to_torch_async(tensor.fill_(number))

        def look(f, number=number):
            # Callbacks have a current stream of their own.
            seen.append(f.value().to("cpu").unique().tolist() == [number])
            if len(seen) == 100:
                done.set()

        future.add_done_callback(look)
    assert done.wait(LIMIT)
    assert all(seen)
