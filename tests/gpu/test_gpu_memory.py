"""Memory that is in flight is not used again, however little there is.

Run on the fake accelerator too, which poisons what was freed.
"""

from __future__ import annotations

import collections
import random

import pytest
import torch
from on_accelerator import *  # noqa: F403

import dtorch_ops

pytestmark = pytest.mark.timeout(600)  # the first one may have to build the fake


@pytest.mark.parametrize("kind", ["itself", "snapshot", "to the host", "from the host"])
@on_accelerator(timeout=60)
def test_sources_are_dropped_at_once_and_their_memory_is_asked_for_again(kind):
    limit_memory(256 << 20)
    size, chosen = 500_000, random.Random(0)  # 2 MB each
    streams = new_streams(3)
    options = {
        "itself": {},
        "snapshot": {"copy": True},
        "to the host": {"device": "cpu"},
        "from the host": {"device": DEVICE},
    }[kind]
    where = "cpu" if kind == "from the host" else DEVICE
    in_flight = collections.deque()
    for number in range(200):
        with chosen.choice(streams):
            keep_busy(chosen.uniform(0, 1))
            source = torch.full((size,), float(number), device=where)
            in_flight.append((number, dtorch_ops.to_torch_async(source, **options)))
            del source
            again = torch.full((size,), -1.0, device=where)
            del again
        if len(in_flight) > 6:
            expected, future = in_flight.popleft()
            assert value_of(future).to("cpu").unique().tolist() == [expected]
            del future
    while in_flight:
        expected, future = in_flight.popleft()
        assert value_of(future).to("cpu").unique().tolist() == [expected]


@on_accelerator()
def test_what_was_dropped_comes_back_to_the_allocator():
    tensor = torch.ones(500_000, device=DEVICE)
    drain(DEVICE)
    before = live_blocks()
    for _ in range(3):
        with held(DEVICE):
            for options in ({}, {"copy": True}, {"device": "cpu"}):
                for _ in range(5):
                    dtorch_ops.to_torch_async(tensor * 2, **options)
        until(lambda: live_blocks() == before)


@on_cuda("torch's own allocator says what it has reserved", timeout=60)
def test_a_long_run_reserves_no_more_than_a_short_one():
    def run(count):
        for number in range(count):
            tensor = torch.full((500_000,), float(number), device=DEVICE)
            value = dtorch_ops.to_torch_async(tensor, device="cpu").get()
            assert value[0].item() == number

    run(50)
    reserved = torch.cuda.memory_reserved()
    run(1000)
    assert torch.cuda.memory_reserved() <= reserved
