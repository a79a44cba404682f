"""Errors of an accelerator, of calls, and what a graph capture refuses.

On the fake accelerator, or CUDA; each test in a process of its own (on_accelerator.py).
"""

from __future__ import annotations

import threading

import fake_accelerator as fake
import pytest
import torch
from on_accelerator import *  # noqa: F403

import dtorch_ops

pytestmark = pytest.mark.timeout(600)  # the first one may have to build the fake


# ---- Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kernel", "event"])
@on_fake(FAULTS)
def test_an_error_of_the_device_completes_what_waits_for_it_and_nothing_else(kind):
    tensor, other = torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICES[1])
    drain(DEVICE)
    drain(DEVICES[1])
    before = dtorch_ops.to_torch_async(tensor)
    value_of(before)
    with held(DEVICE), held(DEVICES[1]):
        fake.fail_next(kind, "the kernel went wrong")
        tensor.add_(1)
        failed = [dtorch_ops.to_torch_async(tensor) for _ in range(3)]
        healthy = dtorch_ops.to_torch_async(other)
        assert_pending(*failed, healthy)
        release(DEVICE)
        for future in failed:
            for _ in range(2):
                error = error_of(lambda future=future: value_of(future))
                assert isinstance(error, RuntimeError), repr(error)
                assert "the kernel went wrong" in str(error)
        assert_pending(healthy)
    assert value_of(healthy).tolist() == [1, 1, 1]
    # A later call is told at once, and after the device was reset all is well.
    assert "the kernel went wrong" in str(error_of(lambda: dtorch_ops.to_torch(tensor)))
    fake.reset_errors()
    assert value_of(before) is tensor
    assert value_of(dtorch_ops.to_torch_async(torch.ones(2, device=DEVICE))).tolist() == [1, 1]


@pytest.mark.parametrize("way", READ_WAYS)
@on_fake(FAULTS)
def test_every_way_of_reading_raises_the_error_of_the_device(way):
    tensor = torch.ones(3, device=DEVICE)
    fake.fail_next("kernel", "the kernel went wrong")
    with held(DEVICE):
        tensor.add_(1)
        future = dtorch_ops.to_torch_async(tensor)
    error_of(lambda: future.wait(LIMIT_MS))
    for _ in range(2):
        error = error_of(lambda: READ_WAYS[way](future))
        assert "the kernel went wrong" in str(error), repr(error)


@on_fake(FAULTS)
def test_an_error_reaches_who_is_blocked_and_who_awaits():
    tensor = torch.ones(3, device=DEVICE)
    fake.fail_next("kernel", "the kernel went wrong")
    hold(DEVICE)
    tensor.add_(1)
    future = dtorch_ops.to_torch_async(tensor)
    ways = {name: way for name, way in WAIT_WAYS.items() if not name.startswith("script")}
    workers = {
        name: blocked_in(lambda way=way: error_of(lambda: way(future)))
        for name, way in ways.items()
        if name != "callback"
    }
    called, errors = threading.Event(), []
    future.add_done_callback(lambda f: (errors.append(error_of(f.value)), called.set()))
    release(DEVICE)
    for name, worker in workers.items():
        worker.join(LIMIT)
        assert not worker.is_alive(), f"{name} hangs"
        assert "the kernel went wrong" in str(worker.result), name
    assert called.wait(LIMIT), "the callback was not called"
    assert "the kernel went wrong" in str(errors[0])


@on_fake(FAULTS)
def test_an_error_of_the_wait_itself_reaches_its_future_alone():
    tensor = torch.ones(3, device=DEVICE)
    fake.fail_call("synchronize_event", "the wait went wrong")
    with held(DEVICE):
        future = dtorch_ops.to_torch_async(tensor)
        error = error_of(lambda: value_of(future))
    assert "the wait went wrong" in str(error)
    assert value_of(dtorch_ops.to_torch_async(tensor)).tolist() == [1, 1, 1]


@on_fake(FAULTS)
def test_an_error_of_the_call_is_raised_by_the_call():
    tensor = torch.ones(3, device=DEVICE)
    for call in (
        lambda: dtorch_ops.to_torch_async(tensor),
        lambda: torch.ops.dtorch.get_tensor_async(tensor),
        lambda: dtorch_ops.to_torch_async(tensor, copy=True),
    ):
        fake.fail_call("event", "no event")
        error = error_of(call)
        assert type(error) is torch.AcceleratorError and "no event" in str(error), repr(error)
        assert value_of(call()).tolist() == [1, 1, 1]
    fake.fail_call("alloc", "no memory")
    error = error_of(lambda: dtorch_ops.to_torch_async(tensor, copy=True))
    assert type(error) is torch.OutOfMemoryError and "no memory" in str(error), repr(error)


