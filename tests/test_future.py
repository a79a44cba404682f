"""Reading a future: get, wait, value, callbacks, chains, time limits; by one thread and by many."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import pickle
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import fresh
import numpy as np
import pytest
import torch
from futures import (
    LIMIT,
    READ_ONLY,
    WAITS,
    assert_memory_stays_flat,
    awaited,
    blocked_in,
    failed,
    pending,
    ready,
)
from helpers import Worker
from torch import Tensor

import dtorch_ops

FUTURE_CLASSES = [dtorch_ops.Future, dtorch_ops.TensorFuture, dtorch_ops.VoidFuture]


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What went to sys.unraisablehook: pairs of the exception and the object it names."""
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: seen.append((u.exc_value, u.object)))
    return seen


# ---- get, and what it consumes ------------------------------------------------------------------


def test_get_gives_the_value_and_consumes() -> None:
    value = torch.ones(2)
    promise, future = pending()
    assert future.valid()
    promise.set_value(value)
    assert future.valid()
    assert future.get() is value
    assert not future.valid()
    with pytest.raises(dtorch_ops.FutureAlreadyRetrievedError, match="wait"):
        future.get()
    assert not future.valid()


def test_get_of_an_error_consumes_as_well() -> None:
    future = failed(KeyError("k"))
    with pytest.raises(KeyError):
        future.get()
    assert not future.valid()
    with pytest.raises(dtorch_ops.FutureAlreadyRetrievedError):
        future.get()


def test_get_blocks_until_another_thread_sets_the_value() -> None:
    promise, future = pending()
    getter = blocked_in(future.get)
    assert future.valid()
    promise.set_value(torch.tensor(7.0))
    assert getter.finish() == torch.tensor(7.0)
    assert future.is_ready() and future.done() and not future.valid()


def test_get_of_a_void_future_is_none() -> None:
    promise = dtorch_ops.VoidPromise()
    future = promise.get_future()
    assert type(future) is dtorch_ops.VoidFuture
    promise.set_value()
    assert future.get() is None
    with pytest.raises(dtorch_ops.FutureAlreadyRetrievedError):
        future.get()
    assert future.wait() is None


def test_each_handle_of_a_promise_is_taken_once() -> None:
    promise, first = pending()
    second = promise.get_future()
    promise.set_value(torch.tensor(3.0))
    third = promise.get_future()
    assert first is not second
    for future in (first, second, third):
        assert future.valid()
        assert future.get() == torch.tensor(3.0)
        assert not future.valid()


def test_a_handle_made_of_a_handle_is_one_of_its_own() -> None:
    future = ready(2.0)
    other = dtorch_ops.TensorFuture(future)
    assert future.get() == other.get()
    assert dtorch_ops.Future(future).valid(), "made of a consumed one, it is not consumed"


@pytest.mark.parametrize("read", READ_ONLY.values(), ids=READ_ONLY.keys())
def test_reading_works_before_and_after_get_and_consumes_nothing(
    read: Callable[[Any], Any],
) -> None:
    future = ready(5.0)
    value = future.value()
    assert read(future) is value
    assert read(future) is value
    assert future.valid()
    assert future.get() is value
    assert read(future) is value
    assert not future.valid()


def test_of_eight_threads_that_get_one_handle_one_has_the_value() -> None:
    for _ in range(50):
        promise, future = pending()
        outcomes: list[str] = []

        def take(future: dtorch_ops.TensorFuture = future, seen: list[str] = outcomes) -> None:
            try:
                future.get()
                seen.append("value")
            except dtorch_ops.FutureAlreadyRetrievedError:
                seen.append("taken")

        threads = [Worker(take) for _ in range(8)]
        promise.set_value(torch.ones(1))
        for thread in threads:
            thread.finish()
        assert sorted(outcomes) == ["taken"] * 7 + ["value"]


def test_all_threads_that_wait_are_woken() -> None:
    promise, future = pending()
    waiters = [blocked_in(future.wait) for _ in range(20)]
    waiters += [blocked_in(promise.get_future().get) for _ in range(20)]
    value = torch.ones(1)
    promise.set_value(value)
    assert all(waiter.finish() is value for waiter in waiters)


# ---- Reading too early --------------------------------------------------------------------------


def test_value_of_a_pending_future_is_an_error_of_its_own() -> None:
    promise, future = pending()
    for _ in range(2):
        with pytest.raises(dtorch_ops.DTorchError, match="pending"):
            future.value()
    assert future.valid()
    promise.set_value(torch.ones(1))
    assert future.value() == torch.ones(1)


