"""Promises that are fulfilled with a value of an accelerator: in this process, and in another one.

On the fake accelerator, or CUDA; each test in a process of its own (on_accelerator.py). Where there
are two processes, they part before either has used it.
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading

import fake_accelerator as fake
import pytest
import torch
from on_accelerator import *  # noqa: F403

import dtorch_ops

pytestmark = pytest.mark.timeout(600)  # the first one may have to build the fake

hows = pytest.mark.parametrize("how", ["operator", "set_value", "script"])


# ---- In this process ----------------------------------------------------------------------------


@hows
@on_accelerator()
def test_a_promise_is_reserved_at_once_and_fulfilled_when_the_event_has_fired(how):
    tensor = torch.zeros(3, device=DEVICE)
    fulfil = fulfilling(how)
    promise = dtorch_ops.TensorPromise()
    future = promise.get_future()
    drain(DEVICE)
    with held(DEVICE):
        tensor.add_(1)
        fulfil(tensor, promise)
        assert_queue(DEVICE, "kernel", "event")
        assert not promise.is_pending()
        assert_pending(future, promise.get_future())
        for late in (
            lambda: promise.set_value(torch.ones(1)),
            lambda: promise.set_value(tensor),
            lambda: promise.set_exception(KeyError()),
            lambda: torch.ops.dtorch.get_tensor(torch.ones(1), promise),
            lambda: fulfil(tensor, promise),
        ):
            assert "fulfilled before" in str(error_of(late)), repr(error_of(late))
        assert isinstance(
            error_of(lambda: promise.set_value(tensor)), dtorch_ops.PromiseAlreadySatisfiedError
        )
        assert promise.cancel() is False
        assert_queue(DEVICE, "kernel", "event", ...)
        do_work(DEVICE)
        assert_pending(future)
        reach_event(DEVICE)
        assert value_of(future) is tensor
    assert promise.get_future().get().tolist() == [1, 1, 1]


@pytest.mark.parametrize("way", WAIT_WAYS)
@on_accelerator()
def test_no_way_of_waiting_has_the_value_before_the_event(way):
    tensor = torch.zeros(3, device=DEVICE)
    promise = dtorch_ops.TensorPromise()
    future = promise.get_future()
    drain(DEVICE)
    fired = threading.Event()

    def wait():
        value = WAIT_WAYS[way](future)
        assert fired.is_set()
        return value

    worker = blocked_in(wait)
    with held(DEVICE):
        promise.set_value(tensor.add_(1))
        do_work(DEVICE)
        assert worker.is_alive()
        fired.set()
        reach_event(DEVICE)
        value = worker.finish(LIMIT)
    assert value.tolist() == [1, 1, 1]


@hows
@on_accelerator()
def test_the_promise_may_be_dropped_right_after_the_call(how):
    fulfil = fulfilling(how)
    with held(DEVICE):
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        fulfil(torch.full((3,), 2.0, device=DEVICE), promise)
        del promise
        gc.collect()
        again = torch.full((3,), 9.0, device=DEVICE)
        assert_pending(future)
    assert value_of(future).tolist() == [2, 2, 2]
    assert again.tolist() == [9, 9, 9]


@hows
@on_accelerator()
def test_promise_and_future_may_be_dropped_and_nothing_is_left(how):
    fulfil = fulfilling(how)
    torch.empty(1, device=DEVICE)
    live = live_blocks()
    with held(DEVICE):
        for _ in range(50):
            promise = dtorch_ops.TensorPromise()
            future = promise.get_future()
            fulfil(torch.ones(1000, device=DEVICE), promise)
            del promise, future
    until(lambda: live_blocks() == live)


@hows
@on_fake(FAULTS)
def test_an_error_of_the_device_fails_the_future(how):
    tensor = torch.ones(3, device=DEVICE)
    fulfil = fulfilling(how)
    promise = dtorch_ops.TensorPromise()
    drain(DEVICE)
    with held(DEVICE):
        fake.fail_next("kernel", "the kernel went wrong")
        tensor.add_(1)
        fulfil(tensor, promise)
        future = promise.get_future()
        assert_pending(future)
    for _ in range(2):
        error = error_of(lambda: value_of(future))
        assert isinstance(error, RuntimeError), repr(error)
        assert "the kernel went wrong" in str(error)
    late = error_of(lambda: promise.set_value(torch.ones(1)))
    assert isinstance(late, dtorch_ops.PromiseAlreadySatisfiedError)


@on_fake(FAULTS)
def test_an_error_of_the_call_is_raised_by_the_call_and_nobody_hangs():
    tensor = torch.ones(3, device=DEVICE)
    promise = dtorch_ops.TensorPromise()
    fake.fail_call("event", "no event")
    error = error_of(lambda: promise.set_value(tensor))
    assert "no event" in str(error), repr(error)
    if promise.is_pending():
        promise.set_value(tensor)
        assert value_of(promise.get_future()) is tensor
    else:
        assert "no event" in str(error_of(lambda: value_of(promise.get_future())))


@on_accelerator()
def test_a_promise_of_before_the_accelerator_was_used_takes_its_values():
    promises = [dtorch_ops.TensorPromise() for _ in range(3)]
    futures = [promise.get_future() for promise in promises]
    workers = [blocked_in(future.get) for future in futures]
    tensor = torch.zeros(3, device=DEVICE)
    with held(DEVICE):
        tensor.add_(1)
        for promise in promises:
            promise.set_value(tensor)
        assert all(worker.is_alive() for worker in workers)
    for worker in workers:
        assert worker.finish(LIMIT) is tensor


@pytest.mark.parametrize("when", ["before", "after"])
@on_accelerator()
def test_consumers_on_other_streams_see_the_value_and_wait_for_nothing_else(when):
    """Whether the promise was made before the accelerator was used or after."""
    if when == "before":
        promise = dtorch_ops.TensorPromise()
    tensor, later = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    if when == "after":
        promise = dtorch_ops.TensorPromise()
    side = torch.Stream(DEVICE)
    drain(DEVICE)
    with held(DEVICE):
        promise.set_value(tensor.add_(1))
        hold(DEVICE)
        later.add_(1)
        do_work(DEVICE)
        reach_event(DEVICE)
        with side:
            got = promise.get_future().get().to("cpu", non_blocking=True)
        drain(side, LIMIT)
        assert got.tolist() == [1, 1, 1]
        assert_queue(DEVICE, "kernel")


@hows
@on_accelerator()
def test_the_caller_neither_synchronises_nor_polls(how):
    tensor = torch.ones(3, device=DEVICE)
    fulfil = fulfilling(how)
    drain(DEVICE)
    promises = [dtorch_ops.TensorPromise() for _ in range(50)]
    with nobody_synchronises():
        with held(DEVICE):
            for promise in promises:
                fulfil(tensor, promise)
        dtorch_ops.wait_all([promise.get_future() for promise in promises], LIMIT_MS)


@on_accelerator()
def test_the_current_stream_of_the_tensor_s_device_counts():
    tensor = torch.zeros(3, device=DEVICES[-1])
    drain(DEVICES[-1])
    side = torch.Stream(DEVICES[-1])
    promise = dtorch_ops.TensorPromise()
    with held(side):
        with side:
            promise.set_value(tensor.add_(1))
        assert_queue(side, "kernel", "event")
        assert_pending(promise.get_future())
    assert promise.get_future().get().device == torch.device(DEVICES[-1])


@on_accelerator()
def test_the_value_is_differentiable():
    weight = torch.ones(3, device=DEVICE, requires_grad=True)
    promise = dtorch_ops.TensorPromise()
    promise.set_value(weight * 3)
    value = value_of(promise.get_future())
    value.backward(torch.ones(3, device=DEVICE))
    assert weight.grad.tolist() == [3, 3, 3]


@on_accelerator(runs=2)
def test_a_promise_that_is_reserved_is_refused_in_a_forked_child():
    tensor = torch.ones(3, device=DEVICE)
    promise = dtorch_ops.TensorPromise("memory")
    with held(DEVICE):
        promise.set_value(tensor)
        future = promise.get_future()

        def child(link):
            for call in (lambda: future.wait(LIMIT_MS), lambda: promise.set_value(torch.ones(1))):
                assert isinstance(error_of(call), dtorch_ops.DTorchError)

        forked(child).end()
        assert_pending(future)
    assert value_of(future) is tensor


# ---- In another process -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "file"])
@pytest.mark.parametrize("by", ["pickle", "fork"])
@on_accelerator()
def test_the_consumer_gets_the_bytes_on_the_same_device_once_the_event_has_fired(by, mode):
    promise, future = pending(mode)

    def producer(link):
        own = pickle.loads(link.recv()) if by == "pickle" else promise
        tensor = torch.zeros(1000, device=DEVICES[-1])
        drain(DEVICES[-1])
        hold(DEVICES[-1])
        tensor.add_(1)
        own.set_value(tensor)
        assert not own.is_pending()
        late = error_of(lambda: own.set_value(tensor))
        assert isinstance(late, dtorch_ops.PromiseAlreadySatisfiedError)
        link.send("held")
        link.recv()
        release(DEVICES[-1])
        link.recv()

    child = forked(producer)
    if by == "pickle":
        child.say(pickle.dumps(promise))
    assert child.hear() == "held"
    assert_pending(future)
    assert not is_initialized()
    child.say()
    value = value_of(future)
    assert value.device == torch.device(DEVICES[-1])
    assert value.tolist() == [1] * 1000
    child.say()
    child.end()


@pytest.mark.parametrize("way", WAIT_WAYS)
@on_accelerator()
def test_every_way_of_waiting_has_the_bytes_of_the_other_process(way):
    promise, future = pending()

    def producer(link):
        promise.set_value(torch.full((1000,), 4.0, device=DEVICES[-1]))
        link.recv()

    child = forked(producer)
    value = WAIT_WAYS[way](future)
    assert value.device == torch.device(DEVICES[-1]) and value.tolist() == [4] * 1000
    child.say()
    child.end()


@on_accelerator()
def test_the_value_is_safe_once_it_is_there():
    """Killing the producer then loses nothing."""
    promise, future = pending()

    def producer(link):
        promise.set_value(torch.full((100_000,), 4.0, device=DEVICE))
        link.recv()

    child = forked(producer)
    until(future.is_ready)
    child.kill()
    assert future.get().unique().tolist() == [4]


@on_accelerator()
def test_a_producer_that_dies_before_the_event_breaks_the_promise():
    promise, future = pending()

    def producer(link):
        tensor = torch.ones(3, device=DEVICE)
        hold(DEVICE)
        promise.set_value(tensor)
        link.send("held")
        link.recv()

    child = forked(producer)
    child.hear()
    assert_pending(future)
    child.kill()
    error = error_of(lambda: value_of(future))
    assert isinstance(error, dtorch_ops.BrokenPromiseError), repr(error)


@pytest.mark.parametrize("leave", ["_exit", "exit"])
@on_accelerator()
def test_a_producer_that_ends_before_the_event_ends_and_breaks_the_promise(leave):
    promise, future = pending()

    def producer(link):
        tensor = torch.ones(3, device=DEVICE)
        hold(DEVICE)
        promise.set_value(tensor)

    child = forked(producer, os._exit if leave == "_exit" else sys.exit)
    child.end()
    error = error_of(lambda: value_of(future))
    assert isinstance(error, dtorch_ops.BrokenPromiseError), repr(error)


@pytest.mark.parametrize("leave", ["exit", "multiprocessing"])
@on_accelerator()
def test_a_producer_that_ends_at_once_has_sent_what_the_device_still_computes(leave):
    promise, future = pending()
    token = pickle.dumps(promise)

    def work():
        own = pickle.loads(token)
        tensor = torch.full((1000,), 6.0, device=DEVICES[-1])
        hold(DEVICES[-1])
        tensor.add_(1)
        own.set_value(tensor)
        threading.Timer(0.1, lambda: release(DEVICES[-1])).start()

    if leave == "exit":
        forked(lambda link: work(), sys.exit).end()
    else:
        import multiprocessing

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join(LIMIT)
        assert process.exitcode == 0
    value = value_of(future)
    assert value.device == torch.device(DEVICES[-1]) and value.tolist() == [7] * 1000


@on_accelerator()
def test_the_producer_may_drop_promise_and_tensor_right_after_the_call():
    promise, future = pending()
    token = pickle.dumps(promise)

    def producer(link):
        own = pickle.loads(token)
        hold(DEVICE)
        own.set_value(torch.full((1000,), 6.0, device=DEVICE))
        del own
        gc.collect()
        again = torch.full((1000,), 9.0, device=DEVICE)
        link.send("dropped")
        link.recv()
        release(DEVICE)
        link.recv()
        assert again.tolist() == [9] * 1000

    child = forked(producer)
    assert child.hear() == "dropped"
    assert_pending(future)
    child.say()
    assert value_of(future).tolist() == [6] * 1000
    child.say()
    child.end()


@on_accelerator()
def test_the_owner_may_be_gone_when_the_event_fires():
    """The producer neither hangs nor crashes by it."""
    ends = list(pending())

    def producer(link):
        hold(DEVICE)
        tensor = torch.ones(3, device=DEVICE)
        ends[0].set_value(tensor)
        link.send("held")
        link.recv()
        release(DEVICE)
        drain(DEVICE)
        until(lambda: not our_threads(), 2 * LIMIT)
        assert dtorch_ops.to_torch(tensor, device="cpu").tolist() == [1, 1, 1]

    child = forked(producer)
    child.hear()
    ends.clear()
    gc.collect()
    child.say()
    child.end()


@on_fake(FAULTS)
def test_an_error_of_the_producer_s_device_reaches_the_consumer():
    promise, future = pending()

    def producer(link):
        tensor = torch.ones(3, device=DEVICE)
        fake.fail_next("kernel", "the kernel went wrong")
        hold(DEVICE)
        tensor.add_(1)
        promise.set_value(tensor)
        release(DEVICE)
        link.recv()

    child = forked(producer)
    for _ in range(2):
        error = error_of(lambda: value_of(future))
        assert isinstance(error, RuntimeError) and "the kernel went wrong" in str(error), repr(
            error
        )
        assert not isinstance(error, dtorch_ops.BrokenPromiseError)
    child.say()
    child.end()
    assert torch.ones(2, device=DEVICE).tolist() == [1, 1]  # the consumer's own is all right


@on_accelerator()
def test_kinds_of_tensors_of_a_device():
    kinds = {
        "no dimension": lambda: torch.tensor(2.5),
        "empty": lambda: torch.empty(0, 4),
        "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
        "channels_last": lambda: (
            torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
        ),
        "strided": lambda: torch.arange(100.0)[::7],
        "expanded": lambda: torch.arange(3.0).expand(4, 3),
        "large": lambda: torch.arange(500_000.0),
        "bool": lambda: torch.tensor([True, False, True]),
        "bfloat16": lambda: torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "float16": lambda: torch.tensor([1.5, -2.0], dtype=torch.float16),
        "complex64": lambda: torch.tensor([1 + 2j, 3 - 4j]),
        "conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "int64": lambda: torch.arange(5),
        "grad": lambda: torch.ones(3, requires_grad=True),
    }
    promises = {name: pending() for name in kinds}

    def producer(link):
        for name, (promise, _) in promises.items():
            promise.set_value(kinds[name]().to(DEVICES[-1]))
        link.recv()

    child = forked(producer)
    for name, (_, future) in promises.items():
        value, expected = value_of(future), kinds[name]()
        assert value.device == torch.device(DEVICES[-1]), name
        assert value.dtype == expected.dtype and value.shape == expected.shape, name
        assert torch.equal(value.cpu().resolve_conj(), expected.detach().resolve_conj()), name
        assert not value.requires_grad, name
    child.say()
    child.end()


@on_accelerator()
def test_many_values_and_each_is_its_own():
    promises = [pending() for _ in range(100)]

    def producer(link):
        for index, (promise, _) in enumerate(promises):
            with torch.Stream(DEVICES[index % len(DEVICES)]) as stream:
                promise.set_value(torch.full((5000,), float(index), device=stream.device))
        link.recv()

    child = forked(producer)
    values = [value_of(future) for _, future in promises]
    for index, value in enumerate(values):
        assert value.device == torch.device(DEVICES[index % len(DEVICES)])
        assert value.cpu().unique().tolist() == [index]
    child.say()
    child.end()


@on_accelerator(devices=4)
def test_the_current_device_of_either_process_makes_no_difference():
    promise, future = pending()

    def producer(link):
        torch.accelerator.set_device_index(2)
        promise.set_value(torch.ones(3, device=DEVICES[1]))
        assert torch.accelerator.current_device_index() == 2
        link.recv()

    child = forked(producer)
    torch.accelerator.set_device_index(3)
    value = value_of(future)
    assert value.device == torch.device(DEVICES[1]) and value.tolist() == [1, 1, 1]
    assert torch.accelerator.current_device_index() == 3
    child.say()
    child.end()


@on_accelerator()
def test_the_consumer_s_copy_is_its_own_and_consumers_on_other_streams_see_it():
    promise, future = pending()

    def producer(link):
        tensor = torch.ones(3, device=DEVICE)
        promise.set_value(tensor)
        link.recv()
        tensor.fill_(5)
        drain(DEVICE)
        link.send("written")

    child = forked(producer)
    side = torch.Stream(DEVICE)
    with side:
        value = future.wait(LIMIT_MS)
        got = value.to("cpu", non_blocking=True)
    drain(side)
    assert got.tolist() == [1, 1, 1]
    child.say()
    child.hear()
    assert value.tolist() == [1, 1, 1]
    value.fill_(7)
    assert value.tolist() == [7, 7, 7]
    child.end()


@on_accelerator()
def test_a_controller_waits_for_the_devices_of_its_workers():
    """Each fulfils a VoidPromise with its own sync."""
    promises = [pending(cls=dtorch_ops.VoidPromise) for _ in range(2)]

    def worker(index):
        def run(link):
            torch.ones(3, device=DEVICE)
            hold(DEVICE)
            torch.ops.dtorch.sync(promises[index][0])
            assert not promises[index][0].is_pending()
            link.send("held")
            link.recv()
            release(DEVICE)
            link.recv()

        return run

    children = [forked(worker(index)) for index in range(2)]
    for child in children:
        child.hear()
    futures = [future for _, future in promises]
    group = dtorch_ops.collect_all(futures)
    children[0].say()
    value_of(futures[0])
    assert_pending(futures[1], group)
    children[1].say()
    value_of(group)
    assert not is_initialized()
    for child in children:
        child.say()
        child.end()


@on_accelerator()
def test_a_process_that_was_not_forked_is_a_producer_too():
    promise, future = pending("file")
    code = """
