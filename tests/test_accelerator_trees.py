"""Trees of an accelerator's tensors: one event for each stream, one completion, none too early.

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

SMALL, LARGE = 3, 1_000_000  # elements: below, and above, what is worth another copy
sizes = pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])

# Those that give the value as Python reads it; to torch's own functions it is a list.
TREE_WAYS = [
    way for way in WAIT_WAYS if not way.startswith(("torch ", "script ")) and "operator" not in way
]


# ---- Pending until all is there -----------------------------------------------------------------


@on_accelerator()
def test_a_tree_is_pending_until_the_one_event_behind_the_work_queued_so_far_fires():
    tensor, other = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    with held(DEVICE):
        tensor.add_(1)
        future = dtorch_ops.to_torch_async({"a": [tensor, 1], "b": (other, torch.ones(2))})
        assert_queue(DEVICE, "kernel", "event")
        assert_pending(future)
        do_work(DEVICE)
        assert_pending(future)
        reach_event(DEVICE)
        value = value_of(future)
    assert value["a"][0].data_ptr() == tensor.data_ptr()
    assert value["b"][0].data_ptr() == other.data_ptr()
    assert value["a"][0].tolist() == [1, 1, 1] and value["a"][1] == 1


@pytest.mark.parametrize("way", TREE_WAYS)
@on_accelerator()
def test_no_way_of_waiting_reads_the_host_s_memory_too_early(way):
    tensors = [torch.zeros(3, device=DEVICE) for _ in range(3)]
    drain(DEVICE)
    with everything_held(0):
        for tensor in tensors:
            tensor.add_(1)
        future = dtorch_ops.to_torch_async({"x": tensors, "y": 7}, device="cpu")
        gate = threading.Event()

        def read():
            value = WAIT_WAYS[way](future)
            values = [tensor.tolist() for tensor in value["x"]]
            assert gate.is_set()
            return values, value["y"]

        worker = blocked_in(read)
        run_all(DEVICE)
        assert worker.is_alive()
        gate.set()
    assert worker.finish(LIMIT) == ([[1, 1, 1]] * 3, 7)


@sizes
@on_accelerator()
def test_copies_to_the_host_have_the_value_of_the_call(size):
    tensors = [torch.zeros(size, device=DEVICE) for _ in range(3)]
    value_of(dtorch_ops.to_torch_async(tensors, device="cpu"))
    drain(DEVICE)
    with nobody_synchronises():
        with everything_held(0) as others:
            for tensor in tensors:
                tensor.fill_(1)
            future = dtorch_ops.to_torch_async(tensors, device="cpu")
            for tensor in tensors:
                tensor.fill_(2)
            assert_pending(future)
            run_all(DEVICE)
            assert_pending(future)
            for stream in others:
                run_all(stream)
            run_all(DEVICE)
        values = future.wait(LIMIT_MS)
    for value in values:
        assert value.is_pinned() and value.unique().tolist() == [1]


@on_accelerator(devices=2)
def test_two_devices_complete_one_future_when_both_are_there():
    here, there = (torch.zeros(3, device=device) for device in DEVICES[:2])
    for device in DEVICES[:2]:
        drain(device)
    for first, last in ((0, 1), (1, 0)):
        called = []
        with held(*DEVICES[:2]):
            here.add_(1)
            there.add_(1)
            future = dtorch_ops.to_torch_async([here, {"x": there}])
            future.add_done_callback(called.append)
            behind = dtorch_ops.to_torch_async((here, there)[first])
            release(DEVICES[first])
            value_of(behind)  # what was fetched before it is there, too
            assert_pending(future)
            release(DEVICES[last])
            value = value_of(future)
        assert value[0].device == torch.device(DEVICES[0])
        assert value[1]["x"].device == torch.device(DEVICES[1])
        until(lambda called=called, future=future: called == [future])


@on_accelerator(devices=2)
def test_leaves_of_every_place_come_to_one():
    def tree():
        return {
            "host": torch.full((3,), 1.0),
            "pinned": pinned(3, value=2),
            "here": [torch.full((3,), 3.0, device=DEVICES[0]), None],
            "there": (torch.full((2, 2), 4.0, device=DEVICES[1]), "s"),
            "empty": torch.empty(0, 2, device=DEVICES[0]),
            "transposed": torch.arange(6.0).reshape(2, 3).t(),
        }

    for device in ("cpu", *DEVICES[:2]):
        for copy in (False, True):
            value = value_of(dtorch_ops.to_torch_async(tree(), device=device, copy=copy))
            expected = tree()
            assert list(value) == list(expected)
            assert value["here"][1] is None and value["there"][1] == "s"
            for got, wanted in (
                (value["host"], [1, 1, 1]),
                (value["pinned"], [2, 2, 2]),
                (value["here"][0], [3, 3, 3]),
                (value["there"][0], [[4, 4], [4, 4]]),
                (value["empty"], []),
                (value["transposed"], [[0, 3], [1, 4], [2, 5]]),
            ):
                assert got.device == torch.device(device) and got.tolist() == wanted
            assert value["transposed"].stride() == (1, 3)


@on_accelerator()
def test_the_streams_that_are_current_at_the_call_count():
    tensor = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    side = torch.Stream(DEVICE)
    with held(side):
        with side:
            tensor.add_(1)
            future = dtorch_ops.to_torch_async([tensor], device="cpu")
        assert_pending(future)
    assert value_of(future)[0].tolist() == [1, 1, 1]


@on_accelerator()
def test_a_coroutine_awaits_a_tree_while_the_loop_runs_on():
    tensors = [torch.zeros(3, device=DEVICE) for _ in range(3)]
    drain(DEVICE)
    hold(DEVICE)

    async def main():
        for tensor in tensors:
            tensor.add_(1)
        future = dtorch_ops.to_torch_async({"x": tensors}, device="cpu")
        task = asyncio.ensure_future(future)
        try:
            await asyncio.wait_for(asyncio.shield(task), 0.01)
            raise AssertionError("no timeout")
        except asyncio.TimeoutError:
            pass
        cancelled = asyncio.ensure_future(future)
        await asyncio.sleep(0)
        cancelled.cancel()
        release(DEVICE)
        value = await asyncio.wait_for(task, LIMIT)
        assert cancelled.cancelled()
        return value

    assert [tensor.tolist() for tensor in asyncio.run(main())["x"]] == [[1, 1, 1]] * 3


@on_accelerator()
def test_gradients_flow_through_a_copy():
    leaf = torch.ones(3, device=DEVICE, requires_grad=True)
    value = dtorch_ops.to_torch({"x": leaf * 2, "y": [leaf]}, device="cpu")
    (value["x"] + value["y"][0]).sum().backward()
    assert leaf.grad.cpu().tolist() == [3, 3, 3]


# ---- What it costs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "device"), [("here", "here"), ("here", "cpu"), ("cpu", "here"), ("here", "there")]
)
@on_fake(COUNTS)
def test_a_hundred_leaves_cost_the_events_and_waits_of_one(source, device):
    def counted(tree):
        value_of(dtorch_ops.to_torch_async(tree, device=device, copy=True))
        for each in DEVICES:
            drain(each)
        fake.reset_counters()
        future = dtorch_ops.to_torch_async(tree, device=device, copy=True)
        value_of(future)
        counters = fake.counters()
        assert counters.my_syncs() == {}
        return (
            counters.events_recorded,
            counters.stream_waits,
            counters.other_syncs().get("synchronize_event"),
        )

    one = counted(torch.ones(3, device=source))
    assert counted([torch.ones(3, device=source) for _ in range(100)]) == one


@on_fake(COUNTS)
def test_a_tensor_that_is_there_twice_is_copied_once():
    tensor = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    fake.reset_counters()
    value_of(dtorch_ops.to_torch_async(tensor, device="cpu"))
    copies_of_one = fake.counters().copies
    fake.reset_counters()
    value = value_of(dtorch_ops.to_torch_async([tensor, {"x": tensor}], device="cpu"))
    assert value[0] is value[1]["x"]
    assert fake.counters().copies == copies_of_one


@on_fake(COUNTS)
def test_a_blocked_thread_is_woken_once():
    tensors = [torch.zeros(3, device=device) for device in DEVICES]
    for device in DEVICES:
        drain(device)
    wakes = []

    def switches():
        with open(f"/proc/self/task/{threading.get_native_id()}/status") as status:
            return sum(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt"))

    # It falls asleep once. Sometimes the interpreter lock is another one's when it is woken: then
    # once more, but not always.
    for _ in range(10):
        with held(*DEVICES):
            future = dtorch_ops.to_torch_async(tensors)
            behind = [dtorch_ops.to_torch_async(tensor) for tensor in tensors[:-1]]

            def wait(future=future):
                before = switches()
                future.wait(60_000)
                wakes.append(switches() - before)

            worker = blocked_in(wait)
            for device in DEVICES[:-1]:
                release(device)
            dtorch_ops.wait_all(behind, LIMIT_MS)
            assert_pending(future)
        worker.finish(LIMIT)
        if 1 <= wakes[-1] <= 3:
            break
    assert 1 <= wakes[-1] <= 3, wakes


@on_fake(MEMORY)
def test_all_memory_comes_back():
    def tree():
        return {"x": [torch.zeros(500, device=DEVICES[0]) for _ in range(5)], "y": pinned(50)}

    def blocks():
        return fake.device_memory().live_blocks, fake.pinned_memory().live_blocks

    torch.empty(1, device=DEVICES[0])
    before = blocks()
    for device in ("cpu", DEVICES[0], DEVICES[1]):
        for dropped in (False, True):
            with everything_held(0, 1):
                future = dtorch_ops.to_torch_async(tree(), device=device)
                if dropped:
                    del future
            if not dropped:
                value_of(future)
                del future
            gc.collect()
            until(lambda: blocks() == before)


# ---- What does not come, and errors -------------------------------------------------------------


@on_fake(DELAYS)
def test_an_event_that_never_fires_ends_in_a_time_limit_and_leaves_the_future_alone():
    here, there = (torch.ones(3, device=device) for device in DEVICES[:2])
    value_of(dtorch_ops.to_torch_async([here, there], device="cpu"))
    for device in DEVICES[:2]:
        drain(device)
    fake.delay_events()
    future = dtorch_ops.to_torch_async({"x": [here, there]}, device="cpu")
    for _ in range(2):
        assert isinstance(error_of(lambda: future.wait(20)), TimeoutError)
    assert_pending(future)
    fake.stop_delaying_events()
    fake.fire_events()
    assert [tensor.tolist() for tensor in value_of(future)["x"]] == [[1, 1, 1]] * 2


@on_fake(FAULTS)
def test_an_error_of_one_device_fails_the_future_at_once_and_names_its_leaves():
    here = [torch.ones(3, device=DEVICES[0]) for _ in range(5)]
    there = torch.ones(3, device=DEVICES[1])
    for device in DEVICES[:2]:
        drain(device)
    with held(*DEVICES[:2]):
        fake.fail_next("kernel", "the kernel went wrong")
        there.add_(1)
        one = dtorch_ops.to_torch_async({"a": here, "b": (there,)})
        release(DEVICES[1])
        for _ in range(2):
            error = error_of(lambda: value_of(one))
            assert isinstance(error, torch.AcceleratorError), repr(error)
            assert "the kernel went wrong" in str(error), repr(error)
            assert error.__notes__ == ["at ['b'][0]"]
        for error in (
            error_of(lambda: dtorch_ops.wait_all([one])),
            error_of(lambda: dtorch_ops.collect_all([one]).get()),
            error_of(lambda: WAIT_WAYS["await"](one)),
        ):
            assert error.__notes__ == ["at ['b'][0]"], error.__notes__
        fake.reset_errors()
        fake.fail_next("kernel", "the kernel went wrong")
        here[0].add_(1)
        several = dtorch_ops.to_torch_async({"a": here, "b": (there,)})
    error = error_of(lambda: value_of(several))
    assert error.__notes__ == ["at one of ['a'][0], ['a'][1], ['a'][2] and 2 more"]
    fake.reset_errors()
    assert len(value_of(dtorch_ops.to_torch_async({"a": here}))["a"]) == 5


@pytest.mark.parametrize("call", ["event", "copy", "wait", "kernel"])
@pytest.mark.parametrize(
    ("source", "device"), [("here", "cpu"), ("cpu", "here"), ("here", "there")]
)
@on_fake(FAULTS)
def test_an_error_of_the_call_is_raised_by_the_call_or_completes_the_future(source, device, call):
    tree = [torch.ones(3, device=source) for _ in range(3)]
    value_of(dtorch_ops.to_torch_async(tree, device=device))
    drain(DEVICES[0])
    fake.fail_call(call, f"no {call}")
    try:
        values = value_of(dtorch_ops.to_torch_async(tree, device=device))
    except torch.AcceleratorError as error:
        assert f"no {call}" in str(error)
    else:
        assert [value.tolist() for value in values] == [[1, 1, 1]] * 3
    fake.reset_errors()
    values = value_of(dtorch_ops.to_torch_async(tree, device=device))
    assert [value.tolist() for value in values] == [[1, 1, 1]] * 3


@on_fake(FAULTS)
def test_memory_that_is_not_there_is_an_error_of_the_call_and_names_the_leaf():
    tree = [torch.ones(3), {"x": torch.ones(3, device=DEVICE)}]
    value_of(dtorch_ops.to_torch_async(tree, device="cpu"))
    fake.fail_call("alloc", "no memory")
    error = error_of(lambda: dtorch_ops.to_torch_async(tree, device="cpu"))
    assert type(error) is torch.OutOfMemoryError and "no memory" in str(error), repr(error)
    assert error.__notes__ == ["at [1]['x']"]


@sizes
@on_fake(FAULTS)
def test_where_no_pinned_memory_is_left_plain_buffers_are_right_and_block_nobody(size):
    tensors = [torch.zeros(size, device=DEVICE) for _ in range(3)]
    drain(DEVICE)
    fake.reset_counters()
    with everything_held(0):
        for tensor in tensors:
            tensor.fill_(1)
        fake.fail_call("pinned_alloc", "no pinned memory")
        future = dtorch_ops.to_torch_async(tensors, device="cpu")
        assert_pending(future)
        for tensor in tensors:
            tensor.fill_(2)
        run_all(DEVICE)
        assert fake.counters().my_syncs() == {}
    values = value_of(future)
    assert [value.unique().tolist() for value in values] == [[1]] * 3


@on_fake(COUNTS)
def test_a_leaf_that_is_refused_is_named_and_nothing_is_queued():
    tensor = torch.ones(3, device=DEVICE)
    sparse = torch.eye(3).to_sparse()
    drain(DEVICE)
    fake.reset_counters()
    error = error_of(lambda: dtorch_ops.to_torch_async([tensor, {"x": sparse}], device=DEVICES[1]))
    assert type(error) is NotImplementedError and "to_dense" in str(error), repr(error)
    assert error.__notes__ == ["at [1]['x']"]
    counters = fake.counters()
    assert (counters.kernels, counters.copies, counters.events_recorded) == (0, 0, 0)


@on_accelerator()
def test_the_operator_and_a_scripted_function_fetch_lists():
    tensors = [torch.full((3,), float(i), device=DEVICE) for i in range(3)]
    future = torch.ops.dtorch.get_tensors_async(tensors, device=torch.device("cpu"))
    assert [value.tolist() for value in future.wait()] == [[i] * 3 for i in range(3)]
    future = torch.ops.dtorch.get_tensors_async(tensors)
    assert [v.data_ptr() for v in value_of(future)] == [t.data_ptr() for t in tensors]
    values = compiled("fetch_all")(tensors, "cpu")
    assert [value.tolist() for value in values] == [[i] * 3 for i in range(3)]
