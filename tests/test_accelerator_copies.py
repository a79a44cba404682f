"""Copies from, to and between accelerators: the value of the call, and never too early.

On the fake accelerator, or CUDA; each test in a process of its own (on_accelerator.py).
``everything_held`` holds the streams that copies may run on; ``run_all`` lets the caller's go as
far as it can without them.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import warnings

import fake_accelerator as fake
import pytest
import torch
from on_accelerator import *  # noqa: F403

import dtorch_ops

pytestmark = pytest.mark.timeout(600)  # the first one may have to build the fake

SMALL, LARGE = 3, 1_000_000  # elements: below, and above, what is worth another copy
sizes = pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])

# From where to where: names of places.
WAYS = [("here", "cpu"), ("here", "there"), ("cpu", "here"), ("pinned", "here")]
ways = pytest.mark.parametrize(("source", "device"), WAYS, ids=["-".join(way) for way in WAYS])


# ---- Pending until the bytes are there ----------------------------------------------------------


@sizes
@on_accelerator()
def test_a_copy_to_the_host_is_pending_until_the_bytes_are_there(size):
    tensor = torch.zeros(size, device=DEVICE)
    drain(DEVICE)
    with everything_held(0) as others:
        tensor.add_(1)
        future = dtorch_ops.to_torch_async(tensor, device="cpu")
        assert_pending(future)
        run_all(DEVICE)
        assert_pending(future)
        for stream in others:
            run_all(stream)
        run_all(DEVICE)
        value = value_of(future)
    assert value.device == torch.device("cpu") and value.is_pinned()
    assert value.tolist() == [1] * size


@pytest.mark.parametrize("way", WAIT_WAYS)
@on_accelerator()
def test_no_way_of_waiting_reads_the_host_s_memory_too_early(way):
    tensor = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    with everything_held(0):
        tensor.add_(1)
        future = dtorch_ops.to_torch_async(tensor, device="cpu")
        gate = threading.Event()

        def read():
            value = WAIT_WAYS[way](future).tolist()
            assert gate.is_set()
            return value

        worker = blocked_in(read)
        run_all(DEVICE)
        assert worker.is_alive()
        gate.set()
    assert worker.finish(LIMIT) == [1, 1, 1]


@ways
@on_accelerator()
def test_every_direction_is_asynchronous_for_the_caller(source, device):
    def make():
        if source == "pinned":
            return pinned(1000, value=3)
        return torch.full((1000,), 3.0, device=source)

    tensor = make()
    assert value_of(dtorch_ops.to_torch_async(tensor, device=device)).tolist() == [3] * 1000
    drain(DEVICES[0])
    with nobody_synchronises():
        with everything_held(0, 1):
            futures = [
                dtorch_ops.to_torch_async(tensor, device=device),
                dtorch_ops.to_torch_async(tensor, device=torch.device(device), copy=True),
                torch.ops.dtorch.get_tensor_async(tensor, device=torch.device(device)),
            ]
            assert_pending(*futures)
            for each in DEVICES[:2]:
                run_all(each)
        values = dtorch_ops.wait_all(futures, LIMIT_MS)
    assert {value.device for value in values} == {torch.device(device)}
    assert [value.tolist() for value in values] == [[3] * 1000] * 3


@on_accelerator(devices=3)
def test_the_current_stream_of_the_tensors_device_is_the_one_that_counts():
    tensor = torch.zeros(3, device=DEVICES[2])
    drain(DEVICES[2])
    side = torch.Stream(DEVICES[2])
    torch.accelerator.set_stream(side)
    torch.accelerator.set_device_index(1)
    with held(side):
        tensor.add_(1)
        future = dtorch_ops.to_torch_async(tensor, device="cpu")
        assert_pending(future)
        assert torch.accelerator.current_device_index() == 1
        assert torch.accelerator.current_stream(DEVICES[2]) == side
    assert value_of(future).tolist() == [1, 1, 1]
    # And the default stream of the same device, stuck, is no obstacle.
    with held(DEVICES[2]):
        assert value_of(dtorch_ops.to_torch_async(tensor, device="cpu")).tolist() == [1, 1, 1]


@on_accelerator(devices=2)
def test_a_device_without_an_index_is_the_current_one():
    tensor = torch.full((3,), 2.0, device=DEVICES[1])
    moved = value_of(dtorch_ops.to_torch_async(tensor, device=DEVICE))
    assert moved.device == torch.device(DEVICES[0]) and moved.tolist() == [2, 2, 2]
    with torch.accelerator.device_index(1):
        assert dtorch_ops.to_torch(tensor, device=DEVICE).data_ptr() == tensor.data_ptr()
        host = dtorch_ops.to_torch(torch.ones(3), device=DEVICE)
        assert host.device == torch.device(DEVICES[1])


# ---- The value of the call ----------------------------------------------------------------------


@sizes
@on_accelerator()
def test_the_host_s_copy_has_the_value_of_the_call_whatever_is_written_afterwards(size):
    tensor = torch.zeros(size, device=DEVICE)
    value_of(dtorch_ops.to_torch_async(tensor, device="cpu"))
    drain(DEVICE)
    with everything_held(0):
        tensor.fill_(1)
        first = dtorch_ops.to_torch_async(tensor, device="cpu")
        tensor.fill_(2)
        second = dtorch_ops.to_torch_async(tensor, device="cpu")
        tensor.fill_(3)
        run_all(DEVICE)  # as far as it gets while the copies are held back
        assert_pending(first, second)
    assert value_of(first).unique().tolist() == [1]
    assert value_of(second).unique().tolist() == [2]
    assert tensor.cpu().unique().tolist() == [3]


@sizes
@on_accelerator()
def test_so_it_has_when_another_stream_writes_that_was_told_to_wait_for_the_caller_s(size):
    """Stream order is not only that of one stream."""
    tensor = torch.zeros(size, device=DEVICE)
    value_of(dtorch_ops.to_torch_async(tensor, device="cpu"))
    drain(DEVICE)
    writer = torch.Stream(DEVICE)
    with held(writer), everything_held(0):
        tensor.fill_(1)
        future = dtorch_ops.to_torch_async(tensor, device="cpu")
        event = torch.Event(DEVICE)
        event.record(current_stream())
        writer.wait_event(event)
        with writer:
            tensor.fill_(2)
        run_all(DEVICE)
        run_all(writer)
    assert value_of(future).unique().tolist() == [1]


@sizes
@on_accelerator(devices=2)
def test_the_copy_on_another_device_has_the_value_of_the_call(size):
    tensor = torch.zeros(size, device=DEVICES[0])
    value_of(dtorch_ops.to_torch_async(tensor, device=DEVICES[1]))
    drain(DEVICES[0])
    drain(DEVICES[1])
    with everything_held(0, 1):
        tensor.fill_(1)
        first = dtorch_ops.to_torch_async(tensor, device=DEVICES[1])
        tensor.fill_(2)
        for device in (DEVICES[0], DEVICES[1]):
            run_all(device)
        assert_pending(first)
    value = value_of(first)
    assert value.device == torch.device(DEVICES[1])
    assert value.cpu().unique().tolist() == [1]


@sizes
@pytest.mark.parametrize("memory", ["pinned", "pageable"])
@on_accelerator()
def test_the_device_s_copy_has_the_value_of_the_call(memory, size):
    source = pinned(size, value=1) if memory == "pinned" else torch.ones(size)
    value_of(dtorch_ops.to_torch_async(source, device=DEVICE))
    drain(DEVICE)
    with everything_held(0):
        future = dtorch_ops.to_torch_async(source, device=DEVICE)
        source.fill_(2)
        run_all(DEVICE)
        assert_pending(future)
        source.fill_(3)
    value = value_of(future)
    assert value.device == torch.device(DEVICES[0])
    assert value.cpu().unique().tolist() == [1]
    assert source.unique().tolist() == [3]


@sizes
@ways
@on_accelerator()
def test_a_source_that_is_dropped_at_once_is_copied_all_the_same(source, device, size):
    """Though its memory is asked for again, and written to, while the copy is held back."""

    def make(value):
        if source == "pinned":
            return pinned(size, value=value)
        return torch.full((size,), value, device=source)

    value_of(dtorch_ops.to_torch_async(make(0.0), device=device))
    drain(DEVICES[0])
    with everything_held(0, 1):
        tensor = make(1.0)
        future = dtorch_ops.to_torch_async(tensor, device=device)
        del tensor
        gc.collect()
        again = [make(9.0) for _ in range(3)]
        run_all(DEVICES[0])
        again += [make(8.0) for _ in range(3)]
        run_all(DEVICES[0])
        run_all(DEVICES[-1])
    assert value_of(future).cpu().unique().tolist() == [1]


# ---- Memory -------------------------------------------------------------------------------------


@ways
@on_accelerator()
def test_two_hundred_of_a_shape_leave_the_first_result_alone(source, device):
    """Memory is used again, of the results and of what was between."""

    def make(value):
        tensor = torch.full((5000,), value, device="cpu" if source == "pinned" else source)
        return tensor.pin_memory() if source == "pinned" else tensor

    first = value_of(dtorch_ops.to_torch_async(make(1000.0), device=device))
    pending = []
    for index in range(200):
        pending.append((index, dtorch_ops.to_torch_async(make(float(index)), device=device)))
        if index % 20 == 19:
            for number, future in pending:
                assert value_of(future).cpu().unique().tolist() == [number]
            pending.clear()
    assert first.cpu().unique().tolist() == [1000]


@on_accelerator()
def test_futures_are_dropped_at_random_and_the_others_are_right():
    chosen = random.Random(0)
    tensor = torch.zeros(5000, device=DEVICE)
    kept = []
    for index in range(300):
        tensor.fill_(index)
        future = dtorch_ops.to_torch_async(tensor, device="cpu")
        if chosen.random() < 0.3:
            kept.append((index, future))
        del future
        if len(kept) > 20:
            number, future = kept.pop(chosen.randrange(len(kept)))
            assert value_of(future).unique().tolist() == [number]
    for number, future in kept:
        assert value_of(future).unique().tolist() == [number]


@ways
@on_fake(MEMORY)
def test_all_memory_comes_back(source, device):
    def make():
        return pinned(5000) if source == "pinned" else torch.zeros(5000, device=source)

    def blocks():
        return fake.device_memory().live_blocks, fake.pinned_memory().live_blocks

    torch.empty(1, device=DEVICES[0])
    before = blocks()
    for dropped_while_pending in (False, True):
        with everything_held(0, 1):
            futures = [dtorch_ops.to_torch_async(make(), device=device) for _ in range(20)]
            if dropped_while_pending:
                del futures[::2]
        dtorch_ops.wait_all(futures, LIMIT_MS)
        del futures
        gc.collect()
        until(lambda: blocks() == before)


@on_accelerator()
def test_the_memory_of_a_result_is_the_consumer_s_own():
    tensor = torch.zeros(5000, device=DEVICE)
    first = dtorch_ops.to_torch(tensor, device="cpu")
    first.fill_(7)
    second = dtorch_ops.to_torch(tensor, device="cpu")
    assert first.data_ptr() != second.data_ptr()
    assert second.unique().tolist() == [0] and first.unique().tolist() == [7]
    address = first.data_ptr()
    view = first[10:]
    del first
    third = dtorch_ops.to_torch(tensor, device="cpu")
    assert third.data_ptr() != address and view.unique().tolist() == [7]


# ---- Shapes, strides and dtypes -----------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "there"])
@on_accelerator()
def test_layouts_are_kept_as_to_keeps_them(device):
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    layouts = {
        "contiguous": lambda t: t,
        "transposed": lambda t: t.transpose(0, 3),
        "matrix transposed": lambda t: t[0, 0].t(),
        "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
        "expanded": lambda t: t[0, 0, :1].expand(4, 5),
        "expanded number": lambda t: t[0, 0, 0, 0].expand(3, 2),
        "no dimension": lambda t: t[1, 2, 3, 4],
        "empty": lambda t: t[:0],
        "empty with strides": lambda t: t[:, :, 1:1].transpose(0, 1),
        "every other": lambda t: t[:, ::2, 1:, ::3],
        "row of a large one": lambda t: t[1, 1],
        "overlapping": lambda t: t.unfold(3, 3, 1),
        "one dimension of one": lambda t: t[:, :1].transpose(1, 2),
    }
    for name, layout in layouts.items():
        source = layout(base.to(DEVICES[0]))
        expected = source.to(device)
        drain(DEVICES[0])
        drain(device) if device != "cpu" else None
        with nobody_synchronises():
            with everything_held(0, 1):
                future = dtorch_ops.to_torch_async(source, device=device)
                if source.numel():
                    assert_pending(future)
            value = value_of(future)
        assert value.device == torch.device(device), name
        assert value.shape == expected.shape and value.stride() == expected.stride(), (
            f"{name}: {value.stride()}, expected {expected.stride()}"
        )
        assert torch.equal(value.cpu(), layout(base)), name
        if device == "cpu" and source.numel():
            assert value.is_pinned(), name


@on_accelerator()
def test_layouts_of_a_host_tensor_are_kept():
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    for memory in ("pageable", "pinned"):
        whole = base.pin_memory() if memory == "pinned" else base
        for source in (
            whole.transpose(0, 3),
            whole.contiguous(memory_format=torch.channels_last),
            whole[0, 0, :1].expand(4, 5),
            whole[1, 2, 3, 4],
            whole[:0],
            whole[:, ::2, 1:, ::3],
        ):
            expected = source.to(DEVICE)
            drain(DEVICE)
            with everything_held(0):
                future = dtorch_ops.to_torch_async(source, device=DEVICE)
            value = value_of(future)
            assert value.stride() == expected.stride()
            assert torch.equal(value.cpu(), source)


@pytest.mark.parametrize("device", ["cpu", "there"])
@on_accelerator()
def test_dtypes_are_kept(device):
    names = (
        "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
        " uint16 float8_e4m3fn"
    )
    for name in names.split():
        dtype = getattr(torch, name)
        host = torch.tensor([0.0, 1.0, 2.0, 0.5]).to(dtype)
        source = host.to(DEVICE)
        value = value_of(dtorch_ops.to_torch_async(source, device=device))
        assert value.dtype is dtype, name
        assert torch.equal(value.cpu().view(torch.uint8), host.view(torch.uint8)), name
        back = value_of(dtorch_ops.to_torch_async(host, device=DEVICE))
        assert back.dtype is dtype, name
        assert torch.equal(back.cpu().view(torch.uint8), host.view(torch.uint8)), name


@on_accelerator()
def test_conjugate_and_negative_views():
    host = torch.tensor([1 + 2j, 3 - 4j])
    for view in (lambda t: t.conj(), lambda t: t.conj().imag, lambda t: t.real):
        source = view(host.to(DEVICE))
        for device in ("cpu", DEVICES[-1]):
            value = value_of(dtorch_ops.to_torch_async(source, device=device))
            assert torch.equal(value.cpu().resolve_conj().resolve_neg(), view(host).clone())


# ---- Autograd -----------------------------------------------------------------------------------


@sizes
@ways
@on_accelerator()
def test_copies_are_differentiable(source, device, size):
    if source == "pinned":
        weight = pinned(size, value=1).requires_grad_()
    else:
        weight = torch.ones(size, device=source, requires_grad=True)
    with everything_held(0, 1):
        future = dtorch_ops.to_torch_async(weight * 2, device=device)
    value = value_of(future)
    assert value.requires_grad and value.grad_fn is not None and not value.is_leaf
    value.backward(torch.full((size,), 5.0, device=device))
    assert weight.grad.device == weight.device
    assert weight.grad.cpu().unique().tolist() == [10]
    with torch.no_grad():
        assert not dtorch_ops.to_torch(weight, device=device).requires_grad


@on_accelerator()
def test_an_optimizer_s_step_behind_the_call_is_not_seen():
    weight = torch.ones(3, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, foreach=False)
    weight.grad = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    with everything_held(0):
        future = dtorch_ops.to_torch_async(weight, device="cpu")
        optimizer.step()
        run_all(DEVICE)
    assert value_of(future).tolist() == [1, 1, 1]
    assert weight.tolist() == [0, 0, 0]


# ---- Streams that are stuck ---------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "there"])
@on_accelerator()
def test_a_copy_behind_stuck_work_holds_up_no_other_copy(device):
    tensor = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    stuck = new_streams(3)
    with held(*stuck):
        pending = []
        for stream in stuck:
            with stream:
                pending += [dtorch_ops.to_torch_async(tensor, device=device) for _ in range(2)]
        with torch.Stream(DEVICE):
            value_of(dtorch_ops.to_torch_async(tensor, device=device))
        value_of(dtorch_ops.to_torch_async(tensor, device=device))
        value_of(dtorch_ops.to_torch_async(tensor))
        assert_pending(*pending)
        for index in (2, 0, 1):
            release(stuck[index])
            dtorch_ops.wait_all(pending[2 * index : 2 * index + 2], LIMIT_MS)
    assert [value.tolist() for value in dtorch_ops.wait_all(pending)] == [[1, 1, 1]] * 6


@on_accelerator(devices=3)
def test_a_copy_that_is_stuck_leaves_the_other_device_s_streams_alone():
    tensor = torch.ones(3, device=DEVICES[0])
    there = torch.ones(3, device=DEVICES[1])
    drain(DEVICES[0])
    with held(DEVICES[0]):
        stuck = dtorch_ops.to_torch_async(tensor, device=DEVICES[1])
        there.add_(1)
        drain(DEVICES[1], LIMIT)
        assert value_of(dtorch_ops.to_torch_async(there, device="cpu")).tolist() == [2, 2, 2]
        assert value_of(dtorch_ops.to_torch_async(there, device=DEVICES[2])).tolist() == [2, 2, 2]
        with held(DEVICES[1]):
            # Nor is one from there held up, nor one to it that is not stuck.
            other = torch.full((3,), 4.0, device=DEVICES[2])
            with torch.Stream(DEVICES[1]):
                value = value_of(dtorch_ops.to_torch_async(other, device=DEVICES[1]))
                assert value.cpu().tolist() == [4, 4, 4]
        assert_pending(stuck)
    assert value_of(stuck).tolist() == [1, 1, 1]


@on_accelerator()
def test_a_consumer_is_never_ordered_behind_a_copy_that_is_stuck():
    """Whatever streams the library uses inside, and how many values it has completed since."""
    tensor = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    stuck = torch.Stream(DEVICE)
    consumer = torch.Stream(DEVICE)
    with held(stuck):
        with stuck:
            pending = dtorch_ops.to_torch_async(tensor, device="cpu")
        for _ in range(70):  # more than a pool has streams
            future = dtorch_ops.to_torch_async(tensor)
            value_of(future)
            with consumer:
                into = pinned(3).copy_(future.get(), non_blocking=True)
            drain(consumer, LIMIT)
            assert into.tolist() == [1, 1, 1]
        assert_pending(pending)


@on_fake(MANY_STREAMS)
def test_copies_of_many_streams_do_not_hold_each_other_up():
    """Though the library's own streams, of a pool, are fewer."""
    tensor = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    streams = new_streams(24)
    with held(*streams[:12]):
        pending = []
        for stream in streams[:12]:
            with stream:
                pending.append(dtorch_ops.to_torch_async(tensor, device="cpu"))
        for stream in streams[12:]:
            with stream:
                value_of(dtorch_ops.to_torch_async(tensor, device="cpu"))
        assert_pending(pending[0], pending[-1])
    dtorch_ops.wait_all(pending, LIMIT_MS)


