"""The fake accelerator itself: what the tests that use it rely on.

It is the accelerator of the whole process in which it is installed, so each test runs in one of its
own, forked from a server that has imported torch alone (fresh.py).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

import fake_accelerator as fake
import pytest
import torch
from fake_accelerator.isolated import isolated
from helpers import Worker

pytestmark = pytest.mark.timeout(600)  # the first one may have to build it


# ---- What the bodies share ----------------------------------------------------------------------


def error_of(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("expected an error")


def poisoned(tensor: torch.Tensor) -> bool:
    """Whether a CPU tensor has the bytes of fresh or freed memory, and no other."""
    return bool((tensor.view(torch.uint8) == fake.POISON).all())


def pinned(*size: int, value: float = 0.0) -> torch.Tensor:
    return torch.empty(*size, pin_memory=True).fill_(value)


def recorded(stream: torch.Stream) -> torch.Event:
    event = torch.Event("fake")
    event.record(stream)
    return event


def default_stream(device: str = "fake:0") -> torch.Stream:
    return torch.accelerator.current_stream(device)


def in_child(function: Callable[[], None]) -> None:
    """Run ``function`` in a forked child, which must end well within ten seconds."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        code = 1
        try:
            function()
            code = 0
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


on_fake = isolated(error_of, poisoned, pinned, recorded, default_stream, in_child)


# ---- The device ---------------------------------------------------------------------------------


@on_fake
def test_it_is_initialized_by_its_first_use_and_by_nothing_else():
    assert torch.accelerator.current_accelerator() == torch.device("fake")
    assert torch.accelerator.device_count() == fake.DEVICES == 4
    torch.manual_seed(0)
    torch.accelerator.set_device_index(1)
    torch.accelerator.current_stream("fake:2")
    assert not torch.ones(2).is_pinned()
    (torch.ones(2, requires_grad=True) * 2).sum().backward()
    assert not fake.is_initialized()
    assert fake.streams_in_use() == []

    tensor = torch.empty(2, device="fake")
    assert tensor.device == torch.device("fake:1")
    assert fake.is_initialized()
    assert [fake.has_context(i) for i in range(4)] == [False, True, False, False]
    # A stream of its own and an event are use as well; pinned memory needs any one device.
    torch.Stream("fake:2")
    recorded(default_stream("fake:3"))
    with torch.accelerator.device_index(0):
        pinned(1)
    assert [fake.has_context(i) for i in range(4)] == [False, True, True, True]
    assert fake.streams_in_use() == ["fake:3/0"]


@on_fake
def test_operators():
    base = torch.arange(12.0).reshape(3, 4)
    on_device = base.to("fake")
    for view in (
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[:, 1:3],
        lambda t: t[1].expand(2, 4),
        lambda t: t.unfold(1, 2, 1),
        lambda t: t.flatten()[::5],
        lambda t: t[0, 0],
        lambda t: t[:0],
    ):
        expected, got = view(base), view(on_device)
        for function in (
            torch.clone,
            torch.Tensor.contiguous,
            torch.Tensor.double,
            lambda t: t + 1.5,
            lambda t: t + t,
            lambda t: t * t.to(torch.int32),
            lambda t: torch.add(t, t, alpha=2),
            lambda t: torch.sin(t),
        ):
            right, result = function(expected), function(got)
            assert result.device == torch.device("fake:0")
            assert result.dtype == right.dtype and torch.equal(result.cpu(), right)
        host = torch.empty_like(expected)
        assert torch.equal(host.copy_(got), expected)
    back = torch.zeros(4, 3, device="fake", dtype=torch.float64)
    back.t().copy_(base)
    assert torch.equal(back.cpu(), base.t().double())
    assert torch.tensor([1 + 2j]).to("fake").conj().cpu().item() == 1 - 2j
    assert torch.ones(2, device="fake").resize_(4)[:2].tolist() == [1, 1]
    weight = torch.ones(3, device="fake", requires_grad=True)
    (weight * weight).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [2, 2, 2]
    assert str(error_of(lambda: torch.ones(2) + torch.ones(2, device="fake"))).startswith("Expect")
    assert "below 4, got 7" in str(error_of(lambda: torch.empty(2, device="fake:7")))