@on_fake(FAULTS)
def test_an_error_of_one_stream_s_device_ends_what_is_held_there():
    """Nobody waits for ever for a stream of a device that has failed."""
    tensor = torch.ones(3, device=DEVICE)
    side = torch.Stream(DEVICE)
    drain(DEVICE)
    with held(side):
        with side:
            stuck = dtorch_ops.to_torch_async(tensor)
        fake.lose_next_event()
        lost = dtorch_ops.to_torch_async(tensor)
        until_waiting(2)
        fake.fail_next("kernel", "broken")
        tensor.add_(1)
        for future in (stuck, lost):
            assert "broken" in str(error_of(lambda future=future: value_of(future)))


@on_accelerator()
def test_a_device_that_does_not_exist_is_a_value_error():
    tensor = torch.ones(3, device=DEVICE)
    for device in (f"{DEVICE}:64", 7, torch.device(DEVICE, 100)):
        for source in (tensor, torch.ones(3)):
            error = error_of(lambda d=device, s=source: dtorch_ops.to_torch_async(s, device=d))
            assert isinstance(error, ValueError), repr(error)
            assert DEVICES[0] in str(error) and DEVICES[-1] in str(error)


# ---- Graph capture ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@on_fake(CAPTURES)
def test_a_capture_of_the_current_stream_refuses_every_call_and_stays_intact(mode):
    drain(DEVICE)
    for name, call in capture_refusals().items():
        with fake.capturing(DEVICE, mode) as capture:
            error = error_of(call)
        assert isinstance(error, RuntimeError), (name, error)
        assert "graph capture" in str(error).lower(), (name, error)
        assert not isinstance(error, torch.AcceleratorError), (name, error)
        assert capture.intact, name
        result = call()
        if isinstance(result, torch._C.Future):
            value_of(result)  # or its wait, on another thread, would spoil the next capture


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@on_fake(CAPTURES)
def test_a_capture_of_the_current_stream_leaves_promises_pending(mode):
    for name, (promise, call) in promise_refusals().items():
        drain(DEVICE)
        with fake.capturing(DEVICE, mode) as capture:
            error = error_of(lambda call=call, promise=promise: call(promise))
        assert isinstance(error, RuntimeError), (name, error)
        assert "graph capture" in str(error).lower(), (name, error)
        assert capture.intact and promise.is_pending(), name
        call(promise)
        value_of(promise.get_future())


@on_fake(CAPTURES)
def test_a_capture_of_a_side_stream_refuses_calls_on_it_alone():
    tensor = torch.ones(3, device=DEVICE)
    side = torch.Stream(DEVICE)
    with fake.capturing(side, "relaxed") as capture:
        with side:
            assert "graph capture" in str(error_of(tensor.to_torch_async)).lower()
        assert value_of(dtorch_ops.to_torch_async(tensor)) is tensor
    assert capture.intact


@on_fake(CAPTURES)
def test_a_capture_is_not_disturbed_by_a_future_whose_event_fires_meanwhile():
    tensor = torch.ones(3, device=DEVICE)
    side = torch.Stream(DEVICE)
    drain(DEVICE)
    hold(DEVICE)
    future = dtorch_ops.to_torch_async(tensor)
    until_waiting(1)
    with fake.capturing(side) as capture:
        with side:
            tensor.add_(1)
        release(DEVICE)
        value_of(future)
    assert capture.intact


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
@on_fake(CAPTURES)
def test_a_capture_of_another_kind_is_not_disturbed_by_many_futures(mode):
    tensor = torch.ones(3, device=DEVICE)
    side = torch.Stream(DEVICE)
    drain(DEVICE)
    with held(DEVICE):
        futures = [dtorch_ops.to_torch_async(tensor) for _ in range(20)]
        with fake.capturing(side, mode) as capture:
            with side:
                tensor.add_(1)
            futures += [dtorch_ops.to_torch_async(tensor) for _ in range(20)]
            release(DEVICE)
            dtorch_ops.wait_all(futures, LIMIT_MS)
    assert capture.intact


@on_fake(CAPTURES)
def test_futures_that_outlive_a_capture_of_all_threads_complete_or_say_why():
    """With mode global no thread may wait for an event; the future does not hang by it."""
    tensor = torch.ones(3, device=DEVICE)
    side = torch.Stream(DEVICE)
    drain(DEVICE)
    hold(DEVICE)
    futures = [dtorch_ops.to_torch_async(tensor) for _ in range(5)]
    until_waiting(1)
    with fake.capturing(side):
        release(DEVICE)
        value_of(futures[0])
    for future in futures:
        try:
            value_of(future)
        except RuntimeError as error:
            assert "captur" in str(error)


@on_fake(FAULTS)
def test_who_waits_is_told_if_the_device_refuses_as_the_future_completes():
    tensor = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    hold(DEVICE)
    future = dtorch_ops.to_torch_async(tensor)
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    worker = blocked_in(lambda: error_of(lambda: future.wait(LIMIT_MS)))
    fake.fail_call("event", "no event to be had")
    release(DEVICE)
    worker.join(LIMIT)
    assert not worker.is_alive() and "no event to be had" in str(worker.result)
    assert called.wait(LIMIT)
