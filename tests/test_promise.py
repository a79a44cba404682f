"""The producing end: set once, cancelled, dropped, passed to operators, fulfilled by threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import gc
import io
import itertools
import multiprocessing.reduction
import pickle
import queue
import random
import sys
import threading
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
    pending,
)
from helpers import Worker

import dtorch_ops

ops = torch.ops.dtorch
CancelledError = concurrent.futures.CancelledError

PROMISE_CLASSES = [dtorch_ops.TensorPromise, dtorch_ops.VoidPromise]
both = pytest.mark.parametrize("cls", PROMISE_CLASSES)


def set_something(promise: Any) -> None:
    if isinstance(promise, dtorch_ops.VoidPromise):
        promise.set_value()
    else:
        promise.set_value(torch.ones(1))


# What fulfils a promise, and what its future then does.
ENDS: dict[str, tuple[Callable[[Any], Any], type[BaseException] | None]] = {
    "set_value": (set_something, None),
    "set_exception": (lambda p: p.set_exception(KeyError("k")), KeyError),
    "cancel": (lambda p: p.cancel(), CancelledError),
}


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns every few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


# ---- Set once -----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("first", ENDS)
@pytest.mark.parametrize("second", ["set_value", "set_exception"])
def test_a_promise_is_fulfilled_once(cls: Any, first: str, second: str) -> None:
    promise = cls()
    future = promise.get_future()
    end, error = ENDS[first]
    end(promise)
    for _ in range(2):
        with pytest.raises(
            dtorch_ops.PromiseAlreadySatisfiedError,
            match="cancelled" if first == "cancel" else "fulfilled",
        ):
            ENDS[second][0](promise)
    if error is None:
        future.get()
    else:
        with pytest.raises(error):
            future.get()


@both
@pytest.mark.parametrize("end", ENDS)
def test_a_promise_goes_on_after_it_was_fulfilled(cls: Any, end: str) -> None:
    promise = cls()
    assert promise.is_pending() is True
    assert repr(promise) == str(promise) == f"<{cls.__name__} pending>"
    ENDS[end][0](promise)
    assert promise.is_pending() is False
    assert repr(promise) == f"<{cls.__name__} satisfied>"
    assert promise.get_future().is_ready()
    assert promise.cancel() is False


def test_the_value_is_the_very_tensor_differentiable() -> None:
    leaf = torch.ones(2, requires_grad=True)
    value = leaf * 3
    promise, future = pending()
    promise.set_value(value)
    result = future.get()
    assert result is value
    result.sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    "value",
    [torch.nn.Parameter(torch.ones(1)), torch.empty(0), torch.empty(2, device="meta")],
    ids=["parameter", "empty", "meta"],
)
def test_any_tensor_is_a_value(value: torch.Tensor) -> None:
    promise, future = pending()
    promise.set_value(value)
    assert future.get() is value


@pytest.mark.parametrize(
    "bad", [None, 1, 1.0, "t", [torch.ones(1)], np.ones(1), torch.Tensor, ValueError()], ids=repr
)
def test_a_value_that_is_no_tensor_leaves_the_promise_pending(bad: Any) -> None:
    promise, future = pending()
    with pytest.raises(TypeError, match=r"value: expected a torch\.Tensor, got"):
        promise.set_value(bad)
    assert promise.is_pending() and not future.is_ready()
    promise.set_value(torch.ones(1))
    assert future.get() == torch.ones(1)


@both
@pytest.mark.parametrize("bad", [None, 1, "error", ValueError, torch.ones(1)], ids=repr)
def test_an_error_that_is_no_exception_leaves_the_promise_pending(cls: Any, bad: Any) -> None:
    promise = cls()
    future = promise.get_future()
    with pytest.raises(TypeError, match="exception: expected an instance of an exception, got"):
        promise.set_exception(bad)
    assert promise.is_pending() and not future.is_ready()
    set_something(promise)
    future.get()


def test_wrong_counts_of_arguments_leave_the_promise_pending() -> None:
    tensor, void = dtorch_ops.TensorPromise(), dtorch_ops.VoidPromise()
    for call in (
        lambda: tensor.set_value(),
        lambda: tensor.set_value(torch.ones(1), torch.ones(1)),
        lambda: void.set_value(torch.ones(1)),
        lambda: void.set_value(None),
        lambda: tensor.set_exception(),
        lambda: tensor.get_future(1),
        lambda: tensor.cancel(1),
    ):
        with pytest.raises(TypeError):
            call()
    assert tensor.is_pending() and void.is_pending()


def test_eight_threads_race_and_one_wins(switching: None) -> None:
    """Values, errors and cancelling: one winner, and every loser is told."""
    rounds, racers, batch = 2000, 8, 20
    promises = [dtorch_ops.TensorPromise() for _ in range(rounds)]
    futures = [p.get_future() for p in promises]
    callbacks = [0] * rounds
    for i, future in enumerate(futures):
        future.add_done_callback(lambda f, i=i: callbacks.__setitem__(i, callbacks[i] + 1))
    start = threading.Barrier(racers)

    def race(number: int) -> list[int]:
        won = []
        for i, promise in enumerate(promises):
            if i % batch == 0:
                start.wait(LIMIT)
            try:
                if number == 0:
                    if promise.cancel():
                        won.append(i)
                    continue
                if number % 2:
                    promise.set_value(torch.tensor(number))
                else:
                    promise.set_exception(ValueError(number))
                won.append(i)
            except dtorch_ops.PromiseAlreadySatisfiedError:
                continue
        return won

    workers = [Worker(lambda n=n: race(n)) for n in range(racers)]
    wins: list[Any] = [worker.finish() for worker in workers]
    assert sorted(itertools.chain(*wins)) == list(range(rounds))
    assert callbacks == [1] * rounds
    for number, won in enumerate(wins):
        for i in won:
            try:
                outcome = futures[i].get().item()
            except ValueError as error:
                outcome = error.args[0]
            except CancelledError:
                outcome = 0
            assert outcome == number


def test_a_promise_may_be_used_within_its_own_callback() -> None:
    promise, future = pending()
    seen: list[object] = []

    def callback(f: Any) -> None:
        seen.append(promise.is_pending())
        seen.append(promise.cancel())
        try:
            promise.set_value(torch.zeros(1))
        except dtorch_ops.PromiseAlreadySatisfiedError as error:
            seen.append(type(error))
        seen.append(promise.get_future().value().item())

    future.add_done_callback(callback)
    promise.set_value(torch.ones(1))
    assert seen == [False, False, dtorch_ops.PromiseAlreadySatisfiedError, 1.0]


# ---- cancel -------------------------------------------------------------------------------------


@both
def test_cancel_fails_the_future(cls: Any) -> None:
    promise = cls()
    future = promise.get_future()
    waiter = blocked_in(future.wait)
    assert promise.cancel() is True
    with pytest.raises(CancelledError, match="cancelled"):
        waiter.finish()
    for _ in range(2):
        with pytest.raises(CancelledError):
            future.wait()
    with pytest.raises(CancelledError):
        future.get()
    assert promise.cancel() is False


@pytest.mark.parametrize("read", READ_ONLY.values(), ids=READ_ONLY.keys())
def test_every_way_of_reading_sees_the_cancelling(read: Callable[[Any], Any]) -> None:
    promise, future = pending()
    promise.cancel()
    for _ in range(2):
        with pytest.raises(CancelledError):
            read(future)


# ---- Dropped unset ------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_dropping_the_last_reference_breaks_the_promise(
    cls: Any, wait: Callable[[Any], Any]
) -> None:
    promise = cls()
    future = promise.get_future()
    waiter = blocked_in(lambda: wait(future))
    del promise
    with pytest.raises(dtorch_ops.BrokenPromiseError, match="dropped"):
        waiter.finish()
    with pytest.raises(dtorch_ops.BrokenPromiseError):
        wait(dtorch_ops.Future(future))


def test_a_broken_promise_runs_the_callbacks() -> None:
    promise, future = pending()
    seen: list[str] = []
    future.add_done_callback(lambda f: seen.append(repr(f)))
    child = future.then(lambda f: f.value())
    assert future.valid()
    del promise
    assert seen == ["<TensorFuture failed>"]
    with pytest.raises(dtorch_ops.BrokenPromiseError):
        child.get()
    assert future.valid(), "nobody has taken the error yet"


def test_a_thread_that_returns_or_raises_without_setting_breaks_the_promise() -> None:
    def returns(promise: dtorch_ops.TensorPromise) -> None:
        return

    def raises(promise: dtorch_ops.TensorPromise) -> None:
        raise OSError("the producer fails")

    for produce in (returns, raises):
        futures = []
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            jobs = []
            for _ in range(20):
                promise, future = pending()
                jobs.append(pool.submit(produce, promise))
                futures.append(future)
            del promise
            concurrent.futures.wait(jobs, LIMIT)
        jobs.clear()  # an error's traceback holds the frame that holds the promise
        gc.collect()
        for future in futures:
            with pytest.raises(dtorch_ops.BrokenPromiseError):
                future.get()


def test_a_promise_dropped_by_a_thread_wakes_the_thread_that_waits() -> None:
    for _ in range(50):
        box = [dtorch_ops.TensorPromise()]
        future = box[0].get_future()
        dropper = Worker(box.clear)
        with pytest.raises(dtorch_ops.BrokenPromiseError):
            future.wait(LIMIT * 1000)
        dropper.finish()


def test_a_promise_collected_in_a_cycle_is_broken() -> None:
    class Node:
        pass

    node = Node()
    node.self = node
    node.promise = dtorch_ops.TensorPromise()
    future = node.promise.get_future()
    seen: list[str] = []
    future.add_done_callback(lambda f: seen.append("called"))
    gc.disable()
    try:
        del node
        assert not future.is_ready()
    finally:
        gc.enable()
    gc.collect()
    assert seen == ["called"]
    with pytest.raises(dtorch_ops.BrokenPromiseError):
        future.get()


def test_a_promise_collected_by_another_thread_is_broken_there() -> None:
    """The collector runs in whatever thread allocates; the callbacks run in it."""

    class Node:
        pass

    threads: list[int] = []
    gc.disable()
    try:
        for _ in range(10):
            node = Node()
            node.all = [node, dtorch_ops.VoidPromise()]
            future = node.all[1].get_future()
            future.add_done_callback(lambda f: threads.append(threading.get_ident()))
        del node
        collector = Worker(gc.collect)
        collector.finish()
    finally:
        gc.enable()
    assert threads == [collector.ident] * 10


def test_a_promise_dropped_while_an_error_is_raised_does_not_disturb_it() -> None:
    """Its callbacks run in the midst of the unwinding."""
    seen: list[Any] = []

    def doomed() -> dtorch_ops.TensorPromise:
        promise, future = pending()
        future.add_done_callback(lambda f: seen.append(sorted(str(i) for i in range(3))))
        return promise

    with pytest.raises(ZeroDivisionError):
        [doomed(), 1 / 0]
    assert seen == [["0", "1", "2"]]


@pytest.mark.parametrize("keep", [list, lambda p: dict.fromkeys(["k"], p), copy.copy])
def test_a_promise_that_is_held_elsewhere_is_not_broken(keep: Callable[[Any], Any]) -> None:
    promise, future = pending()
    kept = keep([promise]) if keep is list else keep(promise)
    del promise
    gc.collect()
    with pytest.raises(TimeoutError):
        future.wait(10)
    del kept
    with pytest.raises(dtorch_ops.BrokenPromiseError):
        future.wait(LIMIT * 1000)


def test_a_promise_in_a_queue_is_not_broken() -> None:
    channel: queue.Queue[Any] = queue.Queue()
    promise, future = pending()
    channel.put(promise)
    del promise
    gc.collect()
    assert not future.is_ready()
    Worker(lambda: channel.get().set_value(torch.tensor(4.0))).finish()
    assert future.get() == torch.tensor(4.0)


def test_dropping_a_promise_that_was_set_changes_nothing() -> None:
    for end, error in ENDS.values():
        promise, future = pending()
        end(promise)
        del promise
        if error is None:
            assert future.get() == torch.ones(1)
        else:
            with pytest.raises(error):
                future.get()


def test_a_promise_dropped_by_a_callback_of_another() -> None:
    first, a = pending()
    box = [dtorch_ops.TensorPromise()]
    b = box[0].get_future()
    a.add_done_callback(lambda f: box.clear())
    first.set_value(torch.ones(1))
    with pytest.raises(dtorch_ops.BrokenPromiseError):
        b.get()


def test_promises_fulfilled_by_finalizers() -> None:
    promise, future = pending()

    class Owner:
        def __del__(self) -> None:
            promise.set_value(torch.tensor(8.0))

    owner = Owner()
    assert not future.is_ready()
    del owner
    assert future.get() == torch.tensor(8.0)


# ---- A future completed behind its promise's back -----------------------------------------------


@pytest.mark.parametrize("end", ["del promise", "promise.set_exception(ValueError())"])
def test_a_bare_future_that_is_set_directly_does_not_end_the_process(end: str) -> None:
    """What the operators return is torch's class, with its ``set_result``."""
    fresh.check(f"""
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        torch.ops.dtorch.get_future(promise).set_result(torch.ones(1))
        assert future.get() == torch.ones(1)
        try:
            {end}
        except dtorch_ops.PromiseAlreadySatisfiedError:
            print("told so")
    """)


