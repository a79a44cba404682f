"""Values of an accelerator: a future completes when the event on the tensor's stream has fired.

On the fake accelerator, or CUDA; each test in a process of its own (on_accelerator.py).
"""

from __future__ import annotations

import asyncio
import gc
import threading

import fake_accelerator as fake
import pytest
import torch
from on_accelerator import *  # noqa: F403

import dtorch_ops

pytestmark = pytest.mark.timeout(600)  # the first one may have to build the fake


# ---- Pending until the event has fired ----------------------------------------------------------


@on_accelerator()
def test_a_future_is_pending_until_the_event_behind_the_work_queued_so_far_fires():
    tensor = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    with held(DEVICE):
        tensor.add_(1)
        futures = [dtorch_ops.to_torch_async(tensor)]
        assert_queue(DEVICE, "kernel", "event")
        futures += [tensor.to_torch_async(), torch.ops.dtorch.get_tensor_async(tensor)]
        assert_pending(*futures)
        do_work(DEVICE)
        assert_pending(*futures)
        reach_event(DEVICE)
        value = value_of(futures[0])
    assert value.device == torch.device(DEVICES[0])
    assert value.data_ptr() == tensor.data_ptr()
    assert [value_of(future).tolist() for future in futures] == [[1, 1, 1]] * 3


@on_accelerator()
def test_a_later_update_shows_as_with_detach():
    tensor = torch.zeros(3, device=DEVICE)
    value = dtorch_ops.to_torch(tensor)
    tensor.fill_(5)
    assert value.tolist() == [5, 5, 5]


@pytest.mark.parametrize("way", WAIT_WAYS)
@on_accelerator()
def test_no_way_of_waiting_has_the_value_before_the_event(way):
    tensor = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    with held(DEVICE):
        tensor.add_(1)
        future = dtorch_ops.to_torch_async(tensor)
        fired = threading.Event()

        def wait():
            value = WAIT_WAYS[way](future)
            assert fired.is_set(), "it had the value before the event has fired"
            return value

        worker = blocked_in(wait)
        assert worker.is_alive()
        do_work(DEVICE)
        assert worker.is_alive()
        fired.set()
        reach_event(DEVICE)
        value = worker.finish(LIMIT)
    assert value.data_ptr() == tensor.data_ptr()
    assert value.tolist() == [1, 1, 1]


@pytest.mark.parametrize("how", ["callback", "then", "collect_all", "collect_any"])
@on_accelerator()
def test_a_callback_is_called_when_the_event_has_fired_and_never_before(how):
    tensor = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    with held(DEVICE):
        tensor.add_(1)
        future = dtorch_ops.to_torch_async(tensor)
        fired, called, seen = threading.Event(), threading.Event(), []

        def callback(f):
            seen.append((fired.is_set(), f.value()))
            called.set()

        if how == "callback":
            future.add_done_callback(callback)
        elif how == "then":
            kept = future.then(callback)
        else:
            kept = getattr(dtorch_ops, how)([future])
            kept.add_done_callback(callback)
        do_work(DEVICE)
        assert not seen
        fired.set()
        reach_event(DEVICE)
        assert called.wait(LIMIT)
    assert seen[0][0], "it was called before the event has fired"
    value = seen[0][1][0].value() if how == "collect_all" else seen[0][1]
    assert value.tolist() == [1, 1, 1]


@on_accelerator()
def test_a_loop_runs_on_while_a_coroutine_awaits_the_event():
    tensor = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    hold(DEVICE)

    async def main():
        tensor.add_(1)
        future = dtorch_ops.to_torch_async(tensor)
        ticks = 0

        async def fetch():
            value = await future
            assert ticks == 10
            return value

        task = asyncio.create_task(fetch())
        for _ in range(10):
            await asyncio.sleep(0)
            ticks += 1
        assert not task.done()
        try:
            await asyncio.wait_for(asyncio.shield(task), 0.01)
            raise AssertionError("no timeout")
        except asyncio.TimeoutError:
            pass
        release(DEVICE)
        return await asyncio.wait_for(task, LIMIT)

    assert asyncio.run(main()).tolist() == [1, 1, 1]