@on_fake
def test_pinned_memory_initializes_the_current_device_if_none_is():
    torch.accelerator.set_device_index(2)
    assert pinned(2, value=1).tolist() == [1, 1]
    assert [fake.has_context(i) for i in range(4)] == [False, False, True, False]


# ---- Asynchrony ---------------------------------------------------------------------------------


@on_fake
def test_nothing_happens_before_its_stream_gets_there():
    source = torch.ones(4, device="fake")
    into = pinned(4, value=7)
    fake.drain("fake")
    with fake.held("fake"):
        source.add_(1)
        into.copy_(source, non_blocking=True)
        event = recorded(default_stream())
        source.zero_()
        assert fake.queued("fake") == ["kernel", "copy", "event", "kernel"]
        assert into.tolist() == [7] * 4 and not event.query()
        assert fake.step("fake") == "kernel"
        assert into.tolist() == [7] * 4
        assert fake.step("fake") == "copy"
        assert into.tolist() == [2] * 4 and not event.query()
        assert fake.step("fake") == "event"
        assert event.query()
        assert fake.queued("fake") == ["kernel"]
    fake.drain("fake")
    assert source.tolist() == [0] * 4


@on_fake
def test_pinned_bytes_are_read_by_the_device_and_pageable_ones_by_the_call():
    late, early = pinned(2, value=1), torch.ones(2)
    with fake.held("fake"):
        from_pinned = late.to("fake", non_blocking=True)
        from_pageable = early.to("fake", non_blocking=True)
        late.fill_(5)
        early.fill_(5)
    assert from_pinned.tolist() == [5, 5]
    assert from_pageable.tolist() == [1, 1]


@on_fake
def test_a_copy_that_blocks_is_counted_and_one_that_does_not_is_not():
    tensor, into = torch.ones(2, device="fake"), pinned(2)
    fake.drain("fake")
    fake.reset_counters()
    into.copy_(tensor, non_blocking=True)
    tensor.copy_(into, non_blocking=True)
    tensor.to("fake:1")
    tensor.to("cpu", non_blocking=True)  # torch pins it
    assert fake.counters().syncs() == {} and fake.counters().copies == 4

    into.copy_(tensor)
    torch.empty(2).copy_(tensor, non_blocking=True)
    torch.ones(2).to("fake")
    assert fake.counters().my_syncs() == {"blocking_copy": 3}
    tensor[0].item()
    torch.sin(tensor)
    default_stream().synchronize()
    torch.accelerator.synchronize()
    Worker(recorded(default_stream()).synchronize).finish()
    counts = fake.counters()
    assert counts.my_syncs() == {
        "blocking_copy": 3,
        "item": 1,
        "fallback": 1,
        "synchronize_stream": 1,
        "synchronize_device": 1,
    }
    assert counts.other_syncs() == {"synchronize_event": 1}


@on_fake
def test_a_wait_sleeps_until_the_event_fires():
    with fake.held("fake"):
        event = recorded(default_stream())
        waiters = [Worker(event.synchronize), Worker(default_stream().synchronize)]
        fake.until_blocked(2)
        assert all(waiter.is_alive() for waiter in waiters)
    for waiter in waiters:
        waiter.finish()
    assert fake.counters().event_queries == 0
    assert isinstance(error_of(lambda: fake.until_blocked(1, timeout=0)), TimeoutError)


@on_fake
def test_streams_are_ordered_by_events_alone():
    first, second = torch.Stream("fake"), torch.Stream("fake")
    tensor = torch.zeros(2, device="fake")
    default_stream().synchronize()
    results = []
    with fake.held(first):
        with first:
            tensor.add_(1)
        for waits in (False, True):
            if waits:
                second.wait_event(recorded(first))
            with second:
                results.append(tensor.to("cpu", non_blocking=True))
            second_done = recorded(second)
            if not waits:
                second_done.synchronize()
        assert not second_done.query()
        assert fake.queued(second) == ["wait", "copy", "event"]
    second_done.synchronize()
    assert [result.tolist() for result in results] == [[0, 0], [1, 1]]