def test_a_group_that_is_set_directly_does_not_disturb_its_members() -> None:
    fresh.check("""
        seen = []
        for drop in (False, True):
            promise = dtorch_ops.TensorPromise()
            future = promise.get_future()
            torch.ops.dtorch.collect_any([future]).set_result(torch.zeros(1))
            future.add_done_callback(lambda f: seen.append("called"))
            if drop:
                del promise
            else:
                promise.set_value(torch.ones(1))
        assert seen == ["called"] * 2
    """)


# ---- Identity, and what a promise is not --------------------------------------------------------


@both
def test_promises_are_compared_by_identity(cls: Any) -> None:
    promise, other = cls(), cls()
    assert len({promise, other, promise}) == 2
    assert {promise: 1}[promise] == 1
    assert promise == promise
    assert promise != other
    assert promise != 1
    held = [other, promise]
    assert held.index(promise) == 1
    held.remove(promise)
    assert held == [other]


@both
def test_promises_can_be_watched_weakly(cls: Any) -> None:
    promise = cls()
    watch = weakref.ref(promise)
    assert watch() is promise
    del promise
    assert watch() is None


@both
def test_an_unknown_attribute_is_an_attribute_error(cls: Any) -> None:
    promise = cls()
    assert not hasattr(promise, "set_result")
    with pytest.raises(AttributeError):
        promise.no_such_thing()