@on_accelerator()
def test_a_timeout_returns_and_the_future_can_still_be_waited_for():
    tensor = torch.zeros(3, device=DEVICE)
    scripted = compiled("wait_for")
    with held(DEVICE):
        future = dtorch_ops.to_torch_async(tensor)
        for wait in (
            lambda: future.wait(20),
            lambda: torch.ops.dtorch.wait_for(future, 20),
            lambda: dtorch_ops.wait_all([future], 20),
            lambda: next(dtorch_ops.as_completed([future], 20)),
            lambda: dtorch_ops.collect_all([future]).wait(20),
            lambda: dtorch_ops.sync(DEVICE, timeout_ms=20),
        ):
            assert isinstance(error_of(wait), TimeoutError)
        assert "time limit" in str(error_of(lambda: scripted(future, 20)))
        assert future.valid()
    assert future.get().data_ptr() == tensor.data_ptr()


@on_accelerator()
def test_an_idle_stream_completes_it_soon():
    tensor = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    for way in (
        lambda: dtorch_ops.to_torch_async(tensor).wait(LIMIT_MS),
        lambda: dtorch_ops.to_torch(tensor),
        lambda: tensor.to_torch(),
        lambda: torch.ops.dtorch.get_tensor_async(tensor).wait(),
    ):
        assert way().tolist() == [1, 1, 1]
    assert dtorch_ops.to_torch(torch.empty(0, device=DEVICES[-1])).device.index == len(DEVICES) - 1


@on_accelerator()
def test_to_torch_blocks_until_the_event_has_fired():
    tensor = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    with held(DEVICE):
        tensor.add_(1)
        fired = threading.Event()

        def fetch():
            dtorch_ops.to_torch(tensor)
            assert fired.is_set()

        worker = blocked_in(fetch)
        do_work(DEVICE)
        assert worker.is_alive()
        fired.set()
        reach_event(DEVICE)
        worker.finish(LIMIT)


@on_fake(DELAYS)
def test_an_event_that_fires_late_keeps_it_pending_though_its_stream_has_gone_on():
    tensor = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    fake.delay_events(DEVICE)
    future = dtorch_ops.to_torch_async(tensor.add_(1))
    fake.stop_delaying_events()
    assert fake.delayed_events() == 1
    drain(DEVICE)
    assert_pending(future)
    fake.fire_events()
    assert value_of(future).tolist() == [1, 1, 1]


# ---- Which stream -------------------------------------------------------------------------------


@on_accelerator()
def test_the_current_stream_counts_and_no_other():
    tensor = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    side = torch.Stream(DEVICE)
    with held(side):
        with side:
            on_side = dtorch_ops.to_torch_async(tensor.add_(1))
        assert_queue(side, "kernel", "event")
        value_of(dtorch_ops.to_torch_async(tensor))  # the default stream's is no obstacle
        assert_pending(on_side)
        do_work(side)
        reach_event(side)
        value_of(on_side)
    with held(DEVICE):
        tensor.add_(1)
        with side:
            value_of(dtorch_ops.to_torch_async(tensor))
        assert_pending(dtorch_ops.to_torch_async(tensor))


@on_accelerator(devices=3)
def test_the_current_stream_of_the_tensors_device_counts_whatever_device_is_current():
    tensor = torch.zeros(3, device=DEVICES[2])
    side = torch.Stream(DEVICES[2])
    drain(DEVICES[2])
    torch.accelerator.set_stream(side)
    torch.accelerator.set_device_index(1)
    with held(side):
        tensor.add_(1)
        future = dtorch_ops.to_torch_async(tensor)
        assert_queue(side, "kernel", "event")
        assert torch.accelerator.current_device_index() == 1
        assert torch.accelerator.current_stream(DEVICES[2]) == side
        assert_pending(future)
    assert value_of(future).device == torch.device(DEVICES[2])
    assert not has_context(0) and not has_context(3)