@sizes
@on_fake(DELAYS)
def test_a_copy_does_not_wait_for_work_queued_behind_the_call(size):
    tensor, other = (torch.zeros(size, device=DEVICE) for _ in range(2))
    value_of(dtorch_ops.to_torch_async(tensor, device="cpu"))
    drain(DEVICE)
    side = torch.Stream(DEVICE)
    with held(side):
        with side:
            tensor.add_(1)
            future = dtorch_ops.to_torch_async(tensor, device="cpu")
            event = torch.Event(DEVICE)
            event.record(side)
            stuck = torch.Event(DEVICE)
            fake.lose_next_event()
            stuck.record(current_stream())
            side.wait_event(stuck)
            other.add_(1)
        release(side)
        assert value_of(future).unique().tolist() == [1]
        assert fake.queued(side)[-1] == "kernel"
    fake.reset()


@on_fake(COUNTS)
def test_copies_use_a_bounded_number_of_streams_and_threads():
    tensor = torch.ones(3, device=DEVICE)
    value_of(dtorch_ops.to_torch_async(tensor, device="cpu"))
    drain(DEVICE)
    with held(DEVICE):
        futures = [dtorch_ops.to_torch_async(tensor, device="cpu") for _ in range(2000)]
        assert len(our_threads()) <= 2
        assert len(fake.streams_in_use()) <= 3
    dtorch_ops.wait_all(futures, LIMIT_MS)
    until(lambda: our_threads() == [], 2 * LIMIT)


