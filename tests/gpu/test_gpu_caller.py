"""What it costs the caller and the process: no wait for the device, few threads, no busy waiting.

Run on the fake accelerator too.
"""

from __future__ import annotations

import time

import pytest
import torch
from on_accelerator import *  # noqa: F403

import dtorch_ops

pytestmark = pytest.mark.timeout(600)  # the first one may have to build the fake


@on_accelerator()
def test_every_call_returns_while_the_stream_is_stuck_and_none_synchronises():
    tensor, large = torch.zeros(3, device=DEVICE), torch.zeros(1_000_000, device=DEVICE)
    host = pinned(3, value=2)
    operator = torch.ops.dtorch.get_tensor_async

    def fulfilled(call):
        promise = dtorch_ops.TensorPromise()
        call(promise)
        return promise.get_future()

    calls = {
        "itself": lambda: dtorch_ops.to_torch_async(tensor),
        "method": lambda: tensor.to_torch_async(),
        "operator": lambda: operator(tensor),
        "snapshot": lambda: dtorch_ops.to_torch_async(tensor, copy=True),
        "to the host": lambda: dtorch_ops.to_torch_async(tensor, device="cpu"),
        "large to the host": lambda: dtorch_ops.to_torch_async(large, device="cpu"),
        "promise": lambda: fulfilled(lambda p: p.set_value(tensor)),
        "get_tensor": lambda: fulfilled(lambda p: torch.ops.dtorch.get_tensor(tensor, p)),
        "sync": lambda: dtorch_ops.sync_future(DEVICE),
        "sync of all": lambda: dtorch_ops.sync_future(),
    }
    for call in calls.values():
        value_of(call())
    value_of(dtorch_ops.to_torch_async(host, device=DEVICE))
    drain(DEVICE)
    with nobody_synchronises():
        with held(DEVICE):
            tensor.add_(1)
            futures = {name: call() for name, call in calls.items()}
            for name, future in futures.items():
                assert not future.done(), name
            # What comes from the host waits for nothing that is stuck.
            uploaded = dtorch_ops.to_torch_async(host, device=DEVICE)
            uploaded.wait(LIMIT_MS)
        values = {name: future.wait() for name, future in futures.items()}
    drain(DEVICE)
    assert uploaded.value().tolist() == [2, 2, 2]
    for name, value in values.items():
        if value is not None and value.numel() == 3:
            assert value.tolist() == [1, 1, 1], name


@on_accelerator()
def test_ten_thousand_futures_behind_long_kernels_take_four_threads():
    tensor = torch.ones(3, device=DEVICE)
    streams = [current_stream(), *new_streams(3)]
    drain(DEVICE)
    futures = []
    for stream in streams:
        with stream:
            keep_busy(500)
    for _ in range(2500):
        for stream in streams:
            with stream:
                futures.append(dtorch_ops.to_torch_async(tensor))
                assert len(our_threads()) <= 4 if len(futures) % 500 == 0 else True
    assert len(our_threads()) <= 4
    dtorch_ops.wait_all(futures, LIMIT_MS)
    until(lambda: our_threads() == [], 2 * LIMIT)


@on_accelerator()
def test_a_thousand_pending_futures_take_less_than_a_tenth_of_a_core():
    tensor = torch.ones(3, device=DEVICE)
    value_of(dtorch_ops.to_torch_async(tensor))
    streams = new_streams(4)
    with held(*streams):
        futures = []
        for stream in streams:
            with stream:
                futures += [dtorch_ops.to_torch_async(tensor) for _ in range(250)]
        until_waiting(4)
        wall, used = time.monotonic(), time.process_time()
        time.sleep(1)  # that nothing happens can only be seen by waiting
        wall, used = time.monotonic() - wall, time.process_time() - used
        assert used < wall / 10
        assert not any(future.is_ready() for future in futures)
    dtorch_ops.wait_all(futures, LIMIT_MS)