@on_accelerator()
def test_work_queued_later_is_not_waited_for():
    tensor, other = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    with held(DEVICE):
        tensor.add_(1)
        first = dtorch_ops.to_torch_async(tensor)
        assert_queue(DEVICE, "kernel", "event")
        hold(DEVICE)
        other.add_(1)
        second = dtorch_ops.to_torch_async(other)
        do_work(DEVICE)
        reach_event(DEVICE)
        value_of(first)
        assert_pending(second)
        assert_queue(DEVICE, "kernel", "event", ...)
    value_of(second)


@on_accelerator()
def test_futures_of_one_stream_complete_in_its_order():
    tensors = [torch.zeros(1, device=DEVICE) for _ in range(20)]
    drain(DEVICE)
    with held(DEVICE):
        futures = []
        for tensor in tensors:
            futures.append(dtorch_ops.to_torch_async(tensor.add_(1)))
            hold(DEVICE)
        for index, future in enumerate(futures[:10]):
            do_work(DEVICE)
            reach_event(DEVICE)
            value_of(future)
            assert_pending(*futures[index + 1 :: 5])
    dtorch_ops.wait_all(futures, LIMIT_MS)


# ---- The result ---------------------------------------------------------------------------------


@on_accelerator()
def test_a_copy_is_a_snapshot_in_the_order_of_the_stream():
    tensor = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    with held(DEVICE):
        tensor.fill_(1)
        futures = [
            dtorch_ops.to_torch_async(tensor, copy=True),
            dtorch_ops.to_torch_async(tensor, device=DEVICES[0], copy=True),
            torch.ops.dtorch.get_tensor_async(tensor, copy=True),
        ]
        tensor.fill_(2)
        assert_pending(*futures)
    values = [value_of(future) for future in futures]
    assert [value.tolist() for value in values] == [[1, 1, 1]] * 3
    assert {value.device for value in values} == {torch.device(DEVICES[0])}
    assert len({value.data_ptr() for value in [*values, tensor]}) == 4
    assert tensor.tolist() == [2, 2, 2]


@on_accelerator(devices=2)
def test_the_tensors_own_device_by_any_name_is_no_copy():
    tensor = torch.ones(3, device=DEVICES[1])
    with torch.accelerator.device_index(1):
        for device in (DEVICES[1], DEVICE, torch.device(DEVICE, 1), 1):
            assert dtorch_ops.to_torch(tensor, device=device).data_ptr() == tensor.data_ptr()


@on_accelerator()
def test_the_result_is_differentiable():
    for options in ({}, {"copy": True}):
        weight = torch.ones(3, device=DEVICE, requires_grad=True)
        with held(DEVICE):
            scaled = weight * 3
            future = dtorch_ops.to_torch_async(scaled, **options)
            assert_pending(future)
        value = value_of(future)
        assert value.requires_grad and value.grad_fn is not None
        value.backward(torch.ones(3, device=DEVICE))
        assert weight.grad.tolist() == [3, 3, 3]
        assert dtorch_ops.to_torch(weight, **options).requires_grad
        with torch.no_grad():
            assert not dtorch_ops.to_torch(weight * 2, **options).requires_grad


@on_accelerator()
def test_the_same_tensor_comes_back():
    leaf = torch.ones(3, device=DEVICE, requires_grad=True)
    for tensor in (leaf, leaf * 2, torch.ones(2, 3, device=DEVICE).t()):
        assert dtorch_ops.to_torch_async(tensor).wait(LIMIT_MS) is tensor


@on_accelerator()
def test_the_tensor_lives_until_the_event_and_goes_with_the_future():
    live = live_blocks()
    with held(DEVICE):
        future = dtorch_ops.to_torch_async(torch.ones(1000, device=DEVICE))
        gc.collect()
        assert live_blocks() == live + 1
    assert value_of(future).tolist() == [1] * 1000
    del future
    until(lambda: live_blocks() == live)