@on_accelerator(devices=2)
def test_the_result_on_another_device_is_ordered_for_its_consumers_there():
    tensor = torch.zeros(3, device=DEVICES[0])
    drain(DEVICES[0])
    side = torch.Stream(DEVICES[1])
    into = pinned(3)
    future = dtorch_ops.to_torch_async(tensor.add_(1), device=DEVICES[1])
    with side:
        into.copy_(future.get(), non_blocking=True)
    drain(side)
    assert into.tolist() == [1, 1, 1]


# ---- Without pinned memory, and what cannot be copied -------------------------------------------


@sizes
@on_fake(FAULTS)
def test_where_no_pinned_memory_is_left_a_plain_buffer_is_right_and_blocks_nobody(size):
    tensor = torch.zeros(size, device=DEVICE)
    drain(DEVICE)
    fake.reset_counters()
    with everything_held(0):
        tensor.fill_(1)
        fake.fail_call("pinned_alloc", "no pinned memory")
        future = dtorch_ops.to_torch_async(tensor, device="cpu")
        assert_pending(future)
        tensor.fill_(2)
        run_all(DEVICE)
        assert fake.counters().my_syncs() == {}
    value = value_of(future)
    assert fake.counters().my_syncs() == {}
    assert not value.is_pinned()
    assert value.unique().tolist() == [1]
    again = value_of(dtorch_ops.to_torch_async(tensor, device="cpu"))
    assert again.is_pinned() and again.unique().tolist() == [2]


