"""Graphs: a fetch within a capture is refused, and one elsewhere does not disturb it.

Run on the fake accelerator too, as far as it can: what it captures is dropped.
"""

from __future__ import annotations

import threading

import accelerators
import pytest
import torch
from on_accelerator import *  # noqa: F403

import dtorch_ops

pytestmark = pytest.mark.timeout(600)

modes = pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])

# Those in which something else may wait for the device meanwhile.
_cuda = pytest.mark.skipif(
    accelerators.NAME != "cuda", reason="the fake's threads cannot wait while all are captured"
)
modes_beside = pytest.mark.parametrize(
    "mode", [pytest.param("global", marks=_cuda), "thread_local", "relaxed"]
)


@modes
@on_accelerator()
def test_every_call_within_a_capture_is_refused_and_the_graph_is_right(mode):
    counted = torch.zeros(3, device=DEVICE)
    counted.add_(1)  # the kernel is loaded
    torch.accelerator.synchronize()
    for name, call in capture_refusals().items():
        with capturing(mode) as graph:
            error = error_of(call)
            counted.add_(1)
        assert isinstance(error, RuntimeError), (name, error)
        assert "graph capture" in str(error).lower(), (name, error)
        graph.assert_replay(counted, [counted[0].item() + 1] * 3)
        result = call()  # and now it works
        if isinstance(result, torch._C.Future):
            value_of(result)


@modes
@on_accelerator()
def test_promises_stay_pending_within_a_capture(mode):
    tensor = torch.zeros(3, device=DEVICE)
    tensor.add_(1)
    torch.accelerator.synchronize()
    for name, (promise, call) in promise_refusals().items():
        with capturing(mode):
            error = error_of(lambda call=call, promise=promise: call(promise))
            tensor.add_(1)
        assert "graph capture" in str(error).lower(), (name, error)
        assert promise.is_pending(), name
        call(promise)
        value_of(promise.get_future())


@pytest.mark.parametrize("kind", ["itself", "to the host", "sync"])
@modes_beside
@on_accelerator()
def test_fetches_of_another_thread_do_not_disturb_a_capture(kind, mode):
    captured, fetched = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE)
    captured.add_(1)

    def fetch():
        if kind == "sync":
            return dtorch_ops.sync_future(DEVICE)
        return dtorch_ops.to_torch_async(fetched, device="cpu" if kind == "to the host" else None)

    for _ in range(100):
        value_of(fetch())  # all memory, events and threads that it takes are there
    torch.accelerator.synchronize()
    begun, go_on = threading.Event(), threading.Event()

    def others():
        assert begun.wait(LIMIT)
        for _ in range(50):
            value_of(fetch())
        go_on.set()

    worker = Worker(others)
    with capturing(mode) as graph:
        captured.add_(1)
        begun.set()
        assert go_on.wait(LIMIT)
        captured.add_(1)
    worker.finish(LIMIT)
    graph.assert_replay(captured, [3, 3, 3])


@modes_beside
@on_accelerator()
def test_a_future_that_completes_during_a_capture_does_not_disturb_it(mode):
    captured, fetched = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE)
    captured.add_(1)
    value_of(dtorch_ops.to_torch_async(fetched))
    torch.accelerator.synchronize()
    hold(DEVICE)
    futures = [dtorch_ops.to_torch_async(fetched) for _ in range(20)]
    until_waiting(1)
    with capturing(mode) as graph:
        captured.add_(1)
        release(DEVICE)
        until(lambda: all(future.is_ready() for future in futures))
        captured.add_(1)
    graph.assert_replay(captured, [3, 3, 3])


@on_cuda("the fake's graphs compute nothing")
def test_what_a_graph_computes_can_be_fetched_after_each_replay():
    counted = torch.zeros(3, device=DEVICE)
    counted.add_(1)
    torch.accelerator.synchronize()
    with capturing("global") as graph:
        counted.add_(1)
    futures = []
    for _ in range(100):
        graph.graph.replay()
        futures.append(dtorch_ops.to_torch_async(counted, device="cpu"))
    values = dtorch_ops.wait_all(futures, LIMIT_MS)
    assert [value.tolist() for value in values] == [[i + 2.0] * 3 for i in range(100)]