@on_fake
def test_copies_between_devices_are_ordered_on_both():
    source = torch.ones(2, device="fake:0")
    into = torch.zeros(2, device="fake:1")
    fake.drain("fake:1")
    with fake.held("fake:0"):
        source.add_(1)
        into.copy_(source)
        into.mul_(10)
        with fake.held("fake:1"):
            assert fake.queued("fake:1") == ["kernel"]
            assert fake.step("fake:1") is None  # it waits for the copy
    assert into.tolist() == [20, 20]


@on_fake
def test_torch_futures_order_streams():
    future = torch.futures.Future(devices=["fake:0"])
    assert not fake.is_initialized()
    first, second = torch.Stream("fake"), torch.Stream("fake")
    tensor = torch.zeros(2, device="fake")
    fake.drain("fake")
    fake.reset_counters()
    with fake.held(first):
        with first:
            future.set_result(tensor.add_(1))
        with second:
            got = future.wait().to("cpu", non_blocking=True)
        assert fake.queued(first) == ["kernel", "event"]
        assert fake.queued(second) == ["wait", "copy"]
    fake.drain(second)
    assert got.tolist() == [1, 1]
    counts = fake.counters()
    assert counts.syncs() == {} and counts.events_recorded == counts.stream_waits == 1


# ---- Events that fire late, or never ------------------------------------------------------------


@on_fake
def test_events_fire_when_they_are_told_to():
    stream = default_stream()
    fake.delay_events()
    events = [recorded(stream) for _ in range(3)]
    fake.stop_delaying_events()
    last = recorded(stream)
    last.synchronize()  # the stream goes on
    assert [event.query() for event in events] == [False] * 3
    fake.fire_events(1)
    assert [event.query() for event in events] == [False, True, False]
    assert fake.delayed_events() == 2
    with fake.held(stream):
        fake.delay_events(stream)
        unreached = recorded(stream)
        other = recorded(torch.Stream("fake"))
        fake.stop_delaying_events()
        fake.fire_events()
        assert fake.delayed_events() == 0
        other.synchronize()
        assert events[0].query() and events[2].query() and not unreached.query()
    unreached.synchronize()
    assert isinstance(error_of(lambda: fake.fire_events(0)), IndexError)


@on_fake
def test_an_event_that_never_fires_beside_others():
    stream, other = default_stream(), torch.Stream("fake")
    fake.lose_next_event()
    lost = recorded(stream)
    later = recorded(stream)
    later.synchronize()
    waiter = Worker(lost.synchronize)
    fake.until_blocked(1)
    other.wait_event(lost)
    assert not lost.query() and not other.query()
    fake.reset()  # or the thread would be left
    waiter.finish()
    fake.drain(other)


# ---- Memory -------------------------------------------------------------------------------------


@on_fake
def test_freed_memory_is_used_again_at_once_by_its_own_stream_alone():
    tensor = torch.ones(100, device="fake")
    address = tensor.data_ptr()
    with fake.held("fake"):
        kept = tensor.to("cpu", non_blocking=True)
        del tensor
        with torch.Stream("fake"):
            assert torch.empty(100, device="fake").data_ptr() != address
        again = torch.empty(100, device="fake")
        assert again.data_ptr() == address
        again.fill_(5)
    fake.drain("fake")
    assert kept.tolist() == [1] * 100  # queued before
    assert fake.device_memory(0).reuses == 1