import sys
sys.path.insert(0, "tests")
import torch
from accelerators import *
install()
import dtorch_ops
promise = dtorch_ops.TensorPromise.from_token(sys.argv[1])
tensor = torch.zeros(1000, device=DEVICES[-1])
with held(DEVICES[-1]):
    promise.set_value(tensor.add_(3))
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code, promise.token()], stdin=subprocess.PIPE)
    value = future.wait(3 * LIMIT_MS)
    assert value.device == torch.device(DEVICES[-1]) and value.tolist() == [3] * 1000
    process.communicate(timeout=LIMIT)
    assert process.returncode == 0


# ---- Reserved promises --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["value", "sync"])
@on_accelerator()
def test_a_fork_does_not_give_away_what_is_reserved(kind):
    own = dtorch_ops.TensorPromise() if kind == "value" else dtorch_ops.VoidPromise()
    future = own.get_future()
    tensor = torch.ones(3, device=DEVICE)
    drain(DEVICE)
    hold(DEVICE)
    tensor.add_(1)
    if kind == "value":
        own.set_value(tensor)
    else:
        torch.ops.dtorch.sync(own)

    def child(link):
        value = (torch.ones(1),) if kind == "value" else ()
        error = error_of(lambda: own.set_value(*value))
        link.send(type(error) is dtorch_ops.PromiseAlreadySatisfiedError)

    taker = forked(child)
    assert taker.hear() is True
    taker.end()
    own = None
    assert_pending(future)
    release(DEVICE)
    value = value_of(future)
    assert value is None if kind == "sync" else value.tolist() == [2, 2, 2]