@on_fake(FAULTS)
def test_a_plain_buffer_holds_up_no_other_stream():
    tensor = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    side = torch.Stream(DEVICE)
    with held(side):
        with side:
            fake.fail_call("pinned_alloc", "no pinned memory")
            stuck = dtorch_ops.to_torch_async(tensor, device="cpu")
        assert value_of(dtorch_ops.to_torch_async(tensor, device="cpu")).tolist() == [1, 1, 1]
        assert value_of(dtorch_ops.to_torch_async(tensor)) is tensor
        assert_pending(stuck)
    assert value_of(stuck).tolist() == [1, 1, 1]


@on_fake(FAULTS)
def test_a_plain_buffer_waits_for_no_other_stream_and_for_no_later_work():
    tensor = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    side = torch.Stream(DEVICE)
    with held(DEVICE, side):
        with side:
            fake.fail_call("pinned_alloc", "no pinned memory")
            future = dtorch_ops.to_torch_async(tensor, device="cpu")
            while fake.queued(side):
                fake.step(side)
            tensor.add_(1)  # later, and stuck, as is the default stream
        assert value_of(future).tolist() == [1, 1, 1]
        assert fake.queued(side)[-1] == "kernel"


@sizes
@pytest.mark.parametrize("memory", ["pinned", "pageable"])
@on_fake(FAULTS)
def test_a_host_tensor_gets_to_the_device_without_pinned_memory(memory, size):
    source = pinned(size, value=1) if memory == "pinned" else torch.ones(size)
    torch.empty(1, device=DEVICE)
    with everything_held(0):
        fake.fail_call("pinned_alloc", "no pinned memory")
        future = dtorch_ops.to_torch_async(source, device=DEVICE)
        source.fill_(2)
        assert fake.counters().my_syncs() == {}
    assert value_of(future).cpu().unique().tolist() == [1]