def test_is_ready_and_done_follow_the_state() -> None:
    promise, future = pending()
    assert not future.is_ready() and not future.done()
    promise.set_value(torch.ones(1))
    assert future.is_ready() is True and future.done() is True
    future.get()
    assert future.is_ready() and future.done()
    error = failed(ValueError())
    assert error.is_ready() and error.done()


def test_get_after_a_look_that_came_too_early() -> None:
    promise, future = pending()
    with pytest.raises(TimeoutError):
        future.wait(0)
    setter = Worker(lambda: promise.set_value(torch.tensor(4.0)))
    assert future.get() == torch.tensor(4.0)
    setter.finish()


# ---- Time limits --------------------------------------------------------------------------------

TIMED: dict[str, Callable[[Any, Any], Any]] = {
    "wait": lambda f, ms: f.wait(ms),
    "wait_keyword": lambda f, ms: f.wait(timeout_ms=ms),
    "wait_all": lambda f, ms: dtorch_ops.wait_all([f], ms),
    "wait_all_keyword": lambda f, ms: dtorch_ops.wait_all([f], timeout_ms=ms),
    "as_completed": lambda f, ms: list(dtorch_ops.as_completed([f], ms)),
    "as_completed_keyword": lambda f, ms: list(dtorch_ops.as_completed([f], timeout_ms=ms)),
}
timed = pytest.mark.parametrize("call", TIMED.values(), ids=TIMED.keys())
timed_with_operator = pytest.mark.parametrize(
    "call",
    [*TIMED.values(), lambda f, ms: torch.ops.dtorch.wait_for(f, ms)],
    ids=[*TIMED.keys(), "operator"],
)


@timed_with_operator
def test_a_time_limit_is_a_least_time_and_leaves_the_future_usable(
    call: Callable[[Any, Any], Any],
) -> None:
    promise, future = pending()
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="again") as info:
            call(future, 30)
        assert time.monotonic() - start >= 0.030
        assert type(info.value) is TimeoutError and not isinstance(info.value, RuntimeError)
        assert future.valid() and not future.is_ready()
    promise.set_value(torch.tensor(6.0))
    call(future, 30)
    assert future.get() == torch.tensor(6.0)


@timed_with_operator
def test_zero_only_looks(call: Callable[[Any, Any], Any]) -> None:
    promise, future = pending()
    start = time.monotonic()
    for _ in range(100):
        with pytest.raises(TimeoutError):
            call(future, 0)
    assert time.monotonic() - start < 10, "100 looks have blocked"
    promise.set_value(torch.ones(1))
    call(future, 0)


@timed
@pytest.mark.parametrize("ms", [0.25, 0.0, -0.0, np.int64(1), np.uint8(1), np.float64(0.5)])
def test_any_real_number_of_milliseconds_is_a_limit(
    call: Callable[[Any, Any], Any], ms: Any
) -> None:
    promise, future = pending()
    with pytest.raises(TimeoutError):
        call(future, ms)
    promise.set_value(torch.ones(1))
    call(future, ms)


@timed
@pytest.mark.parametrize(
    "ms", [-1, -0.5, -(2**63), -(2**200), float("-inf"), float("nan"), np.int64(-3)], ids=str
)
@pytest.mark.parametrize("complete", [False, True], ids=["pending", "complete"])
def test_a_negative_limit_is_a_value_error(
    call: Callable[[Any, Any], Any], ms: Any, complete: bool
) -> None:
    promise, future = pending()
    if complete:
        promise.set_value(torch.ones(1))
    with pytest.raises(ValueError, match="timeout_ms: expected a number of milliseconds"):
        call(future, ms)
    assert future.valid()


@timed
@pytest.mark.parametrize("ms", ["1", b"1", [1], True, 1j, object(), torch.device("cpu")], ids=repr)
@pytest.mark.parametrize("complete", [False, True], ids=["pending", "complete"])
def test_a_limit_that_is_no_number_is_a_type_error(
    call: Callable[[Any, Any], Any], ms: Any, complete: bool
) -> None:
    promise, future = pending()
    if complete:
        promise.set_value(torch.ones(1))
    with pytest.raises(TypeError, match=f"timeout_ms.*{type(ms).__name__}"):
        call(future, ms)


HUGE = [None, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 2**200]
HUGE += [9.2e12, 9.3e12, 9e18, 9.3e18, 1e19, 1e308, float("inf")]


@timed
@pytest.mark.parametrize("ms", HUGE, ids=str)
def test_a_huge_limit_is_no_overflow(call: Callable[[Any, Any], Any], ms: Any) -> None:
    promise, future = pending()
    waiter = blocked_in(lambda: call(future, ms))
    promise.set_value(torch.ones(1))
    waiter.finish()