@on_fake
def test_a_stream_that_is_not_recorded_reads_what_comes_after():
    for record in (False, True):
        side = torch.Stream("fake")
        tensor = torch.ones(100, device="fake")
        default_stream().synchronize()
        address = tensor.data_ptr()
        with fake.held(side):
            with side:
                copy = tensor.to("cpu", non_blocking=True)
            if record:
                tensor.record_stream(side)
            del tensor
            again = torch.empty(100, device="fake")
            assert (again.data_ptr() == address) is not record
            assert fake.device_memory(0).deferred_blocks == int(record)
            fake.drain("fake")
        fake.drain(side)
        assert copy.tolist() == [1] * 100 if record else poisoned(copy)
        del again
    # What was deferred is there again.
    reuses = fake.device_memory(0).reuses
    blocks = [torch.empty(100, device="fake") for _ in range(2)]
    assert fake.device_memory(0).reuses == reuses + 2
    assert address in [block.data_ptr() for block in blocks]


@on_fake
def test_pinned_memory_waits_for_what_uses_it():
    tensor = torch.ones(100, device="fake")
    into = pinned(100)
    assert into.is_pinned() and into.device == torch.device("cpu")
    address = into.data_ptr()
    with fake.held("fake"):
        into.copy_(tensor, non_blocking=True)
        del into
        assert fake.pinned_memory().deferred_blocks == 1
        other = pinned(100)
        assert other.data_ptr() != address
    fake.drain("fake")
    again = torch.empty(100, pin_memory=True)
    assert again.data_ptr() == address and poisoned(again)
    assert fake.pinned_memory().reuses == 1
    assert fake.pinned_memory().live_blocks == 2


@on_fake
def test_memory_goes_back_to_the_system_when_nothing_is_queued():
    tensor = torch.ones(1000, device="fake")
    with fake.held("fake"):
        tensor.add_(1)
        del tensor
        torch.accelerator.empty_cache()
        assert fake.device_memory(0).cached_blocks == 1
    fake.drain("fake")
    torch.accelerator.empty_cache()
    assert fake.device_memory(0).cached_blocks == 0
    assert fake.device_memory(0).live_bytes == 0


# ---- Errors -------------------------------------------------------------------------------------


@on_fake
def test_a_task_that_fails_fails_its_device_until_the_errors_are_reset():
    tensor, other = torch.ones(2, device="fake"), torch.ones(2, device="fake:1")
    fake.drain("fake")
    before = recorded(default_stream())
    before.synchronize()
    fake.fail_next("copy", "the copy went wrong")
    with fake.held("fake"):
        into = tensor.to("cpu", non_blocking=True)
        event = recorded(default_stream())
        waiter = Worker(event.synchronize)
        fake.until_blocked(1)
    assert "the copy went wrong" in str(error_of(waiter.finish))
    for call in (
        event.query,
        event.synchronize,
        before.query,
        default_stream().synchronize,
        lambda: torch.accelerator.synchronize("fake:0"),
        lambda: tensor + 1,
        lambda: recorded(default_stream()),
        lambda: torch.empty(2, device="fake:0"),
    ):
        error = error_of(call)
        assert type(error) is torch.AcceleratorError and "the copy went wrong" in str(error)
    assert other.tolist() == [1, 1]
    assert poisoned(into)

    fake.reset_errors()
    assert "the copy went wrong" in str(error_of(event.synchronize))
    assert torch.ones(2, device="fake").tolist() == [1, 1]


@on_fake
def test_an_error_ends_the_waits_for_held_streams_and_lost_events_too():
    side = torch.Stream("fake")
    fake.lose_next_event()
    lost = recorded(side)
    with fake.held("fake"):
        queued = recorded(default_stream())
        waiters = [Worker(lost.synchronize), Worker(queued.synchronize)]
        fake.until_blocked(2)
        fake.fail_next("event", "broken")
        recorded(side)
        for waiter in waiters:
            assert "broken" in str(error_of(waiter.finish))