@both
def test_subclasses_have_attributes_and_are_promises(cls: Any) -> None:
    class Tagged(cls):
        def __init__(self, tag: str) -> None:
            super().__init__(mode="memory")
            self.tag = tag

        def finish(self) -> None:
            set_something(self)

    promise = Tagged("a tag")
    assert promise.tag == "a tag"
    future = promise.get_future()
    promise.finish()
    future.get()
    assert ops.get_future(promise).done()


# ---- __init__, run or not -----------------------------------------------------------------------


# How to make a promise of mode "auto" of the class "cls" for which nobody need call our __init__.
_MAKE = """
class Forgetful(cls):
    def __init__(self, tag):
        self.tag = tag

class OwnNew(cls):
    def __new__(cls, tag):
        self = super().__new__(cls)
        self.tag = tag
        return self

    def __init__(self, tag):
        pass

class OwnNewAndInit(OwnNew):
    def __init__(self, tag):
        super(OwnNew, self).__init__()

made = {
    "new": lambda: cls.__new__(cls),
    "new_of_derived": lambda: type("Derived", (cls,), {}).__new__(cls),
    "forgetful": lambda: Forgetful("a tag"),
    "own_new": lambda: OwnNew("a tag"),
    "own_new_and_init": lambda: OwnNewAndInit("a tag"),
}
"""