@on_accelerator()
def test_sparse_tensors_are_refused_and_told_what_to_do():
    torch.empty(1, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = torch.eye(3)
        sources = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_bsr((1, 1))]
    for source in sources:
        error = error_of(lambda source=source: dtorch_ops.to_torch_async(source, device=DEVICE))
        assert type(error) is NotImplementedError, repr(error)
        assert "sparse" in str(error).lower() and "to_dense" in str(error), error
        assert dtorch_ops.to_torch(source, device="cpu").layout == source.layout


# ---- Errors -------------------------------------------------------------------------------------


@ways
@on_fake(FAULTS)
def test_a_copy_that_fails_on_the_device_fails_its_future_and_no_other_device_s(source, device):
    tensor = pinned(3) if source == "pinned" else torch.ones(3, device=source)
    other = torch.ones(3, device=DEVICES[2])
    value_of(dtorch_ops.to_torch_async(tensor, device=device))
    drain(DEVICES[0])
    with everything_held(0, 1):
        fake.fail_next("copy", "the copy went wrong")
        future = dtorch_ops.to_torch_async(tensor, device=device)
        healthy = dtorch_ops.to_torch_async(other, device="cpu")
    error = error_of(lambda: value_of(future))
    assert isinstance(error, RuntimeError) and "the copy went wrong" in str(error), repr(error)
    assert "the copy went wrong" in str(error_of(future.value))
    assert value_of(healthy).tolist() == [1, 1, 1]
    fake.reset_errors()
    tensor = pinned(3, value=1) if source == "pinned" else torch.ones(3, device=source)
    value = value_of(dtorch_ops.to_torch_async(tensor, device=device))
    assert value.tolist() == [1, 1, 1]