@on_accelerator()
def test_futures_may_be_dropped_while_they_are_pending():
    tensor = torch.ones(1000, device=DEVICE)
    live = live_blocks()
    with held(DEVICE):
        for index in range(300):
            future = dtorch_ops.to_torch_async(tensor * index, copy=index % 2 == 0)
            if index % 3 == 0:
                future.add_done_callback(lambda f: f.value())
            del future
        kept = dtorch_ops.to_torch_async(tensor)
    assert value_of(kept).tolist() == [1] * 1000
    until(lambda: live_blocks() == live)


# ---- Consumers on other streams -----------------------------------------------------------------


@pytest.mark.parametrize(
    "way", ["get", "wait", "await", "operator", "script wait", "collect_all", "torch wait_all"]
)
@on_accelerator()
def test_a_consumer_on_another_stream_is_ordered_and_waits_for_nothing_else(way):
    tensor = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    side = torch.Stream(DEVICE)
    later = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    WAIT_WAYS[way](dtorch_ops.to_torch_async(tensor))
    drain(DEVICE)
    hold(DEVICE)
    tensor.add_(1)
    future = dtorch_ops.to_torch_async(tensor)
    hold(DEVICE)
    later.add_(1)  # unrelated, and stuck
    do_work(DEVICE)
    reach_event(DEVICE)
    with side:
        value = WAIT_WAYS[way](future)
        got = value.to("cpu", non_blocking=True)
    drain(side, LIMIT)
    assert got.tolist() == [1, 1, 1]
    assert_queue(DEVICE, "kernel")
    release(DEVICE)


@on_accelerator(devices=2)
def test_a_consumer_on_another_device_s_stream_is_ordered():
    tensor = torch.zeros(3, device=DEVICES[0])
    later = torch.zeros(3, device=DEVICES[0])
    torch.zeros(1, device=DEVICES[1])
    drain(DEVICES[0])
    hold(DEVICES[0])
    future = dtorch_ops.to_torch_async(tensor.add_(1))
    hold(DEVICES[0])
    later.add_(1)
    do_work(DEVICES[0])
    reach_event(DEVICES[0])
    side = torch.Stream(DEVICES[0])
    with side:
        got = future.get().to(DEVICES[1])
    drain(side, LIMIT)
    drain(DEVICES[1], LIMIT)
    assert got.tolist() == [1, 1, 1]
    assert_queue(DEVICES[0], "kernel")


@pytest.mark.parametrize("way", ["get", "wait", "await", "torch wait_all"])
@on_accelerator()
def test_memory_is_not_used_again_while_another_stream_reads_the_value(way):
    """As with torch's own futures: who takes the value uses it on its current stream."""
    tensor = torch.ones(1000, device=DEVICE)
    address = tensor.data_ptr()
    side = torch.Stream(DEVICE)
    future = dtorch_ops.to_torch_async(tensor)
    value_of(future)
    with held(side):
        with side:
            value = WAIT_WAYS[way](future)
            into = pinned(1000)
            into.copy_(value, non_blocking=True)
        del tensor, value, future
        gc.collect()
        until(lambda: live_blocks() == 0)
        again = torch.empty(1000, device=DEVICE)
        assert again.data_ptr() != address
        again.fill_(7)
        drain(DEVICE)
    drain(side)
    assert into.tolist() == [1] * 1000


# ---- TorchScript --------------------------------------------------------------------------------


@on_accelerator()
def test_a_scripted_function_fetches_and_waits():
    tensor = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    fetch, start, is_ready = compiled("fetch"), compiled("start"), compiled("is_ready")
    with held(DEVICE):
        tensor.add_(1)
        future = start(tensor)
        assert_pending(future)
        assert not is_ready(future)
        fired = threading.Event()

        def run():
            value = fetch(tensor)
            assert fired.is_set()
            return value

        worker = blocked_in(run)
        fired.set()
        do_work(DEVICE)
        reach_event(DEVICE)
        run_all(DEVICE)
        value_of(future)
        assert is_ready(future)
    assert worker.finish(LIMIT).tolist() == [1, 1, 1]
