"""Values that go from device memory to device memory of another process, without the host.

On the fake accelerator, each test in a process of its own (on_fake.py). Both processes are told
that memory may be shared, and part before either has used the device.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import time

import fake_accelerator as fake
import pytest
import torch
from device_producer import (
    KINDS,
    SIZE,
    Producer,
    WriteAndRelease,
    calls,
    check,
    fail_copy,
    fail_open,
    full,
    leave_python,
    pinned_allocations,
    release,
    syncs,
)
from on_accelerator import *  # noqa: F403

import dtorch_ops

on_fake_with_a_producer = functools.partial(
    on_fake,
    "what is shared is counted; CUDA's is in gpu/",
    prelude=PRELUDE + "from device_producer import *\n",
)

pytestmark = pytest.mark.timeout(600)  # the first one may have to build the fake

# ---- The way there ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAIT_WAYS)
@on_fake_with_a_producer()
def test_a_value_goes_from_device_to_device(way):
    producer = Producer(full)
    promise, future = pending()
    producer.fulfil(promise)
    check(WAIT_WAYS[way](future), 1)
    assert fake.sharing_calls() == calls(allocated=1)
    assert producer.ask(fake.sharing_calls) == calls(opened=1)
    assert pinned_allocations() == producer.ask(pinned_allocations) == 0
    producer.end()


@on_fake_with_a_producer()
def test_memory_is_used_again_and_every_value_is_its_own():
    producer = Producer(full)
    values = []
    for _ in range(20):
        promise, future = pending()
        producer.fulfil(promise)
        values.append(value_of(future))
        until(lambda: fake.queued("fake:1") == [])
    for number, value in enumerate(values, 1):
        check(value, number)
    # The copy out of a block may still hold it when the next value comes.
    assert fake.sharing_calls()[0] <= 2
    assert producer.ask(fake.sharing_calls)[2] <= 2
    producer.end()


@on_fake_with_a_producer()
def test_many_at_once():
    producer = Producer(full)
    futures = []
    for _ in range(30):
        promise, future = pending()
        producer.fulfil(promise)
        futures.append(future)
    for number, future in enumerate(futures, 1):
        check(value_of(future), number)
    producer.end()


@on_fake_with_a_producer()
def test_no_more_is_provided_than_the_limit_and_the_rest_goes_through_the_host():
    dtorch_ops.set_cache_limit(5 << 20)
    producer = Producer(full, before=lambda: fake.hold("fake:1"))
    futures = []
    for _ in range(10):
        promise, future = pending()
        producer.fulfil(promise)
        futures.append(future)
    until(lambda: dtorch_ops.stats()["device_bytes"] > 4_000_000)
    assert_pending(*futures)
    producer.ask(release)
    for number, future in enumerate(futures, 1):
        check(value_of(future), number)
    assert fake.sharing_calls() == calls(allocated=2)
    assert dtorch_ops.stats()["device_bytes"] == 2 * (2 << 20)
    assert producer.ask(pinned_allocations) > 0
    producer.end()


@on_fake_with_a_producer()
def test_the_value_is_that_of_the_call():
    def make(_):
        tensor = torch.zeros(SIZE, device="fake:1")
        fake.drain("fake:1")
        fake.hold("fake:1")
        tensor.add_(1)
        written.append(tensor)
        return tensor

    written = []
    producer = Producer(make)
    promise, future = pending()
    producer.fulfil(promise)

    assert_pending(future)
    producer.ask(WriteAndRelease())
    check(value_of(future), 1)
    producer.end()


@pytest.mark.parametrize("kind", KINDS)
@on_fake_with_a_producer()
def test_kinds_of_tensors(kind):
    producer = Producer(lambda _: KINDS[kind]())
    promise, future = pending()
    producer.fulfil(promise)
    value, expected = value_of(future), KINDS[kind]().detach()
    assert value.dtype == expected.dtype and value.device == expected.device
    assert torch.equal(value.cpu(), expected.cpu().resolve_conj())
    shared = kind not in ("of nine dimensions", "small")
    assert fake.sharing_calls() == calls(allocated=int(shared))
    producer.end()


@on_fake_with_a_producer()
def test_what_arrives_is_memory_of_torch_s_own_allocator():
    producer = Producer(full)
    promise, future = pending()
    producer.fulfil(promise)
    value = value_of(future)
    assert fake.device_memory(1).live_bytes >= SIZE * 4
    del value, future, promise
    until(lambda: fake.device_memory(1).live_bytes == 0)
    producer.end()


@on_fake_with_a_producer()
def test_neither_caller_synchronises():
    producer = Producer(full)
    promise, future = pending()
    fake.reset_counters()
    producer.fulfil(promise)
    future.wait(LIMIT * 1000)
    assert fake.counters().my_syncs() == {}
    assert producer.ask(syncs) == {}
    producer.end()


# ---- What does not work goes through the host ----------------------------------------------------


@pytest.mark.parametrize("side", ["allocate", "open"])
@on_fake_with_a_producer()
def test_what_the_driver_refuses_goes_through_the_host(side):
    producer = Producer(full)
    if side == "allocate":
        fake.fail_sharing("allocate")
    else:
        producer.ask(fail_open)
    promise, future = pending()
    producer.fulfil(promise)
    check(value_of(future), 1)
    assert producer.ask(pinned_allocations) > 0
    promise, future = pending()
    producer.fulfil(promise)
    check(value_of(future), 2)
    assert producer.ask(fake.sharing_calls) == calls(opened=1)
    producer.end()


@on_fake_with_a_producer()
def test_without_memory_for_the_snapshot_a_value_goes_through_the_host():
    fake.share_memory()
    promise, future = pending()

    def producer(link):
        own = pickle.loads(link.recv())
        tensor = torch.full((1_000_000,), 3.0, device="fake:1")
        fake.drain("fake:1")
        fake.fail_call("alloc", "no memory here")
        own.set_value(tensor)
        link.recv()

    child = forked(producer)
    child.say(pickle.dumps(promise))
    assert value_of(future).unique().tolist() == [3]
    child.say()
    child.end()


@on_fake_with_a_producer()
def test_an_error_of_the_copy_reaches_the_consumer():
    producer = Producer(full, before=lambda: fake.hold("fake:1"))
    promise, future = pending()
    producer.fulfil(promise)
    producer.ask(fail_copy)
    producer.ask(release)
    assert "the copy has failed" in str(error_of(lambda: value_of(future)))
    producer.child.kill()


@on_fake_with_a_producer()
def test_a_consumer_that_is_stopped_holds_nobody_up_for_long():
    """The question is not waited for without end; and what is set is there when it goes on."""
    fake.share_memory()
    promises, futures = zip(*[pending() for _ in range(5)], strict=True)

    def producer(link):
        own = pickle.loads(link.recv())
        os.kill(os.getppid(), signal.SIGSTOP)
        began = time.monotonic()
        for number, each in enumerate(own, 1):
            each.set_value(full(number))
        here = dtorch_ops.to_torch_async(torch.ones(3, device="fake:1"))
        assert here.wait(LIMIT * 1000).tolist() == [1, 1, 1]
        took = time.monotonic() - began
        os.kill(os.getppid(), signal.SIGCONT)
        link.send(took)
        link.recv()

    child = forked(producer)
    child.say(pickle.dumps(promises))
    for number, future in enumerate(futures, 1):
        check(value_of(future), number)
    assert child.hear() < 8  # once, and not for each
    child.say()
    child.end()


# ---- Ends ---------------------------------------------------------------------------------------


@on_fake_with_a_producer()
def test_a_value_that_was_set_survives_its_producer_and_memory_goes_with_that():
    producer = Producer(full)
    promise, future = pending()
    producer.fulfil(promise)
    until(future.is_ready)
    producer.child.kill()
    check(value_of(future), 1)
    until(lambda: fake.sharing_calls() == calls(allocated=1, freed=1))
    assert dtorch_ops.stats()["device_bytes"] == 0


@on_fake_with_a_producer()
def test_a_producer_that_is_killed_on_the_way_breaks_the_promise():
    producer = Producer(full, before=lambda: fake.hold("fake:1"))
    promise, future = pending()
    producer.fulfil(promise)
    until(lambda: fake.sharing_calls()[0] == 1)  # it was given memory
    producer.child.kill()
    assert isinstance(error_of(lambda: value_of(future)), dtorch_ops.BrokenPromiseError)
    until(lambda: fake.sharing_calls() == calls(allocated=1, freed=1))


@on_fake_with_a_producer()
def test_a_producer_that_exits_at_once_has_sent_its_value():
    fake.share_memory()
    promise, future = pending()

    def producer(link):
        own = pickle.loads(link.recv())
        own.set_value(full(1))

    child = forked(producer, leave=lambda code: os._exit(code) if code else leave_python())
    child.say(pickle.dumps(promise))
    check(value_of(future), 1)
    child.end()


@on_fake_with_a_producer()
def test_a_producer_lets_go_of_what_a_consumer_gave_it_that_ended():
    fake.share_memory()

    def consumer(link):
        promise, future = pending()
        link.send(pickle.dumps(promise))
        check(value_of(future), 1)
        link.send("there")
        link.recv()

    child = forked(consumer)
    promise = pickle.loads(child.hear())
    promise.set_value(full(1))
    assert child.hear() == "there"
    assert fake.sharing_calls() == calls(opened=1)
    del promise
    child.kill()
    until(lambda: fake.sharing_calls() == calls(opened=1, closed=1))


@on_fake_with_a_producer()
def test_a_future_that_was_dropped_costs_nothing():
    producer = Producer(full, before=lambda: fake.hold("fake:1"))
    for _ in range(3):
        promise, future = pending()
        producer.fulfil(promise)
        del promise, future
    producer.ask(release)
    promise, future = pending()
    producer.fulfil(promise)
    check(value_of(future), 4)
    del promise, future
    until(lambda: dtorch_ops.stats()["outstanding"] == 0)
    until(lambda: fake.device_memory(1).live_bytes == 0)
    producer.end()
