"""Waiting for devices: what their current streams were given so far is done.

On the fake accelerator, each test in a process of its own (on_fake.py).
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
from on_fake import (
    BARE_PRELUDE,
    LIMIT,
    LIMIT_MS,
    WAIT_WAYS,
    assert_pending,
    blocked_in,
    compiled,
    current_stream,
    error_of,
    new_streams,
    on_fake,
    our_threads,
    until,
    value_of,
)

import dtorch_ops

pytestmark = pytest.mark.timeout(600)  # the first one may have to build the fake


# ---- Which devices ------------------------------------------------------------------------------


@on_fake(prelude=BARE_PRELUDE)
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
    assert not fake.is_initialized()
    assert fake.streams_in_use() == []


@on_fake()
def test_none_is_every_device_that_is_initialised_and_no_other():
    torch.ones(1, device="fake:0")
    torch.ones(1, device="fake:2")
    with fake.held("fake:0"), fake.held("fake:2"):
        future = dtorch_ops.sync_future()
        assert fake.queued("fake:0")[-1] == fake.queued("fake:2")[-1] == "event"
        assert_pending(future)
        fake.release("fake:0")
        fake.drain("fake:0")
        assert_pending(future)
        fake.release("fake:2")
        assert value_of(future) is None
    assert not fake.has_context(1) and not fake.has_context(3)


@pytest.mark.parametrize("spelling", ["string", "device", "index", "list", "tuple", "current"])
@on_fake()
def test_one_device_and_no_other(spelling):
    given = {
        "string": "fake:1",
        "device": torch.device("fake:1"),
        "index": 1,
        "list": ["fake:1"],
        "tuple": (torch.device("fake", 1), "cpu"),
        "current": "fake",
    }[spelling]
    for device in ("fake:0", "fake:1"):
        torch.ones(1, device=device)
        fake.drain(device)
    torch.accelerator.set_device_index(1)
    with fake.held("fake:0", "fake:1"):
        torch.ones(1, device="fake:0")
        future = dtorch_ops.sync_future(given)
        assert fake.queued("fake:0") == ["kernel"] and fake.queued("fake:1") == ["event"]
        assert_pending(future)
        fake.step("fake:1")
        assert value_of(future) is None


@on_fake()
def test_of_several_devices_the_last_one_counts():
    devices = [f"fake:{index}" for index in range(4)]
    for device in devices:
        torch.ones(1, device=device)
    with fake.held(*devices):
        future = dtorch_ops.sync_future([*devices, "cpu", *devices])
        for device in ("fake:2", "fake:0", "fake:3"):
            assert_pending(future)
            fake.release(device)
            fake.drain(device)
            value_of(dtorch_ops.sync_future(device))
        assert_pending(future)
        fake.release("fake:1")
        assert value_of(future) is None


@on_fake()
def test_a_device_that_is_named_need_not_be_in_use():
    dtorch_ops.sync("fake:3", timeout_ms=LIMIT_MS)
    dtorch_ops.sync(["fake:1", "cpu"], timeout_ms=LIMIT_MS)
    assert dtorch_ops.sync_future([]).is_ready()
    assert dtorch_ops.sync_future("cpu").is_ready()


@on_fake()
def test_a_device_that_does_not_exist_is_a_value_error():
    for used in (False, True):
        if used:
            torch.ones(1, device="fake:0")
        for devices in ("fake:4", ["fake:0", "fake:9"], 4, torch.device("fake", 100)):
            for call in (dtorch_ops.sync_future, dtorch_ops.sync):
                error = error_of(lambda call=call, devices=devices: call(devices))
                assert isinstance(error, ValueError), repr(error)
                assert "fake:3" in str(error), error
        promise = dtorch_ops.VoidPromise()
        error = error_of(lambda p=promise: torch.ops.dtorch.sync([torch.device("fake:4")], p))
        assert isinstance(error, ValueError), repr(error)
        assert promise.is_pending()
        assert fake.is_initialized() is used


# ---- Which work ---------------------------------------------------------------------------------


@on_fake()
def test_what_was_queued_so_far_counts_and_no_later_work():
    tensor = torch.zeros(3, device="fake")
    fake.drain("fake")
    with fake.held("fake"):
        tensor.add_(1)
        future = dtorch_ops.sync_future("fake")
        tensor.add_(1)
        assert fake.queued("fake") == ["kernel", "event", "kernel"]
        assert fake.step("fake") == "kernel"
        assert_pending(future)
        assert fake.step("fake") == "event"
        assert value_of(future) is None
        assert fake.queued("fake")[0] == "kernel"


@on_fake()
def test_the_current_stream_counts_and_no_other():
    tensor = torch.zeros(3, device="fake")
    fake.drain("fake")
    side = torch.Stream("fake")
    with fake.held("fake"), side:
        tensor.add_(1)
        dtorch_ops.sync("fake", timeout_ms=LIMIT_MS)
        dtorch_ops.sync(timeout_ms=LIMIT_MS)
    with fake.held(side):
        dtorch_ops.sync("fake", timeout_ms=LIMIT_MS)
        with side:
            future = dtorch_ops.sync_future()
        assert_pending(future)
    value_of(future)


@on_fake()
def test_the_current_stream_of_each_device_counts():
    sides = [torch.Stream("fake:0"), torch.Stream("fake:1")]
    for side in sides:
        torch.accelerator.set_stream(side)
    torch.accelerator.set_device_index(0)
    with fake.held(*sides):
        future = dtorch_ops.sync_future(["fake:0", "fake:1"])
        assert [fake.queued(side) for side in sides] == [["event"], ["event"]]
        fake.step(sides[1])
        assert_pending(future)
        fake.step(sides[0])
        value_of(future)


# ---- Ways to wait -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", ["get", "wait", "await", "then", "callback", "collect", "collect_all", "operator"]
)
@on_fake()
def test_no_way_of_waiting_is_through_before_the_event(way):
    torch.ones(1, device="fake")
    fake.drain("fake")
    with fake.held("fake"):
        future = dtorch_ops.sync_future("fake")
        fired = threading.Event()

        def wait():
            WAIT_WAYS[way](future)
            assert fired.is_set()

        worker = blocked_in(wait)
        assert worker.is_alive()
        fired.set()
        assert fake.step("fake") == "event"
        assert worker.finish(LIMIT) is None


@on_fake()
def test_sync_blocks_and_has_a_limit():
    torch.ones(1, device="fake")
    with fake.held("fake"):
        for wait in (
            lambda: dtorch_ops.sync(timeout_ms=0),
            lambda: dtorch_ops.sync("fake", timeout_ms=20),
            lambda: dtorch_ops.sync(["fake", "cpu"], 20),
            lambda: dtorch_ops.sync_future().wait(20),
        ):
            assert isinstance(error_of(wait), TimeoutError)
        fired = threading.Event()

        def sync():
            dtorch_ops.sync("fake")
            assert fired.is_set()

        worker = blocked_in(sync)
        assert worker.is_alive()
        fired.set()
    worker.finish(LIMIT)


@on_fake()
def test_ctrl_c_ends_every_wait_within_a_second_and_the_future_lives_on():
    tensor = torch.ones(3, device="fake")
    fake.drain("fake")
    sent = []

    def interrupt():
        asleep = 0
        while asleep < 5:  # in its wait: the interpreter lock it has got meanwhile
            time.sleep(0.01)
            with open(f"/proc/self/task/{os.getpid()}/stat") as stat:
                asleep = asleep + 1 if stat.read().rpartition(")")[2].split()[0] == "S" else 0
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with fake.held("fake"):
        done, future = dtorch_ops.sync_future("fake"), dtorch_ops.to_torch_async(tensor)
        copied = dtorch_ops.to_torch_async(tensor, device="cpu")
        waits = {
            "sync": lambda: dtorch_ops.sync("fake"),
            "sync of all": lambda: dtorch_ops.sync(),
            "sync with a limit": lambda: dtorch_ops.sync(["fake"], timeout_ms=60_000),
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


@on_fake()
def test_it_can_be_awaited():
    torch.ones(1, device="fake")
    fake.hold("fake")

    async def main():
        future = dtorch_ops.sync_future()
        task = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        assert not task.done()
        fake.release("fake")
        assert await asyncio.wait_for(task, LIMIT) is None

    asyncio.run(main())


@on_fake()
def test_it_joins_groups_with_values():
    tensor = torch.ones(3, device="fake")
    fake.drain("fake")
    with fake.held("fake"):
        group = dtorch_ops.collect_all(
            [dtorch_ops.sync_future(), dtorch_ops.to_torch_async(torch.ones(2))]
        )
        assert_pending(group)
    group.get()
    dtorch_ops.wait_all([dtorch_ops.sync_future(), dtorch_ops.to_torch_async(tensor)], LIMIT_MS)


@on_fake()
def test_a_scripted_function_waits():
    torch.ones(1, device="fake")
    sync, sync_promise = compiled("sync"), compiled("sync_promise")
    promise = dtorch_ops.VoidPromise()
    with fake.held("fake"):
        sync_promise(promise)
        assert_pending(promise.get_future())
        fired = threading.Event()

        def run():
            sync("fake:0")
            assert fired.is_set()

        worker = blocked_in(run)
        fired.set()
    worker.finish(LIMIT)
    value_of(promise.get_future())


# ---- Promises -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["promise", "promise, devices", "devices, promise", "none"])
@on_fake()
def test_a_promise_is_reserved_at_once_and_fulfilled_when_the_work_is_done(form):
    torch.ones(1, device="fake")
    fake.drain("fake")
    promise = dtorch_ops.VoidPromise()
    future = promise.get_future()
    with fake.held("fake"):
        if form == "promise":
            torch.ops.dtorch.sync(promise)
        elif form == "promise, devices":
            torch.ops.dtorch.sync(promise, [torch.device("fake:0")])
        elif form == "devices, promise":
            torch.ops.dtorch.sync([torch.device("fake:0"), torch.device("cpu")], promise)
        else:
            torch.ops.dtorch.sync(None, promise)
        assert not promise.is_pending()
        assert_pending(future)
        for late in (promise.set_value, lambda p=promise: torch.ops.dtorch.sync(p)):
            assert isinstance(error_of(late), dtorch_ops.PromiseAlreadySatisfiedError)
        assert promise.cancel() is False
        del promise, late
        assert_pending(future)
        assert fake.step("fake") == "event"
        assert value_of(future) is None


@on_fake()
def test_a_promise_that_is_refused_can_still_be_fulfilled():
    torch.ones(1, device="fake")
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


@on_fake()
def test_an_error_of_the_device_reaches_it():
    tensors = [torch.ones(3, device=f"fake:{index}") for index in range(2)]
    promise = dtorch_ops.VoidPromise()
    fake.hold("fake:0")
    fake.fail_next("kernel", "the kernel went wrong")
    tensors[0].add_(1)
    futures = [dtorch_ops.sync_future("fake:0"), dtorch_ops.sync_future(), promise.get_future()]
    torch.ops.dtorch.sync(promise)
    healthy = dtorch_ops.sync_future("fake:1")
    worker = blocked_in(lambda: dtorch_ops.sync())
    fake.release("fake:0")
    for future in futures:
        error = error_of(lambda future=future: value_of(future))
        assert "the kernel went wrong" in str(error), repr(error)
    assert "the kernel went wrong" in str(error_of(worker.finish))
    assert value_of(healthy) is None
    assert "the kernel went wrong" in str(error_of(dtorch_ops.sync))


@on_fake()
def test_an_error_of_the_call_is_raised_by_the_call():
    torch.ones(1, device="fake")
    for call in (lambda: dtorch_ops.sync_future("fake"), lambda: torch.ops.dtorch.sync()):
        fake.fail_call("event", "no event")
        error = error_of(call)
        assert type(error) is torch.AcceleratorError and "no event" in str(error), repr(error)
        assert value_of(call()) is None


@on_fake()
def test_the_caller_neither_synchronises_nor_polls():
    torch.ones(1, device="fake")
    torch.ones(1, device="fake:1")
    fake.drain("fake")
    fake.drain("fake:1")
    fake.reset_counters()
    with fake.held("fake", "fake:1"):
        futures = [dtorch_ops.sync_future() for _ in range(50)]
        assert_pending(futures[0], futures[-1])
    dtorch_ops.wait_all(futures, LIMIT_MS)
    dtorch_ops.sync()
    counts = fake.counters()
    assert counts.my_syncs() == {}
    assert counts.event_queries == counts.stream_queries == 0
    assert set(counts.other_syncs()) <= {"synchronize_event"}


@on_fake()
def test_thousands_of_them_cost_a_thread_for_each_stream():
    torch.ones(1, device="fake")
    streams = [current_stream(), *new_streams(2)]
    futures = []
    with fake.held(*streams):
        for stream in streams:
            with stream:
                futures += [dtorch_ops.sync_future("fake") for _ in range(1000)]
        assert len(our_threads()) <= 3
    dtorch_ops.wait_all(futures, LIMIT_MS)
    until(lambda: our_threads() == [], 2 * LIMIT)