def _made(cls: Any, how: str) -> Any:
    names: dict[str, Any] = {"cls": cls}
    exec(_MAKE, names)
    return names["made"][how]()


HOW_MADE = ["new", "new_of_derived", "forgetful", "own_new", "own_new_and_init"]
however_made = pytest.mark.parametrize("how", HOW_MADE)


@both
@however_made
@pytest.mark.parametrize("end", [*ENDS, "drop"])
def test_a_promise_is_whole_before_its_init(cls: Any, how: str, end: str) -> None:
    promise = _made(cls, how)
    assert repr(promise) == f"<{type(promise).__name__} pending>" and promise
    assert getattr(promise, "tag", "a tag") == "a tag"
    future = promise.get_future()
    seen: list[bool] = []
    future.add_done_callback(lambda f: seen.append(f.is_ready()))
    finish, error = ENDS.get(end, (lambda p: None, dtorch_ops.BrokenPromiseError))
    finish(promise)
    assert promise.is_pending() == (end == "drop")
    del promise
    assert seen == [True]
    if error is None:
        future.get()
    else:
        with pytest.raises(error):
            future.get()


@both
@pytest.mark.parametrize("script", [False, True], ids=["eager", "scripted"])
def test_operators_take_a_promise_before_its_init(cls: Any, script: bool) -> None:
    """They look for the native object, which is there from the start."""
    tensor = cls is dtorch_ops.TensorPromise
    call = "get_tensor(t, promise)" if tensor else "sync(promise)"
    told = fresh.check(f"""
        import textwrap
        cls = dtorch_ops.{cls.__name__}
        exec({_MAKE!r})
        t = torch.tensor(2.0)
        def fulfil(t, promise):
            torch.ops.dtorch.{call}
            return torch.ops.dtorch.get_future(promise)
        if {script}:
            unit = torch.jit.CompilationUnit()
            unit.define(textwrap.dedent('''
                def fulfil(t: Tensor, promise: __torch__.torch.classes.dtorch.{cls.__name__}):
                    torch.ops.dtorch.{call}
                    return torch.ops.dtorch.get_future(promise)
            '''))
            fulfil = unit.fulfil
        for how, make in made.items():
            print(how, flush=True)
            promise = make()
            future = promise.get_future()
            bare = torch.ops.dtorch.get_future(promise)
            assert not bare.done()
            returned = fulfil(t, promise)
            assert not promise.is_pending()
            for f in (bare, future, returned):
                assert f.wait() == (t if {tensor} else None)
    """)
    assert told.split() == HOW_MADE


