"""CUDA IPC: values that go from device memory to device memory of another process.

What does not depend on the driver is in test_device_sharing.py, on the fake accelerator.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from on_accelerator import *  # noqa: F403

import dtorch_ops

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("segments", ["fixed", "expandable"])
@on_cuda("its driver shares memory between processes", timeout=60)
def test_large_values_arrive_without_the_host_and_survive_their_producer(segments):
    promises, futures = zip(*[pending() for _ in range(8)], strict=True)

    def producer(link):
        if segments == "expandable":
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        for number, own in enumerate(pickle.loads(link.recv())):
            tensor = torch.zeros(4_000_000, device=DEVICE)
            keep_busy(5)
            own.set_value(tensor.fill_(number))
            tensor.fill_(-1)
        link.recv()

    child = forked(producer)
    child.say(pickle.dumps(promises))
    until(lambda: all(future.is_ready() for future in futures), 4 * LIMIT)
    assert dtorch_ops.stats()["device_bytes"] >= 16_000_000
    child.kill()
    for number, future in enumerate(futures):
        value = future.get()
        assert value.device == torch.device(DEVICE)
        assert bool((value == number).all())
    until(lambda: dtorch_ops.stats()["device_bytes"] == 0)


@on_cuda("its driver shares memory between processes", timeout=60)
def test_values_follow_each_other_through_the_same_memory():
    def producer(link):
        while (message := link.recv()) is not None:
            number, token = message
            own = pickle.loads(token)
            own.set_value(torch.full((1_000_000,), float(number), device=DEVICE))
            del own

    child = forked(producer)
    kept = []
    for number in range(100):
        promise, future = pending()
        child.say((number, pickle.dumps(promise)))
        kept.append(value_of(future))
    assert all(bool((value == number).all()) for number, value in enumerate(kept))
    assert dtorch_ops.stats()["device_bytes"] <= 3 * (4 << 20)
    child.say(None)
    child.end()