@on_fake(FAULTS)
def test_work_that_fails_before_the_copy_fails_its_future():
    tensor = torch.ones(3, device=DEVICE)
    value_of(dtorch_ops.to_torch_async(tensor, device="cpu"))
    fake.fail_next("kernel", "the kernel went wrong")
    with held(DEVICE):
        tensor.add_(1)
        futures = [dtorch_ops.to_torch_async(tensor, device=d) for d in ("cpu", DEVICES[1])]
    for future in futures:
        error = error_of(lambda future=future: value_of(future))
        assert "the kernel went wrong" in str(error), repr(error)


@pytest.mark.parametrize("call", ["event", "copy", "wait"])
@ways
@on_fake(FAULTS)
def test_an_error_of_the_call_is_raised_by_the_call_or_completes_the_future(source, device, call):
    """Nobody gets a wrong value by it, nothing hangs, and the next one is right."""
    tensor = pinned(3, value=1) if source == "pinned" else torch.ones(3, device=source)
    value_of(dtorch_ops.to_torch_async(tensor, device=device))
    drain(DEVICES[0])
    fake.fail_call(call, f"no {call}")
    try:
        value = value_of(dtorch_ops.to_torch_async(tensor, device=device))
    except torch.AcceleratorError as error:
        assert f"no {call}" in str(error)
    else:
        assert value.tolist() == [1, 1, 1]
    fake.reset_errors()  # what was asked for, if no such call was made
    assert value_of(dtorch_ops.to_torch_async(tensor, device=device)).tolist() == [1, 1, 1]