@pytest.mark.parametrize("ms", [2**31, 2**53, 2**62, 2**63 - 1], ids=str)
def test_a_huge_limit_of_the_operator_is_no_overflow(ms: int) -> None:
    promise, future = pending()
    waiter = blocked_in(lambda: torch.ops.dtorch.wait_for(future, ms))
    promise.set_value(torch.ones(1))
    assert waiter.finish() == torch.ones(1)


def test_a_negative_limit_of_the_operator_is_a_value_error() -> None:
    for ms in (-1, -(2**63)):
        with pytest.raises(ValueError, match="timeout_ms"):
            torch.ops.dtorch.wait_for(ready(), ms)


def test_wrong_counts_of_arguments() -> None:
    promise, future = pending()
    for call in (
        lambda: future.wait(1, 2),
        lambda: future.wait(timeout=1),
        lambda: future.get(1),
        lambda: future.value(1),
        lambda: future.is_ready(1),
        lambda: future.then(),
        lambda: future.add_done_callback(),
    ):
        with pytest.raises(TypeError):
            call()
    assert future.valid()
    promise.set_value(torch.ones(1))
    assert future.get() == torch.ones(1)


@pytest.mark.parametrize(("name", "ms", "rounds"), [("wait", 0.001, 300), ("wait_all", 0, 3000)])
def test_timed_waits_on_one_future_leave_nothing(name: str, ms: float, rounds: int) -> None:
    _promise, future = pending()

    def step() -> None:
        with pytest.raises(TimeoutError):
            TIMED[name](future, ms)

    assert_memory_stays_flat(step, rounds)


# ---- What kind of thing it is -------------------------------------------------------------------


def test_the_classes_are_torch_futures() -> None:
    for cls in FUTURE_CLASSES:
        assert issubclass(cls, torch._C.Future)
    assert issubclass(dtorch_ops.TensorFuture, dtorch_ops.Future)
    assert issubclass(dtorch_ops.VoidFuture, dtorch_ops.Future)
    assert isinstance(ready(), torch._C.Future)
    assert type(ready()) is dtorch_ops.TensorFuture
    assert dtorch_ops.Future[int] is not None


def test_torch_functions_take_ours_mixed_with_stock_ones() -> None:
    promise, ours = pending()
    stock: torch.futures.Future[Tensor] = torch.futures.Future()
    both = torch.futures.collect_all([ours, stock])
    assert not both.done()
    promise.set_value(torch.tensor(1.0))
    stock.set_result(torch.tensor(2.0))
    assert [f.wait() for f in both.wait()] == [torch.tensor(1.0), torch.tensor(2.0)]
    assert torch.futures.wait_all([stock, ours]) == [torch.tensor(2.0), torch.tensor(1.0)]
    assert ours.valid()


@pytest.mark.parametrize("cls", FUTURE_CLASSES)
def test_a_handle_on_any_torch_future(cls: type[Any]) -> None:
    stock: torch.futures.Future[Any] = torch.futures.Future()
    future = cls(stock)
    assert type(future) is cls and not future.is_ready()
    waiter = blocked_in(lambda: future.wait(LIMIT * 1000))
    stock.set_result("any object")
    assert waiter.finish() == "any object"
    assert future.get() == "any object"
    assert cls(torch.ops.dtorch.sync(None)).get() is None
    assert cls(torch.ops.dtorch.get_tensor_async(torch.ones(1))).get() == torch.ones(1)


@pytest.mark.parametrize("cls", FUTURE_CLASSES)
@pytest.mark.parametrize("bad", [1, None, "f", torch.ones(1), torch.futures.Future], ids=repr)
def test_a_handle_on_something_else_is_a_type_error(cls: type[Any], bad: object) -> None:
    with pytest.raises(TypeError, match="expected a torch future, got"):
        cls(bad)


def test_no_handle_without_a_future() -> None:
    for cls in FUTURE_CLASSES:
        with pytest.raises(TypeError):
            cls()
    with pytest.raises(dtorch_ops.DTorchError, match="__init__"):
        ready().__init__(ready())
    for method in ("get", "wait", "value", "is_ready", "valid"):
        empty = dtorch_ops.TensorFuture.__new__(dtorch_ops.TensorFuture)
        with pytest.raises(dtorch_ops.DTorchError, match="__init__"):
            getattr(empty, method)()