@both
def test_a_promise_without_init_travels_as_its_mode_auto_says(cls: Any) -> None:
    promise = cls.__new__(cls)
    travelled = pickle.loads(pickle.dumps(promise))  # kept: dropping it would break the promise
    assert travelled.is_pending()
    set_something(promise)
    promise.get_future().get()


@both
def test_init_chooses_the_mode_of_a_promise_once(cls: Any) -> None:
    promise = cls.__new__(cls)
    with pytest.raises(ValueError):
        promise.__init__("nonsense")
    promise.__init__("memory")
    with pytest.raises(dtorch_ops.DTorchError, match="memory"):
        pickle.dumps(promise)
    for mode in ("memory", "auto"):
        with pytest.raises(
            dtorch_ops.DTorchError, match="__init__ has been called on this promise before"
        ):
            promise.__init__(mode)
    with pytest.raises(dtorch_ops.DTorchError, match="memory"):
        pickle.dumps(promise)
    set_something(promise)


@both
@pytest.mark.parametrize("when", ["pending", *ENDS])
def test_a_promise_is_initialised_once(cls: Any, when: str) -> None:
    promise = cls()
    future = promise.get_future()
    if when != "pending":
        ENDS[when][0](promise)
    with pytest.raises(
        dtorch_ops.DTorchError, match="__init__ has been called on this promise before"
    ):
        promise.__init__()
    if when == "pending":
        assert not future.is_ready()
        set_something(promise)
        future.get()