@on_fake(FAULTS)
def test_memory_that_is_not_there_is_an_error_of_the_call():
    tensor = torch.ones(1000, device=DEVICE)
    value_of(dtorch_ops.to_torch_async(tensor, device=DEVICES[1]))
    fake.fail_call("alloc", "no memory")
    error = error_of(lambda: dtorch_ops.to_torch_async(tensor, device=DEVICES[1]))
    assert type(error) is torch.OutOfMemoryError and "no memory" in str(error), repr(error)
    value_of(dtorch_ops.to_torch_async(tensor, device=DEVICES[1]))


# ---- The end of the process, forks, TorchScript -------------------------------------------------


@on_fake(FAULTS, timeout=8, runs=3)
def test_the_process_ends_with_copies_pending():
    global kept
    tensor = torch.ones(300_000, device=DEVICE)
    host = pinned(3)
    kept = []
    everything = everything_held(0, 1)
    everything.__enter__()
    for device in ("cpu", DEVICES[1]):
        kept += [dtorch_ops.to_torch_async(tensor, device=device) for _ in range(10)]
        kept += [dtorch_ops.to_torch_async(tensor[:5], device=device) for _ in range(10)]
    kept += [dtorch_ops.to_torch_async(host, device=DEVICE) for _ in range(10)]
    fake.fail_call("pinned_alloc", "no pinned memory")
    kept.append(dtorch_ops.to_torch_async(tensor, device="cpu"))
    del kept[::7]
    assert_pending(*kept[::5])


