"""Waiting for devices: what their current streams were given so far is done.

On the fake accelerator, or CUDA; each test in a process of its own (on_accelerator.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import fake_accelerator as fake
import pytest
import torch
from on_accelerator import *  # noqa: F403

import dtorch_ops

pytestmark = pytest.mark.timeout(600)  # the first one may have to build the fake


# ---- Which devices ------------------------------------------------------------------------------


@on_accelerator(prelude=BARE_PRELUDE)
def test_an_accelerator_that_nobody_uses_has_nothing_to_wait_for_and_stays_unused():
    import dtorch_ops

    dtorch_ops.sync()
    dtorch_ops.sync(None, timeout_ms=0)
    assert dtorch_ops.sync_future().is_ready()
    assert torch.ops.dtorch.sync().done()
    for call in (
        lambda p: torch.ops.dtorch.sync(p),
        lambda p: torch.ops.dtorch.sync(p, None),
        lambda p: torch.ops.dtorch.sync(None, p),
        lambda p: torch.ops.dtorch.sync([], p),
        lambda p: torch.ops.dtorch.sync([torch.device("cpu")], p),
    ):
        promise = dtorch_ops.VoidPromise()
        call(promise)
        assert promise.get_future().is_ready()
    assert is_untouched()


@on_accelerator(devices=3)
def test_none_is_every_device_that_is_initialised_and_no_other():
    torch.ones(1, device=DEVICES[0])
    torch.ones(1, device=DEVICES[2])
    with held(DEVICES[0]), held(DEVICES[2]):
        future = dtorch_ops.sync_future()
        assert_queue(DEVICES[0], ..., "event")
        assert_queue(DEVICES[2], ..., "event")
        assert_pending(future)
        release(DEVICES[0])
        drain(DEVICES[0])
        assert_pending(future)
        release(DEVICES[2])
        assert value_of(future) is None
    assert not has_context(1) and not has_context(3)


@pytest.mark.parametrize("spelling", ["string", "device", "index", "list", "tuple", "current"])
@on_accelerator(devices=2)
def test_one_device_and_no_other(spelling):
    given = {
        "string": DEVICES[1],
        "device": torch.device(DEVICES[1]),
        "index": 1,
        "list": [DEVICES[1]],
        "tuple": (torch.device(DEVICE, 1), "cpu"),
        "current": DEVICE,
    }[spelling]
    for device in (DEVICES[0], DEVICES[1]):
        torch.ones(1, device=device)
        drain(device)
    torch.accelerator.set_device_index(1)
    with held(DEVICES[0], DEVICES[1]):
        torch.ones(1, device=DEVICES[0])
        future = dtorch_ops.sync_future(given)
        assert_queue(DEVICES[0], "kernel")
        assert_queue(DEVICES[1], "event")
        assert_pending(future)
        reach_event(DEVICES[1])
        assert value_of(future) is None


@on_accelerator(devices=4)
def test_of_several_devices_the_last_one_counts():
    devices = [DEVICES[index] for index in range(4)]
    for device in devices:
        torch.ones(1, device=device)
    with held(*devices):
        future = dtorch_ops.sync_future([*devices, "cpu", *devices])
        for device in (DEVICES[2], DEVICES[0], DEVICES[3]):
            assert_pending(future)
            release(device)
            drain(device)
            value_of(dtorch_ops.sync_future(device))
        assert_pending(future)
        release(DEVICES[1])
        assert value_of(future) is None


@on_accelerator(devices=4)
def test_a_device_that_is_named_need_not_be_in_use():
    dtorch_ops.sync(DEVICES[3], timeout_ms=LIMIT_MS)
    dtorch_ops.sync([DEVICES[1], "cpu"], timeout_ms=LIMIT_MS)
    assert dtorch_ops.sync_future([]).is_ready()
    assert dtorch_ops.sync_future("cpu").is_ready()


@on_accelerator()
def test_a_device_that_does_not_exist_is_a_value_error():
    for used in (False, True):
        if used:
            torch.ones(1, device=DEVICES[0])
        for devices in (f"{DEVICE}:64", [DEVICES[0], f"{DEVICE}:9"], 9, torch.device(DEVICE, 100)):
            for call in (dtorch_ops.sync_future, dtorch_ops.sync):
                error = error_of(lambda call=call, devices=devices: call(devices))
                assert isinstance(error, ValueError), repr(error)
                assert DEVICES[-1] in str(error), error
        promise = dtorch_ops.VoidPromise()
        error = error_of(lambda p=promise: torch.ops.dtorch.sync([torch.device(DEVICE, 9)], p))
        assert isinstance(error, ValueError), repr(error)
        assert promise.is_pending()
        assert is_initialized() is used


# ---- Which work ---------------------------------------------------------------------------------


@on_accelerator()
def test_what_was_queued_so_far_counts_and_no_later_work():
    tensor = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    with held(DEVICE):
        tensor.add_(1)
        future = dtorch_ops.sync_future(DEVICE)
        hold(DEVICE)
        tensor.add_(1)
        assert_queue(DEVICE, "kernel", "event", "kernel")
        do_work(DEVICE)
        assert_pending(future)
        reach_event(DEVICE)
        assert value_of(future) is None
        assert_queue(DEVICE, "kernel", ...)


@on_accelerator()
def test_the_current_stream_counts_and_no_other():
    tensor = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    side = torch.Stream(DEVICE)
    with held(DEVICE), side:
        tensor.add_(1)
        dtorch_ops.sync(DEVICE, timeout_ms=LIMIT_MS)
        dtorch_ops.sync(timeout_ms=LIMIT_MS)
    with held(side):
        dtorch_ops.sync(DEVICE, timeout_ms=LIMIT_MS)
        with side:
            future = dtorch_ops.sync_future()
        assert_pending(future)
    value_of(future)


@on_accelerator(devices=2)
def test_the_current_stream_of_each_device_counts():
    sides = [torch.Stream(DEVICES[0]), torch.Stream(DEVICES[1])]
    for side in sides:
        torch.accelerator.set_stream(side)
    torch.accelerator.set_device_index(0)
    with held(*sides):
        future = dtorch_ops.sync_future([DEVICES[0], DEVICES[1]])
        for side in sides:
            assert_queue(side, "event")
        reach_event(sides[1])
        assert_pending(future)
        reach_event(sides[0])
        value_of(future)


# ---- Ways to wait -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", ["get", "wait", "await", "then", "callback", "collect", "collect_all", "operator"]
)
@on_accelerator()
def test_no_way_of_waiting_is_through_before_the_event(way):
    torch.ones(1, device=DEVICE)
    drain(DEVICE)
    with held(DEVICE):
        future = dtorch_ops.sync_future(DEVICE)
        fired = threading.Event()

        def wait():
            WAIT_WAYS[way](future)
            assert fired.is_set()

        worker = blocked_in(wait)
        assert worker.is_alive()
        fired.set()
        reach_event(DEVICE)
        assert worker.finish(LIMIT) is None


@on_accelerator()
def test_sync_blocks_and_has_a_limit():
    torch.ones(1, device=DEVICE)
    with held(DEVICE):
        for wait in (
            lambda: dtorch_ops.sync(timeout_ms=0),
            lambda: dtorch_ops.sync(DEVICE, timeout_ms=20),
            lambda: dtorch_ops.sync([DEVICE, "cpu"], 20),
            lambda: dtorch_ops.sync_future().wait(20),
        ):
            assert isinstance(error_of(wait), TimeoutError)
        fired = threading.Event()

        def sync():
            dtorch_ops.sync(DEVICE)
            assert fired.is_set()

        worker = blocked_in(sync)
        assert worker.is_alive()
        fired.set()
    worker.finish(LIMIT)


@on_accelerator()
def test_ctrl_c_ends_every_wait_within_a_second_and_the_future_lives_on():
    tensor = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    sent = []

    def interrupt():
        asleep = 0
        while asleep < 5:  # in its wait: the interpreter lock it has got meanwhile
            time.sleep(0.01)
            with open(f"/proc/self/task/{os.getpid()}/stat") as stat:
                asleep = asleep + 1 if stat.read().rpartition(")")[2].split()[0] == "S" else 0
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with held(DEVICE):
        done, future = dtorch_ops.sync_future(DEVICE), dtorch_ops.to_torch_async(tensor)
        copied = dtorch_ops.to_torch_async(tensor, device="cpu")
        waits = {
            "sync": lambda: dtorch_ops.sync(DEVICE),
            "sync of all": lambda: dtorch_ops.sync(),
            "sync with a limit": lambda: dtorch_ops.sync([DEVICE], timeout_ms=60_000),
            "sync_future": lambda: done.get(),
            "to_torch": lambda: dtorch_ops.to_torch(tensor),
            "to_torch to the host": lambda: dtorch_ops.to_torch(tensor, device="cpu"),
            "get": lambda: future.get(),
            "wait": lambda: future.wait(),
            "get of a copy": lambda: copied.get(),
            "wait_all": lambda: dtorch_ops.wait_all([done, future, copied]),
        }
        for name, wait in waits.items():
            thread = threading.Thread(target=interrupt)
            thread.start()
            try:
                wait()
            except KeyboardInterrupt:
                assert time.monotonic() - sent[-1] < 1, name
            else:
                raise AssertionError(f"{name} was not interrupted")
            thread.join()
        assert done.valid() and future.valid() and copied.valid()
        assert_pending(done, future, copied)
    assert done.get() is None and future.get() is tensor and copied.get().tolist() == [1, 1, 1]
    dtorch_ops.sync()


@on_accelerator()
def test_it_can_be_awaited():
    torch.ones(1, device=DEVICE)
    hold(DEVICE)

    async def main():
        future = dtorch_ops.sync_future()
        task = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        assert not task.done()
        release(DEVICE)
        assert await asyncio.wait_for(task, LIMIT) is None

    asyncio.run(main())


@on_accelerator()
def test_it_joins_groups_with_values():
    tensor = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    with held(DEVICE):
        group = dtorch_ops.collect_all(
            [dtorch_ops.sync_future(), dtorch_ops.to_torch_async(torch.ones(2))]
        )
        assert_pending(group)
    group.get()
    dtorch_ops.wait_all([dtorch_ops.sync_future(), dtorch_ops.to_torch_async(tensor)], LIMIT_MS)


@on_accelerator()
def test_a_scripted_function_waits():
    torch.ones(1, device=DEVICE)
    sync, sync_promise = compiled("sync"), compiled("sync_promise")
    promise = dtorch_ops.VoidPromise()
    with held(DEVICE):
        sync_promise(promise)
        assert_pending(promise.get_future())
        fired = threading.Event()

        def run():
            sync(DEVICES[0])
            assert fired.is_set()

        worker = blocked_in(run)
        fired.set()
    worker.finish(LIMIT)
    value_of(promise.get_future())


# ---- Promises -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["promise", "promise, devices", "devices, promise", "none"])
@on_accelerator()
def test_a_promise_is_reserved_at_once_and_fulfilled_when_the_work_is_done(form):
    torch.ones(1, device=DEVICE)
    drain(DEVICE)
    promise = dtorch_ops.VoidPromise()
    future = promise.get_future()
    with held(DEVICE):
        if form == "promise":
            torch.ops.dtorch.sync(promise)
        elif form == "promise, devices":
            torch.ops.dtorch.sync(promise, [torch.device(DEVICES[0])])
        elif form == "devices, promise":
            torch.ops.dtorch.sync([torch.device(DEVICES[0]), torch.device("cpu")], promise)
        else:
            torch.ops.dtorch.sync(None, promise)
        assert not promise.is_pending()
        assert_pending(future)
        for late in (promise.set_value, lambda p=promise: torch.ops.dtorch.sync(p)):
            assert isinstance(error_of(late), dtorch_ops.PromiseAlreadySatisfiedError)
        assert promise.cancel() is False
        del promise, late
        assert_pending(future)
        reach_event(DEVICE)
        assert value_of(future) is None


@on_fake(FAULTS)
def test_a_promise_that_is_refused_can_still_be_fulfilled():
    torch.ones(1, device=DEVICE)
    promise = dtorch_ops.VoidPromise()
    fake.fail_call("event", "no event")
    error = error_of(lambda: torch.ops.dtorch.sync(promise))
    assert "no event" in str(error), repr(error)
    if promise.is_pending():
        torch.ops.dtorch.sync(promise)
        value_of(promise.get_future())
    else:
        assert "no event" in str(error_of(lambda: value_of(promise.get_future())))


# ---- Errors, and what it costs ------------------------------------------------------------------


@on_fake(FAULTS)
def test_an_error_of_the_device_reaches_it():
    tensors = [torch.ones(3, device=DEVICES[index]) for index in range(2)]
    promise = dtorch_ops.VoidPromise()
    hold(DEVICES[0])
    fake.fail_next("kernel", "the kernel went wrong")
    tensors[0].add_(1)
    futures = [dtorch_ops.sync_future(DEVICES[0]), dtorch_ops.sync_future(), promise.get_future()]
    torch.ops.dtorch.sync(promise)
    healthy = dtorch_ops.sync_future(DEVICES[1])
    worker = blocked_in(lambda: dtorch_ops.sync())
    release(DEVICES[0])
    for future in futures:
        error = error_of(lambda future=future: value_of(future))
        assert "the kernel went wrong" in str(error), repr(error)
    assert "the kernel went wrong" in str(error_of(worker.finish))
    assert value_of(healthy) is None
    assert "the kernel went wrong" in str(error_of(dtorch_ops.sync))


@on_fake(FAULTS)
def test_an_error_of_the_call_is_raised_by_the_call():
    torch.ones(1, device=DEVICE)
    for call in (lambda: dtorch_ops.sync_future(DEVICE), lambda: torch.ops.dtorch.sync()):
        fake.fail_call("event", "no event")
        error = error_of(call)
        assert type(error) is torch.AcceleratorError and "no event" in str(error), repr(error)
        assert value_of(call()) is None


@on_accelerator(devices=2)
def test_the_caller_neither_synchronises_nor_polls():
    torch.ones(1, device=DEVICE)
    torch.ones(1, device=DEVICES[1])
    drain(DEVICE)
    drain(DEVICES[1])
    with nobody_synchronises():
        with held(DEVICE, DEVICES[1]):
            futures = [dtorch_ops.sync_future() for _ in range(50)]
            assert_pending(futures[0], futures[-1])
        dtorch_ops.wait_all(futures, LIMIT_MS)
        dtorch_ops.sync()


@on_fake(DEPTH)
def test_thousands_of_them_cost_a_thread_for_each_stream():
    torch.ones(1, device=DEVICE)
    streams = [current_stream(), *new_streams(2)]
    futures = []
    with held(*streams):
        for stream in streams:
            with stream:
                futures += [dtorch_ops.sync_future(DEVICE) for _ in range(1000)]
        assert len(our_threads()) <= 3
    dtorch_ops.wait_all(futures, LIMIT_MS)
    until(lambda: our_threads() == [], 2 * LIMIT)