@both
def test_new_takes_a_class_of_promises(cls: Any) -> None:
    other = dtorch_ops.VoidPromise if cls is dtorch_ops.TensorPromise else dtorch_ops.TensorPromise
    for arguments in ((), (1,), (None,), (object,), (torch._C.ScriptObject,), (other,)):
        with pytest.raises(TypeError):
            cls.__new__(*arguments)


# ---- Travelling ---------------------------------------------------------------------------------

CARRIERS: dict[str, Callable[[Any], Any]] = {
    "dumps": pickle.dumps,
    **{f"protocol_{n}": lambda p, n=n: pickle.dumps(p, n) for n in range(6)},
    "in_a_list": lambda p: pickle.dumps([1, p]),
    "pickler": lambda p: pickle.Pickler(io.BytesIO()).dump(p),
    "python_pickler": lambda p: pickle._Pickler(io.BytesIO()).dump(p),
    "torch_save": lambda p: torch.save(p, io.BytesIO()),
    "multiprocessing": lambda p: multiprocessing.reduction.ForkingPickler.dumps(p),
}


@both
@pytest.mark.parametrize("carry", CARRIERS.values(), ids=CARRIERS.keys())
def test_a_memory_promise_does_not_travel(cls: Any, carry: Any) -> None:
    promise = cls("memory")
    future = promise.get_future()
    with pytest.raises(dtorch_ops.DTorchError, match="memory"):
        carry(promise)
    gc.collect()
    assert promise.is_pending() and not future.is_ready(), "asking has broken it"
    set_something(promise)
    future.get()


@both
@pytest.mark.parametrize("mode", ["memory", "auto"])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda p: copy.deepcopy([p])[0]])
def test_a_copy_is_the_promise_itself(cls: Any, mode: str, copied: Any) -> None:
    promise = cls(mode)
    assert copied(promise) is promise
    assert promise.is_pending()


@both
def test_modes(cls: Any) -> None:
    for mode in ("auto", "memory", "file", "network"):
        for promise in (cls(), cls(mode), cls(mode=mode)):
            set_something(promise)
    for mode in ("", "Memory", "memory ", "shm", "mémoire"):
        with pytest.raises(ValueError, match="'auto', 'memory', 'file' or 'network'"):
            cls(mode)
    for bad in (None, 1, b"auto", True, ["auto"]):
        with pytest.raises(TypeError, match="mode: expected a string"):
            cls(bad)
    for call in (lambda: cls("auto", 1), lambda: cls(backend="memory")):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(ValueError):
        cls("\ud800")


# ---- Operators ----------------------------------------------------------------------------------


def test_the_operator_fulfils_a_promise_for_a_thread_that_waits() -> None:
    promise, future = pending()
    waiter = blocked_in(future.get)
    value = torch.tensor(5.0)
    assert ops.get_tensor(value, promise) is None
    assert waiter.finish() is value
    with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError):
        ops.get_tensor(value, promise)