@on_accelerator()
def test_a_fork_with_copies_pending_leaves_the_parent_alone():
    tensor = torch.ones(3, device=DEVICE)
    ready = dtorch_ops.to_torch_async(tensor, device="cpu")
    value_of(ready)
    with everything_held(0):
        futures = [dtorch_ops.to_torch_async(tensor, device="cpu") for _ in range(20)]

        def child(link):
            error = error_of(lambda: futures[0].wait(LIMIT_MS))
            assert isinstance(error, dtorch_ops.DTorchError) and "fork" in str(error)
            assert ready.get().tolist() == [1, 1, 1]
            futures.clear()

        for leave in (os._exit, sys.exit):
            forked(child, leave).end()
        assert_pending(futures[0])
    assert [value.tolist() for value in dtorch_ops.wait_all(futures, LIMIT_MS)] == [[1, 1, 1]] * 20


@on_accelerator()
def test_a_scripted_function_copies():
    tensor = torch.zeros(3, device=DEVICE)
    fetch = compiled("fetch_to")
    assert fetch(tensor, "cpu").tolist() == [0, 0, 0]
    drain(DEVICE)
    with everything_held(0):
        tensor.add_(1)
        gate = threading.Event()

        def run():
            value = fetch(tensor, "cpu").tolist()
            assert gate.is_set()
            return value

        worker = blocked_in(run)
        gate.set()
    assert worker.finish(LIMIT) == [1, 1, 1]
    assert fetch(tensor, DEVICES[-1]).device == torch.device(DEVICES[-1])