@on_fake
def test_a_call_that_fails_leaves_the_device_alone():
    tensor = torch.ones(2, device="fake")
    event = recorded(default_stream())
    calls = {
        "kernel": lambda: tensor + 1,
        "copy": tensor.cpu,
        "event": lambda: event.record(default_stream()),
        "wait": lambda: default_stream().wait_event(event),
        "alloc": lambda: torch.empty(2, device="fake"),
        "pinned_alloc": lambda: pinned(2),
        "query_event": event.query,
        "synchronize_event": event.synchronize,
        "synchronize_stream": default_stream().synchronize,
        "synchronize_device": torch.accelerator.synchronize,
        "stream": lambda: torch.Stream("fake"),
    }
    for name, call in calls.items():
        fake.fail_call(name, f"no {name}")
        error = error_of(call)
        expected = torch.OutOfMemoryError if "alloc" in name else torch.AcceleratorError
        assert type(error) is expected and f"no {name}" in str(error), repr(error)
        call()


# ---- Capture ------------------------------------------------------------------------------------


@on_fake
def test_a_capture_forbids_queries():
    side = torch.Stream("fake")
    tensor = torch.ones(2, device="fake")
    event = recorded(default_stream())
    event.synchronize()
    for mode, here, there in (
        ("global", False, False),
        ("thread_local", False, True),
        ("relaxed", True, True),
    ):
        for call in (event.query, event.synchronize, default_stream().synchronize):
            for allowed, run in ((here, call), (there, lambda call=call: Worker(call).finish())):
                with fake.capturing(side, mode) as capture:
                    if allowed:
                        run()
                    else:
                        assert "capturing" in str(error_of(run))
                assert capture.intact is allowed
    with fake.capturing(side) as capture, side:
        assert side.is_capturing()
        tensor.add_(1)
        inside = recorded(side)
    assert capture.intact
    assert fake.queued(side) == [] and tensor.tolist() == [1, 1]
    assert "graph" in str(error_of(inside.query))


# ---- Fork and exit ------------------------------------------------------------------------------


@on_fake
def test_a_child_forked_before_the_first_use_can_use_it():
    def child():
        assert not fake.is_initialized()
        assert (torch.ones(2, device="fake") + 1).tolist() == [2, 2]

    in_child(child)
    assert not fake.is_initialized()
    assert torch.ones(2, device="fake").tolist() == [1, 1]


@on_fake
def test_a_child_forked_after_it_is_told_so_and_does_not_hang():
    tensors = [torch.ones(2, device="fake"), pinned(2)]
    stream, event = default_stream(), recorded(default_stream())
    side = torch.Stream("fake")
    fake.hold(side)
    waiter = Worker(recorded(side).synchronize)
    fake.until_blocked(1)

    def child():
        assert not fake.is_initialized() and not fake.has_context(0)
        for call in (
            lambda: torch.empty(2, device="fake"),
            lambda: tensors[0] + 1,
            tensors[0].cpu,
            lambda: pinned(2),
            event.query,
            event.synchronize,
            stream.synchronize,
            lambda: torch.Stream("fake"),
            lambda: torch.accelerator.synchronize(),
        ):
            assert "Cannot re-initialize fake accelerator" in str(error_of(call))
        tensors.clear()
        fake.release(side)
        fake.reset()
        assert torch.ones(2).sum() == 2

    in_child(child)
    assert waiter.is_alive()
    fake.release(side)
    waiter.finish()
    assert tensors[0].tolist() == [1, 1]


@on_fake
def test_the_process_ends_with_everything_pending():
    streams = [torch.Stream(f"fake:{i % fake.DEVICES}") for i in range(8)]
    for stream in streams[::2]:
        fake.hold(stream)
    global kept
    kept = []
    fake.lose_next_event()
    for stream in streams:
        with stream:
            tensor = torch.ones(100_000, device=stream.device)
            kept += [tensor.to("cpu", non_blocking=True) for _ in range(20)]
            kept.append(recorded(stream))
    events = [event for event in kept if isinstance(event, torch.Event)]
    for event in events[0], events[2]:
        threading.Thread(target=event.synchronize, daemon=True).start()
    fake.until_blocked(2)