@pytest.mark.parametrize("copy, expected", [(True, 1.0), (False, 5.0)])
def test_the_operator_takes_a_snapshot(copy: bool, expected: float) -> None:
    promise, future = pending()
    value = torch.ones(2)
    ops.get_tensor(value, promise, copy=copy)
    value.fill_(5)
    assert future.get().tolist() == [expected] * 2


@pytest.mark.parametrize("copy", [True, False])
def test_a_snapshot_for_another_process_is_the_copy_that_is_made_anyway(copy: bool) -> None:
    promise, future = pending()
    [outcome] = fresh.run(
        f"""
        promise = dtorch_ops.TensorPromise.from_token({promise.token()!r})
        value = torch.ones(1000)
        with torch.profiler.profile() as profile:
            torch.ops.dtorch.get_tensor(value, promise, copy={copy})
        value.fill_(5)
        assert "aten::clone" not in [event.name for event in profile.events()]
        """
    )
    assert outcome.exit_code == 0, outcome.stderr  # where the profiler says that it runs
    assert future.get().tolist() == [1] * 1000


def test_a_snapshot_is_differentiable() -> None:
    promise, future = pending()
    x = torch.ones(2, requires_grad=True)
    ops.get_tensor(x * 2, promise, copy=True)
    future.get().sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2]


def test_the_future_from_the_operator_is_that_of_the_promise() -> None:
    promise, future = pending()
    bare = ops.get_future(promise)
    assert not bare.done()
    mine = dtorch_ops.TensorFuture(ops.get_future(promise))
    promise.set_value(torch.tensor(2.0))
    assert bare.wait() == mine.get() == future.get() == torch.tensor(2.0)
    void = dtorch_ops.VoidPromise()
    bare = ops.get_future(void)
    void.set_value()
    assert bare.wait() is None


@pytest.mark.parametrize(
    "sync",
    [
        lambda p: ops.sync(p),
        lambda p: ops.sync(p, ["cpu"]),
        lambda p: ops.sync([torch.device("cpu")], p),
        lambda p: ops.sync(None, p),
    ],
    ids=["promise", "promise_devices", "devices_promise", "none_promise"],
)
def test_sync_fulfils_a_promise(sync: Callable[[Any], Any]) -> None:
    promise = dtorch_ops.VoidPromise()
    waiter = blocked_in(promise.get_future().get)
    assert sync(promise) is None
    assert waiter.finish() is None
    with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError):
        sync(promise)


def test_operators_tell_that_a_promise_was_cancelled() -> None:
    tensor, void = dtorch_ops.TensorPromise(), dtorch_ops.VoidPromise()
    tensor.cancel()
    void.cancel()
    with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError, match="cancelled"):
        ops.get_tensor(torch.ones(1), tensor)
    with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError, match="cancelled"):
        ops.sync(void)


def test_a_promise_of_the_other_kind_is_refused_and_stays_pending() -> None:
    tensor, void = dtorch_ops.TensorPromise(), dtorch_ops.VoidPromise()
    for call in (
        lambda: ops.get_tensor(torch.ones(1), void),
        lambda: ops.sync(tensor),
        lambda: ops.get_tensor(torch.ones(1), tensor.get_future()),
        lambda: ops.get_future(tensor.get_future()),
        lambda: ops.get_tensor(None, tensor),
    ):
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            call()
    assert tensor.is_pending() and void.is_pending()


def test_promises_made_by_torch_classes_are_the_same_thing() -> None:
    promise = torch.classes.dtorch.TensorPromise()
    future = dtorch_ops.TensorFuture(ops.get_future(promise))
    promise.set_value(torch.tensor(3.0))
    assert future.get() == torch.tensor(3.0)
    promise = torch.classes.dtorch.VoidPromise()
    future = dtorch_ops.VoidFuture(ops.get_future(promise))
    promise.set_exception("why")
    with pytest.raises(RuntimeError, match="why"):
        future.get()
    promise = torch.classes.dtorch.TensorPromise()
    future = dtorch_ops.TensorFuture(ops.get_future(promise))
    del promise
    with pytest.raises(dtorch_ops.BrokenPromiseError):
        future.get()