def test_set_result_is_refused() -> None:
    promise, future = pending()
    void = dtorch_ops.VoidPromise()
    for each in (future, void.get_future(), dtorch_ops.Future(future), future.then(lambda f: 1)):
        with pytest.raises(dtorch_ops.DTorchError, match="promise"):
            each.set_result(torch.ones(1))
        assert not each.is_ready()
    promise.set_value(torch.tensor(2.0))
    assert future.get() == torch.tensor(2.0)


def test_repr_tells_the_state() -> None:
    class Mine(dtorch_ops.TensorFuture):
        pass

    promise, future = pending()
    assert repr(future) == "<TensorFuture pending>"
    assert repr(Mine(future)) == "<Mine pending>"
    promise.set_value(torch.ones(1))
    assert repr(future) == "<TensorFuture ready>"
    future.get()
    assert repr(future) == "<TensorFuture ready, consumed>"
    assert repr(failed(ValueError("v"))) == "<TensorFuture failed>"
    void = dtorch_ops.VoidPromise()
    assert repr(void.get_future()) == "<VoidFuture pending>"


def test_futures_are_compared_and_hashed_by_identity() -> None:
    future, other = ready(), ready()
    assert future == future and future != other
    assert len({future, other, future}) == 2
    assert [other, future].index(future) == 1


