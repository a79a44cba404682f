"""A promise that says on which device its value is to be.

On the fake accelerator, or CUDA; each test in a process of its own (on_accelerator.py).
"""

from __future__ import annotations

import pickle

import fake_accelerator as fake
import pytest
import torch
from on_accelerator import *  # noqa: F403

import dtorch_ops

pytestmark = pytest.mark.timeout(600)  # the first one may have to build the fake

FROM_AND_TO = [
    ("cpu", "here"),
    ("here", "cpu"),
    ("here", "there"),
    ("here", "here"),
    ("cpu", "cpu"),
]
ways = pytest.mark.parametrize("source, wanted", FROM_AND_TO)
sizes = pytest.mark.parametrize("size", [3, 100_000])


@ways
@sizes
@on_accelerator()
def test_in_one_process(source, wanted, size):
    promise = dtorch_ops.TensorPromise(device=wanted)
    future = promise.get_future()
    value = torch.full((size,), 4.0, device=source)
    promise.set_value(value)
    assert isinstance(
        error_of(lambda: promise.set_value(value)), dtorch_ops.PromiseAlreadySatisfiedError
    )
    got = value_of(future)
    assert got.device == torch.device(wanted) and got.unique().tolist() == [4]
    assert (got is value) == (source == wanted)


@ways
@sizes
@on_accelerator()
def test_from_another_process(source, wanted, size):
    promise = dtorch_ops.TensorPromise(device=wanted)
    future = promise.get_future()

    def producer(link):
        own = pickle.loads(link.recv())
        own.set_value(torch.full((size,), 4.0, device=source))
        link.recv()

    child = forked(producer)
    child.say(pickle.dumps(promise))
    got = value_of(future)
    assert got.device == torch.device(wanted) and got.unique().tolist() == [4]
    child.say()
    child.end()


@pytest.mark.parametrize("look", ["wait", "is_ready"])
@on_accelerator()
def test_a_thread_that_records_a_graph_may_wait_for_it(look):
    promise = dtorch_ops.TensorPromise(device=DEVICE)
    future = promise.get_future()

    def producer(link):
        own = pickle.loads(link.recv())
        own.set_value(torch.full((1000,), 4.0))
        link.send("set")
        link.recv()

    child = forked(producer)
    child.say(pickle.dumps(promise))
    torch.ones(1, device=DEVICE)
    drain(DEVICE)
    with capturing("thread_local"):
        if look == "wait":
            future.wait(LIMIT_MS)
        assert child.hear() == "set"
        until(future.is_ready)
    assert value_of(future).tolist() == [4] * 1000
    child.say()
    child.end()


@on_fake("it has such memory")
def test_any_device_of_a_type_may_be_wanted():
    fake.share_memory()
    promise = dtorch_ops.TensorPromise(device="fake")
    future = promise.get_future()

    def producer(link):
        pickle.loads(link.recv()).set_value(torch.full((100_000,), 4.0, device="fake:0"))
        link.recv()

    child = forked(producer)
    child.say(pickle.dumps(promise))
    got = value_of(future)
    assert got.device == torch.device("fake:0") and got.unique().tolist() == [4]
    assert fake.sharing_calls()[0] == 1
    child.say()
    child.end()


@on_fake(FAULTS)
def test_what_goes_wrong_is_told_with_its_reason():
    promise = dtorch_ops.TensorPromise(device="fake:1")
    future = promise.get_future()
    child = forked(lambda link: pickle.loads(link.recv()).set_value(torch.ones(1000)))
    fake.fail_call("alloc", "no memory here")
    child.say(pickle.dumps(promise))
    assert "no memory here" in str(error_of(lambda: value_of(future)))
    child.end()

    promise = dtorch_ops.TensorPromise(device="fake:1")
    sparse = torch.ones(3).to_sparse()
    assert isinstance(error_of(lambda: promise.set_value(sparse)), NotImplementedError)
    assert promise.is_pending()


@ways
@sizes
@on_fake("it has such memory")
def test_where_memory_of_devices_is_shared(source, wanted, size):
    fake.share_memory()
    promise = dtorch_ops.TensorPromise(device=wanted)
    future = promise.get_future()

    def producer(link):
        own = pickle.loads(link.recv())
        own.set_value(torch.full((size,), 4.0, device=source))
        link.recv()

    child = forked(producer)
    child.say(pickle.dumps(promise))
    got = value_of(future)
    assert got.device == torch.device(wanted) and got.unique().tolist() == [4]
    assert fake.sharing_calls()[0] == int(source == wanted != "cpu" and size > 3)
    child.say()
    child.end()


@pytest.mark.parametrize("way", WAIT_WAYS)
@on_accelerator()
def test_no_way_of_waiting_has_the_value_before_the_copy(way):
    promise = dtorch_ops.TensorPromise(device="cpu")
    future = promise.get_future()
    tensor = torch.zeros(1000, device=DEVICE)
    drain(DEVICE)
    with held(DEVICE):
        promise.set_value(tensor.add_(1))
        tensor.add_(1)
        assert_pending(future)
    assert WAIT_WAYS[way](future).tolist() == [1] * 1000


@on_fake(COUNTS)
def test_making_one_asks_no_driver():
    fake.reset_counters()
    promise = dtorch_ops.TensorPromise(device="fake:3")
    pickle.dumps(promise)
    assert not fake.is_initialized() and fake.counters().device_counts == 0


@on_fake("so many devices it has, and no more")
def test_a_device_that_there_is_not_is_told_to_who_sets_and_to_who_waits():
    promise = dtorch_ops.TensorPromise(device="fake:9")
    error = error_of(lambda: promise.set_value(torch.ones(3)))
    assert isinstance(error, ValueError) and "fake:9" in str(error)
    assert promise.is_pending()

    promise = dtorch_ops.TensorPromise(device="fake:9")
    future = promise.get_future()
    child = forked(lambda link: pickle.loads(link.recv()).set_value(torch.ones(3)))
    child.say(pickle.dumps(promise))
    assert "fake:9" in str(error_of(lambda: value_of(future)))
    child.end()


@on_accelerator()
def test_the_copy_is_differentiable():
    source = torch.ones(3, requires_grad=True)
    promise = dtorch_ops.TensorPromise(device=DEVICES[-1])
    promise.set_value(source * 2)
    value_of(promise.get_future()).sum().cpu().backward()
    assert source.grad.tolist() == [2, 2, 2]


def test_what_names_no_device() -> None:
    for wrong in ("nowhere", 1.5, object()):
        with pytest.raises((ValueError, TypeError), match="device"):
            dtorch_ops.TensorPromise(device=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="meta"):
        dtorch_ops.TensorPromise(device="meta")
    with pytest.raises(TypeError):
        dtorch_ops.TensorPromise("auto", "cpu")  # type: ignore[misc]
    with pytest.raises(TypeError):
        dtorch_ops.VoidPromise(device="cpu")  # type: ignore[call-arg]
    promise = dtorch_ops.TensorPromise(device="cpu")
    promise.set_value(torch.ones(2))
    assert promise.get_future().get().tolist() == [1, 1]
    with pytest.raises(ValueError, match="meta"):
        dtorch_ops.TensorPromise(device="cpu").set_value(torch.ones(2, device="meta"))