@on_accelerator()
def test_a_value_that_finds_no_memory_fails_its_future():
    promise, future = pending()
    token = pickle.dumps(promise)

    def producer(link):
        own, other = pickle.loads(token), pickle.loads(token)
        # All of this process's share of the memory, none of which is touched.
        lent, size = [], 8 << 30
        while size >= 1 << 20:
            try:
                lent.append(other.empty((size,), dtype=torch.uint8))
            except dtorch_ops.DTorchError:
                size //= 2
        value = torch.ones(1 << 20, device=DEVICE)
        own.set_value(value)
        del own, other, lent
        link.send("set")
        link.recv()

    child = forked(producer)
    assert child.hear() == "set"
    error = error_of(lambda: value_of(future))
    assert isinstance(error, (dtorch_ops.DTorchError, RuntimeError)), repr(error)
    assert not isinstance(error, TimeoutError)
    child.say()
    child.end()


@on_accelerator()
def test_a_consumer_on_another_stream_keeps_the_memory_of_a_value_from_a_promise():
    own = dtorch_ops.TensorPromise()
    future = own.get_future()
    producing, consuming = torch.Stream(DEVICE), torch.Stream(DEVICE)
    with producing:
        own.set_value(torch.ones(1000, device=DEVICE))
    del own
    with consuming:
        value = value_of(future)
        hold(consuming)
        out = value * 1
    del value, future
    with producing:
        again = torch.full((1000,), 9.0, device=DEVICE)
    drain(producing)
    release(consuming)
    drain(consuming)
    assert out.tolist() == [1] * 1000 and again[0].item() == 9