@pytest.mark.parametrize("carry", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_future_does_not_travel(carry: Callable[[Any], Any]) -> None:
    future = ready()
    with pytest.raises((RuntimeError, TypeError), match="pickle"):
        carry(future)
    assert future.get() == torch.tensor(1.0)


class Tagged(dtorch_ops.TensorFuture):
    def __init__(self, future: torch._C.Future[Any], tag: str) -> None:
        super().__init__(future)
        self.tag = tag

    def doubled(self) -> Tensor:
        return self.value() * 2


def test_subclasses_keep_their_attributes_and_work_everywhere() -> None:
    promise, inner = pending()
    future = Tagged(inner, "a tag")
    seen: list[Any] = []
    future.add_done_callback(seen.append)
    child = future.then(lambda f: f.doubled())
    group = dtorch_ops.collect_all([future])
    promise.set_value(torch.tensor(2.0))
    assert seen == [future] and seen[0].tag == "a tag"
    assert child.get() == torch.tensor(4.0)
    assert group.get() == [future]
    assert dtorch_ops.collect_any([future]).get() == torch.tensor(2.0)
    assert torch.futures.wait_all([future]) == [torch.tensor(2.0)]
    assert asyncio.run(awaited(future)) == torch.tensor(2.0)
    assert future.get() == torch.tensor(2.0) and not future.valid()


def test_a_subclass_that_forgets_its_base_is_told_so() -> None:
    class Forgetful(dtorch_ops.TensorFuture):
        def __init__(self) -> None:
            pass

    with pytest.raises(TypeError, match="__init__"):
        Forgetful()


_BOTH_BASES = """
class Both(dtorch_ops.TensorFuture, torch.futures.Future):
    def __init__(self):
        torch.futures.Future.__init__(self)
future = Both()
"""


@pytest.mark.parametrize(
    "make",
    [
        "torch._C.Future.__init__(future := promise.get_future(), [])",
        "torch._C.Future.__init__(future := dtorch_ops.Future(promise.get_future()), [])",
        "torch._C.Future.__init__(future := dtorch_ops.sync_future(), [])",
        "torch._C.Future.__init__(future := dtorch_ops.collect_all([promise.get_future()]), [])",
        "torch._C.Future.__init__(future := Future.__new__(dtorch_ops.Future), [])",
        _BOTH_BASES,
    ],
    ids=["pending", "handle", "ready", "group", "new", "both_bases"],
)
def test_a_future_that_torch_has_initialised_is_refused(make: str) -> None:
    """It holds another object then than our methods take it to hold."""
    fresh.check(
        "Future = torch._C.Future\npromise = dtorch_ops.TensorPromise()\n"
        + make
        + textwrap.dedent("""
        for call in (
            future.get, future.wait, future.value, future.is_ready, future.valid, future.__repr__,
            lambda: future.wait(0), lambda: future.then(print),
            lambda: future.add_done_callback(print), lambda: str([future]),
        ):
            for _ in range(2):
                try:
                    call()
                except dtorch_ops.DTorchError as error:
                    assert "got one that torch._C.Future.__init__ was called on" in str(error)
                    continue
                raise AssertionError(call)
        # What takes any torch future takes this one.
        assert not future.done()
        assert not torch.ops.dtorch.is_ready(future)
        another = dtorch_ops.TensorFuture(future)
        group = dtorch_ops.collect_any([future, another])
        assert not another.is_ready() and not group.is_ready()
        Future.set_result(future, torch.tensor(3.0))
        assert another.get() == group.get() == torch.tensor(3.0)
        promise.set_value(torch.ones(1))
        del future, another, group
        gc.collect()
        """)
    )


def test_the_value_goes_with_the_last_handle() -> None:
    promise, future = pending()
    value = torch.ones(3)
    alive = weakref.ref(value)
    promise.set_value(value)
    future.add_done_callback(lambda f: None)
    del value, promise
    assert alive() is not None
    del future
    assert alive() is None


def test_callbacks_go_with_the_future() -> None:
    class Resource:
        pass

    resource = Resource()
    alive = weakref.ref(resource)
    promise, future = pending()
    future.add_done_callback(lambda f, kept=resource: None)
    future.then(lambda f, kept=resource: None)
    del resource
    assert alive() is not None
    promise.set_value(torch.ones(1))
    gc.collect()
    assert alive() is None, "a callback that has run is kept"


def test_setting_what_nobody_waits_for_any_more() -> None:
    promise, future = pending()
    seen: list[float] = []
    future.add_done_callback(lambda f: seen.append(f.value().item()))
    del future
    gc.collect()
    promise.set_value(torch.tensor(9.0))
    assert seen == [9.0], "callbacks do not depend on the handle"


def test_promises_and_futures_leave_nothing() -> None:
    def step() -> None:
        promise, future = pending()
        future.then(lambda f: f.value())
        future.add_done_callback(lambda f: None)
        promise.set_value(torch.ones(1))
        future.get()
        pending()

    assert_memory_stays_flat(step, 2000)


# ---- Callbacks ----------------------------------------------------------------------------------


def test_callbacks_run_in_the_order_added_in_the_thread_that_completes() -> None:
    promise, future = pending()
    other_handle = promise.get_future()
    seen: list[Any] = []
    threads: set[int] = set()
    for i in range(100):
        source = future if i % 3 else other_handle
        if i % 2:
            source.add_done_callback(lambda f, i=i: seen.append(i))
        else:
            source.then(lambda f, i=i: (seen.append(i), threads.add(threading.get_ident())))
    assert seen == []
    setter = Worker(lambda: promise.set_value(torch.ones(1)))
    setter.finish()
    assert seen == list(range(100))
    assert threads == {setter.ident}


def test_callbacks_added_to_a_complete_future_run_at_once_here() -> None:
    future = ready(3.0)
    seen: list[Any] = []
    assert future.add_done_callback(lambda f: seen.append(threading.get_ident())) is None
    child = future.then(lambda f: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()] * 2
    assert child.is_ready()


def test_a_callback_gets_the_handle_it_was_added_to() -> None:
    promise, future = pending()
    seen: list[Any] = []
    future.add_done_callback(seen.append)
    future.then(seen.append)
    promise.set_value(torch.ones(1))
    assert seen[0] is future and seen[1] is future


def test_a_callback_sees_a_complete_future_in_every_way_of_reading() -> None:
    promise, future = pending()
    seen: list[Any] = []

    def callback(f: dtorch_ops.TensorFuture) -> None:
        assert f.is_ready() and f.done() and f.valid()
        seen.extend([f.wait(), f.wait(0), f.value(), dtorch_ops.wait_all([f])[0], f.get()])

    future.add_done_callback(callback)
    value = torch.ones(1)
    promise.set_value(value)
    assert len(seen) == 5 and all(each is value for each in seen)
    assert not future.valid(), "the callback has taken it"


def test_callbacks_added_by_a_callback_run() -> None:
    promise, future = pending()
    seen: list[str] = []

    def outer(f: Any) -> None:
        f.add_done_callback(lambda f: seen.append("inner"))
        seen.append("outer")

    future.add_done_callback(outer)
    future.add_done_callback(lambda f: seen.append("last"))
    promise.set_value(torch.ones(1))
    assert seen == ["inner", "outer", "last"]


@pytest.mark.parametrize(
    "error", [ValueError("v"), SystemExit(3), KeyboardInterrupt(), StopIteration(1)]
)
def test_a_callback_that_raises_harms_nobody(error: BaseException, unraisable: list[Any]) -> None:
    promise, future = pending()
    seen: list[str] = []

    def bad(f: Any) -> None:
        raise error

    future.add_done_callback(lambda f: seen.append("before"))
    future.add_done_callback(bad)
    future.add_done_callback(lambda f: seen.append("after"))
    waiter = blocked_in(future.wait)
    promise.set_value(torch.ones(1))
    assert seen == ["before", "after"]
    assert [(type(e), o) for e, o in unraisable] == [(type(error), bad)]
    assert waiter.finish() == torch.ones(1)
    future.add_done_callback(bad)  # at once, in this thread
    assert len(unraisable) == 2
    assert future.get() == torch.ones(1)


@pytest.mark.parametrize("bad", [None, 1, "call me", torch.ones(1)], ids=repr)
def test_a_callback_that_cannot_be_called_is_a_type_error(bad: Any) -> None:
    for future in (pending()[1], ready()):
        with pytest.raises(TypeError, match="callback: expected a callable"):
            future.add_done_callback(bad)
        with pytest.raises(TypeError, match="callback: expected a callable"):
            future.then(bad)


def test_callbacks_added_while_another_thread_completes_run_exactly_once() -> None:
    rounds = 2000
    promises = [dtorch_ops.VoidPromise() for _ in range(rounds)]
    counts = [0] * rounds
    lock = threading.Lock()

    def count(i: int) -> None:
        with lock:
            counts[i] += 1

    start = threading.Barrier(3)

    def add() -> None:
        start.wait()
        for i, promise in enumerate(promises):
            promise.get_future().add_done_callback(lambda f, i=i: count(i))

    def complete() -> None:
        start.wait()
        for promise in promises:
            promise.set_value()

    workers = [Worker(add), Worker(add), Worker(complete)]
    for worker in workers:
        worker.finish()
    assert counts == [2] * rounds


def test_a_callback_may_fulfil_other_promises_without_end() -> None:
    """A ring of promises, each set by the callback on the one before it."""
    promises = [dtorch_ops.TensorPromise() for _ in range(200)]
    for this, following in itertools.pairwise(promises):
        this.get_future().add_done_callback(lambda f, p=following: p.set_value(f.value() + 1))
    promises[0].set_value(torch.tensor(0.0))
    assert promises[-1].get_future().get() == torch.tensor(199.0)


def test_what_a_callback_sets_is_set_however_deep_the_callbacks_are_nested() -> None:
    """Once set_value has returned every way of reading has the value, torch's own included."""
    fresh.check("""
        promises = [dtorch_ops.VoidPromise() for _ in range(150)]
        def callback(f, i):
            promises[i].set_value()
            following = promises[i].get_future()
            assert following.is_ready() and following.done()
            following.value()
            torch.futures.wait_all([following])
        for i, p in enumerate(promises[:-1], 1):
            p.get_future().add_done_callback(lambda f, i=i: callback(f, i))
        promises[0].set_value()
        assert promises[-1].get_future().is_ready()
    """)


def test_callbacks_nest_deeper_than_pythons_own_limit() -> None:
    fresh.check("""
        promises = [dtorch_ops.VoidPromise() for _ in range(5000)]
        for i, p in enumerate(promises[:-1], 1):
            p.get_future().add_done_callback(lambda f, i=i: promises[i].set_value())
        promises[0].set_value()
        assert promises[-1].get_future().is_ready()
    """)


# ---- Callbacks that block -----------------------------------------------------------------------


def test_a_callback_may_wait_for_another_future() -> None:
    first, a = pending()
    second, b = pending()
    seen: list[Tensor] = []
    a.add_done_callback(lambda f: seen.append(b.get()))
    setter = blocked_in(lambda: first.set_value(torch.ones(1)))
    assert a.is_ready() and not seen
    second.set_value(torch.tensor(2.0))
    setter.finish()
    assert seen == [torch.tensor(2.0)]


def test_callbacks_that_wait_for_each_other_nest_many_levels_deep() -> None:
    """The callback of each future waits for the next, which another thread completes."""
    fresh.check("""
        levels = 300
        promises = [dtorch_ops.TensorPromise() for _ in range(levels)]
        futures = [p.get_future() for p in promises]
        left = []
        def wait_for_next(f, i):
            left.append((i, futures[i + 1].get().item()))
        for i in range(levels - 1):
            futures[i].add_done_callback(lambda f, i=i: wait_for_next(f, i))
        threads = [
            threading.Thread(target=p.set_value, args=(torch.tensor(float(i)),))
            for i, p in enumerate(promises[:-1])
        ]
        for t in threads:
            t.start()
        for f in futures[:-1]:
            f.wait(20000)
        assert not futures[-1].is_ready()
        promises[-1].set_value(torch.tensor(float(levels - 1)))
        for t in threads:
            t.join(20)
            assert not t.is_alive()
        assert sorted(left) == [(i, i + 1.0) for i in range(levels - 1)]
    """)


def test_blocking_callbacks_nest_in_one_thread() -> None:
    """A callback that completes a future whose callback blocks, and so on, on one stack."""
    fresh.check("""
        depth = 100
        gates = [dtorch_ops.VoidPromise() for _ in range(depth)]
        waits = [g.get_future() for g in gates]
        promises = [dtorch_ops.VoidPromise() for _ in range(depth)]
        def callback(f, i):
            if i + 1 < depth:
                promises[i + 1].set_value()
            waits[i].get()
        for i, p in enumerate(promises):
            p.get_future().add_done_callback(lambda f, i=i: callback(f, i))
        setter = threading.Thread(target=promises[0].set_value)
        setter.start()
        promises[-1].get_future().wait(20000)
        for gate in gates:  # the outermost first, which stands deepest on the stack
            gate.set_value()
        setter.join(20)
        assert not setter.is_alive()
    """)


def _then(promise: dtorch_ops.TensorPromise) -> Any:
    return promise.get_future().then(lambda f: f.value())


COMPLETED_BY_PROMISE: dict[str, Callable[[dtorch_ops.TensorPromise], Any]] = {
    "promise": lambda p: p.get_future(),
    "then": _then,
    "then_then": lambda p: _then(p).then(lambda f: f.value()),
    "collect_all": lambda p: dtorch_ops.collect_all([p.get_future()]),
    "collect_any": lambda p: dtorch_ops.collect_any([p.get_future()]),
}


@pytest.mark.parametrize(
    ("made_by", "wait_by"),
    [("promise", wait) for wait in WAITS if wait != "then"]  # itself a callback, in order
    + [(made, wait) for made in list(COMPLETED_BY_PROMISE)[1:] for wait in ("get", "wait_all")],
)
def test_waiters_are_released_although_an_earlier_callback_blocks(
    made_by: str, wait_by: str
) -> None:
    """Else they deadlock: whoever lets the callback go on may be one of them."""
    wait = WAITS[wait_by]
    promise = dtorch_ops.TensorPromise()
    future = COMPLETED_BY_PROMISE[made_by](promise)
    gate = dtorch_ops.VoidPromise()
    opened = gate.get_future()
    entered = threading.Event()

    def block(_: Any) -> None:
        entered.set()
        opened.wait(60_000)

    future.add_done_callback(block)
    waiter = blocked_in(lambda: wait(future))
    setter = Worker(lambda: promise.set_value(torch.ones(1)))
    try:
        assert entered.wait(LIMIT)
        waiter.join(2)
        assert not waiter.is_alive(), "still waits for a future that is complete"
        waiter.finish()
    finally:
        gate.set_value()
        setter.finish()


# ---- Chains -------------------------------------------------------------------------------------


def test_then_gives_a_future_of_what_the_callback_returns() -> None:
    promise, future = pending()
    child = future.then(lambda f: f.value().item() + 1)
    assert isinstance(child, dtorch_ops.Future) and not child.is_ready()
    assert child.valid()
    promise.set_value(torch.tensor(1.0))
    assert child.get() == 2.0
    assert future.valid(), "reading in the callback consumes nothing"
    with pytest.raises(dtorch_ops.FutureAlreadyRetrievedError):
        child.get()


@pytest.mark.parametrize(
    "value", [None, 1, "text", (1, 2), [torch.ones(1)], {"a": 1}, int, ValueError, print], ids=repr
)
def test_the_callback_of_then_may_return_anything(value: Any) -> None:
    child = ready().then(lambda f: value)
    assert child.wait() is value
    assert child.get() is value


def test_an_exception_returned_by_the_callback_counts_as_raised() -> None:
    """As torch's own futures keep their errors; and so in every way of reading it."""
    child = ready().then(lambda f: ValueError("returned"))
    assert repr(child) == "<Future failed>"
    for read in (child.wait, child.value, lambda: dtorch_ops.wait_all([child]), child.get):
        with pytest.raises(ValueError, match="returned"):
            read()


def test_a_future_returned_by_the_callback_is_a_value() -> None:
    _promise, inner = pending()
    child = ready().then(lambda f: inner)
    assert child.is_ready()
    assert not dtorch_ops.Future(child.get()).is_ready()


def test_what_the_callback_raises_is_the_error_of_the_child_alone() -> None:
    def bad(f: Any) -> None:
        raise LookupError("lost", 2)

    promise, future = pending()
    child = future.then(bad)
    sibling = future.then(lambda f: "fine")
    promise.set_value(torch.ones(1))
    for _ in range(2):
        with pytest.raises(LookupError) as info:
            child.wait()
        assert type(info.value) is LookupError and info.value.args == ("lost", 2)
    assert sibling.get() == "fine"
    assert future.get() == torch.ones(1)


def test_a_chain_runs_in_order_and_stops_at_an_error() -> None:
    promise, future = pending()
    seen: list[str] = []

    def step(f: Any) -> Any:
        value = f.value()
        seen.append("ran")
        return value + 1

    last = future.then(step).then(step).then(step)
    promise.set_exception(KeyError("first"))
    with pytest.raises(KeyError, match="first"):
        last.get()
    assert seen == []
    recovered = last.then(lambda f: "recovered")
    assert recovered.get() == "recovered"


def test_dropped_children_still_run() -> None:
    promise, future = pending()
    seen: list[int] = []
    future.then(lambda f: seen.append(1)).then(lambda f: seen.append(2))
    del future
    gc.collect()
    promise.set_value(torch.ones(1))
    assert seen == [1, 2]


_CHAIN = """
for _ in range(20_000):
    future = future.then(lambda f: None)
"""


@pytest.mark.parametrize("end", ["promise.set_value(torch.ones(1))", "del promise"])
def test_a_long_chain_does_not_exhaust_the_stack(end: str) -> None:
    """One ``then`` a step is how a training loop would keep a running mean."""
    fresh.check(f"""
promise = dtorch_ops.TensorPromise()
future = promise.get_future()
{_CHAIN}
{end}
assert future.is_ready()
    """)


def test_a_long_chain_that_nobody_completes_is_dropped() -> None:
    """Each link holds the next: their destructors must not nest."""
    fresh.check(f"""
stock = torch.futures.Future()
future = dtorch_ops.Future(stock)
{_CHAIN}
del stock, future
    """)


# ---- Many at once -------------------------------------------------------------------------------


def test_ten_thousand_pending_futures_cost_no_thread_and_no_core() -> None:
    fresh.check("""
        promises = [dtorch_ops.TensorPromise() for _ in range(10_000)]
        futures = [p.get_future() for p in promises]
        seen = []
        for f in futures:
            f.add_done_callback(lambda f: seen.append(1))
        group = dtorch_ops.collect_all(futures)
        waiter = threading.Thread(target=group.wait)
        waiter.start()
        async def one(f):
            return await f
        async def main():
            tasks = [asyncio.ensure_future(one(f)) for f in futures]
            await asyncio.sleep(0)
            assert len(os.listdir("/proc/self/task")) == 2
            before = time.process_time()
            await asyncio.sleep(1)
            used = time.process_time() - before
            assert used < 0.02, f"{used} s of processor time in an idle second"
            setter = threading.Thread(
                target=lambda: [p.set_value(torch.tensor(i)) for i, p in enumerate(promises)]
            )
            setter.start()
            assert [v.item() for v in await asyncio.gather(*tasks)] == list(range(10_000))
            setter.join()
        asyncio.run(main())
        waiter.join()
        assert len(seen) == 10_000
    """)


def test_an_idle_thread_in_get_burns_no_core() -> None:
    fresh.check("""
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        threads = [threading.Thread(target=f) for f in (
            future.wait, lambda: dtorch_ops.wait_all([future]), promise.get_future().get,
            lambda: next(dtorch_ops.as_completed([future])),
        )]
        for t in threads:
            t.start()
        before = time.process_time()
        try:
            future.wait(1000)
            raise AssertionError
        except TimeoutError:
            pass
        used = time.process_time() - before
        assert used < 0.02, f"{used} s of processor time in an idle second"
        promise.set_value(torch.ones(1))
        for t in threads:
            t.join(10)
            assert not t.is_alive()
    """)


def test_a_set_wakes_a_thread_as_soon_as_an_event_would() -> None:
    """The median delay from set to wake, beside that of threading.Event in the same run."""

    def median_delay(make: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]) -> float:
        delays = []
        for _ in range(60):
            notify, wait = make()
            woken: list[float] = []
            waiter = blocked_in(
                lambda wait=wait, woken=woken: (wait(), woken.append(time.perf_counter()))
            )
            start = time.perf_counter()
            notify()
            waiter.finish()
            delays.append(woken[0] - start)
        return sorted(delays)[len(delays) // 2]

    def by_future() -> tuple[Callable[[], Any], Callable[[], Any]]:
        promise, future = pending()
        value = torch.ones(1)
        return lambda: promise.set_value(value), future.get

    def by_event() -> tuple[Callable[[], Any], Callable[[], Any]]:
        event = threading.Event()
        return event.set, event.wait

    ours, baseline = median_delay(by_future), median_delay(by_event)
    assert ours < 2 * baseline + 0.001, (
        f"{ours * 1e6:.0f} us, an event takes {baseline * 1e6:.0f} us"
    )


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before]
    for thread in left:
        thread.join(LIMIT)
    assert not [t for t in left if t.is_alive()]