def test_a_promise_that_only_operators_have_seen() -> None:
    future = ops.get_future(promise := dtorch_ops.TensorPromise())
    ops.get_tensor(torch.tensor(1.5), promise)
    del promise
    assert future.wait() == torch.tensor(1.5)
    future = dtorch_ops.TensorFuture(ops.get_future(dtorch_ops.TensorPromise()))
    with pytest.raises(dtorch_ops.BrokenPromiseError):
        future.get()


# ---- Threads ------------------------------------------------------------------------------------


def test_from_thread_to_thread_and_back() -> None:
    """Ping-pong: each side answers what the other sent with a promise of its own."""
    requests: queue.Queue[Any] = queue.Queue()

    def serve() -> None:
        while (request := requests.get()) is not None:
            value, answer = request
            answer.set_value(value + 1)

    server = Worker(serve)
    value = torch.tensor(0)
    for _ in range(500):
        promise, future = pending()
        requests.put((value, promise))
        value = future.get()
    requests.put(None)
    server.finish()
    assert value == torch.tensor(500)


def test_many_producers_and_consumers() -> None:
    """Every outcome and every way of waiting, from eight threads to eight threads."""
    count, width = 4000, 8
    promises: list[Any] = [dtorch_ops.TensorPromise() for _ in range(count)]
    futures = [p.get_future() for p in promises]
    chance = random.Random(7)
    kinds = [chance.choice(["value", "error", "cancel", "drop"]) for _ in range(count)]
    called = [0] * count
    called_lock = threading.Lock()

    def note(i: int) -> None:
        with called_lock:
            called[i] += 1

    def produce(first: int) -> None:
        for i in range(first, count, width):
            if kinds[i] == "value":
                promises[i].set_value(torch.tensor(i))
            elif kinds[i] == "error":
                promises[i].set_exception(ValueError(i))
            elif kinds[i] == "cancel":
                assert promises[i].cancel()
            promises[i] = None

    def consume(first: int) -> None:
        ways = list(WAITS.values())
        order = list(range(first, count, width))
        random.Random(first).shuffle(order)
        ways.remove(WAITS["await"])  # a loop for each costs more than all the rest
        for i in order:
            futures[i].add_done_callback(lambda f, i=i: note(i))
            try:
                outcome = ("value", ways[i % len(ways)](futures[i]).item())
            except ValueError as error:
                outcome = ("error", error.args[0])
            except CancelledError:
                outcome = ("cancel", i)
            except dtorch_ops.BrokenPromiseError:
                outcome = ("drop", i)
            assert outcome == (kinds[i], i)

    consumers = [Worker(lambda n=n: consume(n)) for n in range(width)]
    producers = [Worker(lambda n=n: produce(n)) for n in range(width)]
    for worker in producers + consumers:
        worker.finish(60)
    assert called == [1] * count


def test_coroutines_and_threads_wait_for_one_promise() -> None:
    promise, future = pending()
    loops = [blocked_in(lambda: asyncio.run(awaited(future))) for _ in range(4)]
    threads = [blocked_in(future.wait) for _ in range(4)]
    value = torch.ones(1)
    promise.set_value(value)
    assert all(worker.finish() is value for worker in loops + threads)


@pytest.mark.parametrize("end", ["set_value", "set_exception", "cancel", "drop"])
def test_promises_leave_nothing_however_they_end(end: str) -> None:
    def step() -> None:
        promise, future = pending()
        future.add_done_callback(lambda f: None)
        if end != "drop":
            ENDS[end][0](promise)
        del promise
        try:
            future.get()
        except (KeyError, CancelledError, dtorch_ops.BrokenPromiseError):
            return

    assert_memory_stays_flat(step, 1000)
