"""collect_all, collect_any, wait_all and as_completed, of ours and of torch's futures together."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import fresh
import pytest
import torch
from futures import (
    LIMIT,
    assert_memory_stays_flat,
    awaited,
    blocked_in,
    failed,
    pending,
    ready,
    stock_failed,
)
from helpers import Worker

import dtorch_ops

ops = torch.ops.dtorch


def stock() -> torch.futures.Future[Any]:
    return torch.futures.Future()


def stock_ready(value: Any) -> torch.futures.Future[Any]:
    future = stock()
    future.set_result(value)
    return future


def broken() -> dtorch_ops.TensorFuture:
    promise, future = pending()
    del promise
    return future


def cancelled() -> dtorch_ops.TensorFuture:
    promise, future = pending()
    promise.cancel()
    return future


GROUPS: dict[str, Callable[[Any], Any]] = {
    "collect_all": dtorch_ops.collect_all,
    "collect_any": dtorch_ops.collect_any,
    "wait_all": dtorch_ops.wait_all,
    "as_completed": dtorch_ops.as_completed,
}
every_group = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())

# Waiting for all: by ours, and by the operators.
WAIT_ALL: dict[str, Callable[[Any], Any]] = {
    "wait_all": dtorch_ops.wait_all,
    "wait_all_ms": lambda fs: dtorch_ops.wait_all(fs, 60_000),
    "collect_all": lambda fs: [f.wait() for f in dtorch_ops.collect_all(fs).get()],
    "wait_all_operator": ops.wait_all,
    "collect_all_operator": lambda fs: [f.wait() for f in ops.collect_all(fs).wait()],
}
every_wait = pytest.mark.parametrize("wait", WAIT_ALL.values(), ids=WAIT_ALL.keys())


# ---- All of them --------------------------------------------------------------------------------


@every_wait
def test_values_come_in_the_order_given_whatever_the_order_of_completion(
    wait: Callable[[Any], Any],
) -> None:
    promises = [dtorch_ops.TensorPromise() for _ in range(50)]
    futures = [p.get_future() for p in promises]
    waiter = blocked_in(lambda: wait(futures))
    order = list(range(50))
    random.Random(3).shuffle(order)
    for i in order:
        assert waiter.is_alive()
        promises[i].set_value(torch.tensor(i))
    assert [value.item() for value in waiter.finish()] == list(range(50))
    assert all(future.valid() for future in futures), "no member is consumed"


@every_wait
def test_ours_and_stock_ones_together(wait: Callable[[Any], Any]) -> None:
    promise, ours = pending()
    void = dtorch_ops.VoidPromise()
    theirs = stock()
    bare = ops.get_tensor_async(torch.tensor(3.0))
    waiter = blocked_in(lambda: wait([theirs, ours, bare, void.get_future()]))
    promise.set_value(torch.tensor(2.0))
    void.set_value()
    theirs.set_result(torch.tensor(1.0))
    assert waiter.finish() == [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0), None]


@every_wait
def test_nothing_to_wait_for(wait: Callable[[Any], Any]) -> None:
    assert wait([]) == []


@every_wait
def test_one_future_twice(wait: Callable[[Any], Any]) -> None:
    promise, future = pending()
    waiter = blocked_in(lambda: wait([future, future, promise.get_future()]))
    promise.set_value(torch.tensor(2.0))
    assert waiter.finish() == [torch.tensor(2.0)] * 3


@pytest.mark.parametrize("iterable", [tuple, iter, lambda fs: (f for f in fs), dict.fromkeys])
@every_group
def test_any_iterable_will_do(group: Callable[[Any], Any], iterable: Callable[[Any], Any]) -> None:
    futures = [ready(1.0), ready(2.0)]
    result = group(iterable(futures))
    if group is dtorch_ops.collect_all or group is dtorch_ops.as_completed:
        assert list(result.get() if group is dtorch_ops.collect_all else result) == futures
    elif group is dtorch_ops.wait_all:
        assert result == [torch.tensor(1.0), torch.tensor(2.0)]
    else:
        assert result.get() == torch.tensor(1.0)


@every_group
@pytest.mark.parametrize("bad", [1, None, "f", torch.ones(1), torch.futures.Future], ids=repr)
def test_a_member_that_is_no_future_is_a_type_error(
    group: Callable[[Any], Any], bad: object
) -> None:
    for members in ([bad], [ready(), bad], [pending()[1], bad]):
        with pytest.raises(TypeError, match="futures: expected a torch future, got"):
            group(members)


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_no_iterable_does_not_end_the_process(group: str) -> None:
    fresh.check(f"""
        promise = dtorch_ops.TensorPromise()
        for bad in (None, 5, object(), promise.get_future(), promise, torch.futures.Future()):
            try:
                dtorch_ops.{group}(bad)
            except (TypeError, NotImplementedError):
                continue
            raise AssertionError(bad)
    """)


@pytest.mark.parametrize("group", GROUPS)
def test_an_iterable_that_raises_does_not_end_the_process(group: str) -> None:
    fresh.check(f"""
        def futures():
            yield dtorch_ops.sync_future()
            raise KeyError("in the midst")
        try:
            dtorch_ops.{group}(futures())
        except KeyError:
            sys.exit(0)
        raise AssertionError
    """)


def test_a_collected_group_gives_back_the_very_objects() -> None:
    class Mine(dtorch_ops.TensorFuture):
        pass

    futures = [ready(), Mine(ready()), stock_ready(1), ops.get_tensor_async(torch.ones(1))]
    futures.append(dtorch_ops.collect_all(futures))
    group = dtorch_ops.collect_all(futures)
    given = list(futures)
    futures.clear()
    for members in (group.wait(), group.value(), dtorch_ops.wait_all([group])[0], group.get()):
        assert [id(m) for m in members] == [id(m) for m in given]
        members.clear()  # each reader's list is its own


def test_a_group_gives_its_members_in_every_way_of_reading() -> None:
    future = ready()
    group = dtorch_ops.collect_all([future])
    assert dtorch_ops.Future(group).get()[0] is future
    assert group.then(lambda g: g.value()[0]).get() is future
    assert next(dtorch_ops.as_completed([group])).value()[0] is future
    seen: list[Any] = []
    group.add_done_callback(lambda g: seen.append(g.value()[0]))
    assert seen[0] is future


@pytest.mark.parametrize("complete_first", [True, False])
def test_the_first_of_groups_gives_the_very_members(complete_first: bool) -> None:
    promise, future = pending()
    if complete_first:
        promise.set_value(torch.ones(1))
    inner = dtorch_ops.collect_all([future])
    first = dtorch_ops.collect_any([inner])
    first_of_first = dtorch_ops.collect_any([first])
    both = dtorch_ops.collect_all([inner, first])
    if not complete_first:
        promise.set_value(torch.ones(1))
    assert first.get()[0] is first_of_first.get()[0] is future
    assert [member.wait()[0] for member in both.get()] == [future] * 2
    assert dtorch_ops.wait_all([inner, first])[1][0] is future


def test_groups_nest() -> None:
    one, two = pending(), pending()
    outer = dtorch_ops.collect_all([dtorch_ops.collect_all([one[1], two[1]])])
    one[0].set_value(torch.ones(1))
    assert not outer.is_ready()
    two[0].set_value(torch.ones(1))
    assert outer.get()[0].get() == [one[1], two[1]]
    one, two = pending(), pending()
    outer = dtorch_ops.collect_all([dtorch_ops.collect_any([one[1], two[1]]), ready()])
    two[0].set_exception(KeyError("inner"))
    with pytest.raises(KeyError, match="inner"):
        outer.get()
    one[0].set_value(torch.ones(1))


# ---- Errors at once -----------------------------------------------------------------------------

FAILED: dict[str, tuple[Callable[[], Any], type[BaseException]]] = {
    "set_exception": (lambda: failed(KeyError("first")), KeyError),
    "broken": (broken, dtorch_ops.BrokenPromiseError),
    "cancelled": (cancelled, __import__("concurrent.futures").futures.CancelledError),
    "stock": (lambda: stock_failed(KeyError("first")), KeyError),
    "then": (lambda: ready().then(lambda f: 1 / 0), ZeroDivisionError),
    "stock_then": (lambda: stock_ready(1).then(lambda f: f.value() / 0), RuntimeError),
}
every_failure = pytest.mark.parametrize(("make", "error"), FAILED.values(), ids=FAILED.keys())


@every_wait
@every_failure
@pytest.mark.parametrize("failed_first", [True, False])
def test_an_error_ends_the_wait_although_another_member_is_never_set(
    wait: Callable[[Any], Any], make: Callable[[], Any], error: Any, failed_first: bool
) -> None:
    promise, never = pending()
    bad = make()
    members = [bad, never] if failed_first else [never, bad]
    waiter = Worker(lambda: wait([ready(), *members, ready()]))
    with pytest.raises(error):
        waiter.finish(5)
    assert not never.is_ready() and never.valid()
    promise.set_value(torch.tensor(9.0))
    assert never.get() == torch.tensor(9.0), "the others can still complete"


@every_wait
@pytest.mark.parametrize("failed_first", [True, False])
def test_an_error_set_later_ends_a_wait_in_progress(
    wait: Callable[[Any], Any], failed_first: bool
) -> None:
    promise, never = pending()
    failing, future = pending()
    members = [future, never] if failed_first else [never, future]
    waiter = blocked_in(lambda: wait(members))
    failing.set_exception(LookupError("now", 2))
    with pytest.raises(LookupError) as info:
        waiter.finish(5)
    assert type(info.value) is LookupError and info.value.args == ("now", 2)
    assert not never.is_ready()
    promise.set_value(torch.ones(1))


def test_the_first_error_to_happen_is_the_one() -> None:
    promises = [dtorch_ops.TensorPromise() for _ in range(3)]
    group = dtorch_ops.collect_all([p.get_future() for p in promises])
    promises[2].set_exception(KeyError("first"))
    promises[0].set_exception(ValueError("second"))
    promises[1].set_value(torch.ones(1))
    for _ in range(2):
        with pytest.raises(KeyError, match="first"):
            group.wait()


def unwrapped(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    """As the futures of torch's RPC: errors are values, and a function of Python raises them."""

    def unwrap(value: Any) -> None:
        if isinstance(value, str):
            raise LookupError(value)

    future._set_unwrap_func(unwrap)
    return future


# Futures whose error only their unwrap function knows.
UNWRAPPED: dict[str, Callable[[Any], Any]] = {
    "bare": unwrapped,
    "handle": lambda f: dtorch_ops.Future(unwrapped(f)),
    "handle_of_handle": lambda f: dtorch_ops.TensorFuture(dtorch_ops.Future(unwrapped(f))),
    "any": lambda f: dtorch_ops.collect_any([unwrapped(f)]),
    "any_of_any": lambda f: dtorch_ops.collect_any([dtorch_ops.collect_any([unwrapped(f)])]),
    "any_of_handle": lambda f: dtorch_ops.collect_any([dtorch_ops.Future(unwrapped(f)), stock()]),
    "all": lambda f: dtorch_ops.collect_all([unwrapped(f)]),
}
WAIT_UNWRAPPED: dict[str, Callable[[Any, Any], Any]] = {
    "collect_any": lambda f, never: dtorch_ops.collect_any([never, f]).get(),
    "collect_all": lambda f, never: dtorch_ops.collect_all([never, f]).get(),
    "wait_all": lambda f, never: dtorch_ops.wait_all([f, never]),
    "wait_all_last": lambda f, never: dtorch_ops.wait_all([never, f], 60_000),
    "as_completed": lambda f, never: dtorch_ops.Future(
        next(dtorch_ops.as_completed([never, f]))
    ).get(),
    "nested": lambda f, never: dtorch_ops.collect_any([dtorch_ops.collect_all([f, never])]).get(),
    "nested_all": lambda f, never: dtorch_ops.collect_all(
        [dtorch_ops.collect_any([f, never]), never]
    ).get(),
}


@pytest.mark.parametrize("make", UNWRAPPED.values(), ids=UNWRAPPED.keys())
@pytest.mark.parametrize("wait", WAIT_UNWRAPPED.values(), ids=WAIT_UNWRAPPED.keys())
@pytest.mark.parametrize("when", ["before", "later"])
def test_an_error_that_an_unwrap_function_raises_is_an_error_of_the_group(
    make: Callable[[Any], Any], wait: Callable[[Any, Any], Any], when: str
) -> None:
    promise, never = pending()
    inner = stock()
    if when == "before":
        inner.set_result("of the callee")
    future = make(inner)
    call = lambda: wait(future, never)  # noqa: E731
    waiter = Worker(call) if when == "before" else blocked_in(call)
    if when == "later":
        assert waiter.is_alive()
        inner.set_result("of the callee")
    with pytest.raises(LookupError, match="of the callee"):
        waiter.finish(5)
    assert not never.is_ready() and never.valid()
    promise.set_value(torch.ones(1))


@pytest.mark.parametrize("make", UNWRAPPED.values(), ids=UNWRAPPED.keys())
def test_what_an_unwrap_function_lets_pass_is_a_value(make: Callable[[Any], Any]) -> None:
    inner = stock()
    future = make(inner)
    group = dtorch_ops.collect_all([future, ready()])
    any_of = dtorch_ops.collect_any([future])
    inner.set_result(7)
    assert group.get()[0] is future
    expected = future.value()
    assert dtorch_ops.wait_all([future]) == [expected]
    assert any_of.get() == expected
    assert expected == 7 or expected[0].value() == 7


# ---- Any of them --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "collect", [dtorch_ops.collect_any, lambda fs: dtorch_ops.Future(ops.collect_any(fs))]
)
def test_collect_any_takes_the_first_to_complete(collect: Callable[[Any], Any]) -> None:
    promises = [dtorch_ops.TensorPromise() for _ in range(5)]
    futures = [p.get_future() for p in promises]
    first = collect(futures)
    assert not first.is_ready()
    promises[3].set_value(torch.tensor(3.0))
    promises[0].set_value(torch.tensor(0.0))
    assert first.wait() == first.get() == torch.tensor(3.0)
    assert [f.is_ready() for f in futures] == [True, False, False, True, False]
    promises[1].set_exception(KeyError())
    assert collect(futures).get() == torch.tensor(0.0), "of the complete ones the first given"


@every_failure
def test_collect_any_takes_an_error_if_that_is_first(make: Callable[[], Any], error: Any) -> None:
    promise, never = pending()
    for members in ([make(), never], [never, make()], [make(), ready()]):
        first = dtorch_ops.collect_any(members)
        for _ in range(2):
            with pytest.raises(error):
                first.wait(LIMIT * 1000)
    assert dtorch_ops.collect_any([never, ready(4.0), make()]).get() == torch.tensor(4.0)
    promise.set_value(torch.ones(1))


def test_collect_any_of_stock_and_ours() -> None:
    promise, ours = pending()
    theirs = stock()
    first = dtorch_ops.collect_any([ours, theirs])
    theirs.set_result("theirs")
    assert first.get() == "theirs"
    promise.set_value(torch.ones(1))


def test_collect_any_of_nothing_is_a_value_error() -> None:
    for collect in (dtorch_ops.collect_any, ops.collect_any):
        with pytest.raises(ValueError, match="at least one future"):
            collect([])


def test_what_a_group_is_handed_out_as() -> None:
    """A future of one tensor is a TensorFuture, whoever made it."""
    assert type(dtorch_ops.collect_any([ready(), ready()])) is dtorch_ops.TensorFuture
    assert type(dtorch_ops.collect_any([dtorch_ops.sync_future()])) is dtorch_ops.VoidFuture
    assert isinstance(dtorch_ops.collect_any([ready(), stock()]), dtorch_ops.Future)
    assert isinstance(dtorch_ops.collect_all([ready()]), dtorch_ops.Future)


def test_a_group_of_a_users_class_is_a_plain_future() -> None:
    """Of that class nobody has called the __init__."""

    class Tensors(dtorch_ops.TensorFuture):
        def __init__(self, future: Any, tag: str) -> None:
            super().__init__(future)
            self.tag = tag

    class Voids(dtorch_ops.VoidFuture):
        pass

    class Others(dtorch_ops.Future[Any]):
        pass

    class MoreTensors(Tensors):
        pass

    tensors = [Tensors(ready(2.0), "a"), Tensors(pending()[1], "b")]
    any_of = dtorch_ops.collect_any(tensors)
    assert type(any_of) is dtorch_ops.TensorFuture and any_of.get() == torch.tensor(2.0)
    mixed = dtorch_ops.collect_any([*tensors, MoreTensors(ready(), "c"), ready()])
    assert type(mixed) is dtorch_ops.TensorFuture
    assert type(dtorch_ops.collect_any([tensors[0], Others(ready())])) is dtorch_ops.Future
    assert type(dtorch_ops.collect_any([Others(ready())])) is dtorch_ops.Future
    assert type(dtorch_ops.collect_any([Voids(dtorch_ops.sync_future())])) is dtorch_ops.VoidFuture
    assert type(dtorch_ops.collect_all(tensors)) is dtorch_ops.Future


# ---- Time limits --------------------------------------------------------------------------------


def test_wait_all_has_one_limit_for_all_and_can_be_repeated() -> None:
    promises = [dtorch_ops.TensorPromise() for _ in range(3)]
    futures = [p.get_future() for p in promises]
    promises[1].set_value(torch.ones(1))
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="2 of 3"):
        dtorch_ops.wait_all(futures, 50)
    assert time.monotonic() - start >= 0.05
    for promise in promises[::2]:
        promise.set_value(torch.ones(1))
    assert len(dtorch_ops.wait_all(futures, 0)) == 3


def test_a_limit_of_a_group_ends_although_members_keep_completing() -> None:
    """The limit is for all together, not from one completion to the next."""
    promises = [dtorch_ops.TensorPromise() for _ in range(400)]
    futures = [p.get_future() for p in promises]
    enough = threading.Event()

    def drip() -> None:
        for promise in promises[:-1]:
            promise.set_value(torch.ones(1))
            if enough.wait(0.005):
                return

    dripper = Worker(drip)
    with pytest.raises(TimeoutError):
        dtorch_ops.wait_all(futures, 100)
    with pytest.raises(TimeoutError):
        list(dtorch_ops.as_completed(futures, 100))
    enough.set()
    dripper.finish()


def test_wait_all_reports_an_error_rather_than_the_limit() -> None:
    with pytest.raises(KeyError):
        dtorch_ops.wait_all([pending()[1], failed(KeyError())][::-1], 0)


def test_a_group_that_timed_out_completes_later() -> None:
    promise, future = pending()
    group = dtorch_ops.collect_all([future])
    with pytest.raises(TimeoutError):
        group.wait(10)
    assert group.valid()
    promise.set_value(torch.ones(1))
    assert group.get() == [future]


# ---- as_completed -------------------------------------------------------------------------------


def test_as_completed_gives_the_objects_in_the_order_of_completion() -> None:
    promises = [dtorch_ops.TensorPromise() for _ in range(6)]
    futures: list[Any] = [p.get_future() for p in promises]
    futures.append(stock())
    promises[4].set_value(torch.ones(1))
    promises[2].set_exception(KeyError("members that failed are given, not raised"))
    iterator = iter(dtorch_ops.as_completed(futures))
    assert next(iterator) is futures[2] and next(iterator) is futures[4]
    for i in (5, 0):
        promises[i].set_value(torch.ones(1))
    futures[6].set_result(1)
    promises[3].cancel()
    assert [futures.index(next(iterator)) for _ in range(4)] == [5, 0, 6, 3]
    last = blocked_in(lambda: next(iterator))
    promises[1].set_value(torch.ones(1))
    assert last.finish() is futures[1]
    assert list(iterator) == [] and next(iterator, "over") == "over"


def test_as_completed_sees_what_another_thread_completes() -> None:
    promises = [dtorch_ops.TensorPromise() for _ in range(2000)]
    futures = [p.get_future() for p in promises]
    order = list(range(2000))
    random.Random(5).shuffle(order)
    setter = Worker(lambda: [promises[i].set_value(torch.tensor(i)) for i in order])
    seen = [f.get().item() for f in dtorch_ops.as_completed(futures, LIMIT * 1000)]
    setter.finish()
    assert sorted(seen) == list(range(2000))


def test_as_completed_of_nothing_and_of_one_future_twice() -> None:
    assert list(dtorch_ops.as_completed([])) == []
    assert list(dtorch_ops.as_completed([], timeout_ms=0)) == []
    promise, future = pending()
    iterator = dtorch_ops.as_completed([future, future])
    promise.set_value(torch.ones(1))
    assert list(iterator) == [future, future]


def test_as_completed_gives_what_is_complete_before_its_limit_counts() -> None:
    promise, never = pending()
    done = [ready(), ready()]
    iterator = dtorch_ops.as_completed([done[0], never, done[1]], timeout_ms=0)
    assert [next(iterator), next(iterator)] == done
    with pytest.raises(TimeoutError, match="1 of 3"):
        next(iterator)
    promise.set_value(torch.ones(1))


def test_the_limit_of_as_completed_counts_from_its_making() -> None:
    promise, future = pending()
    iterator = dtorch_ops.as_completed([future], timeout_ms=30)
    with pytest.raises(TimeoutError):
        future.wait(60)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        next(iterator)
    assert time.monotonic() - start < 5
    promise.set_value(torch.ones(1))


def test_arguments_are_checked_when_as_completed_is_called() -> None:
    for arguments, error in (
        (([1],), TypeError),
        (([ready()], -1), ValueError),
        (([ready()], "1"), TypeError),
        ((5,), TypeError),
    ):
        with pytest.raises(error):
            dtorch_ops.as_completed(*arguments)


def test_an_iteration_that_stops_early_leaves_nothing() -> None:
    promise, never = pending()
    for future in dtorch_ops.as_completed([never, ready()]):
        assert future is not never
        break
    other = pending()[1]
    alive = weakref.ref(other)
    iterator = dtorch_ops.as_completed([never, other])
    next(iterator)  # broken: its promise is gone
    del other, iterator
    gc.collect()
    assert alive() is None
    promise.set_value(torch.ones(1))


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("timeout_ms", [None, 60_000])
@pytest.mark.parametrize("complete", [0, 3, 8])
def test_threads_may_share_an_iteration(
    threads: int, timeout_ms: int | None, complete: int
) -> None:
    """Each future goes to one of them, and none is left waiting."""
    fresh.check(f"""
        for _ in range(50):
            promises = [dtorch_ops.VoidPromise() for _ in range(8)]
            for promise in promises[:{complete}]:
                promise.set_value()
            iterator = dtorch_ops.as_completed([p.get_future() for p in promises], {timeout_ms})
            seen = []
            def consume():
                for future in iterator:
                    seen.append(future)
            threads = [threading.Thread(target=consume, daemon=True) for _ in range({threads})]
            for thread in threads:
                thread.start()
            for promise in promises[{complete}:]:
                promise.set_value()
            for thread in threads:
                thread.join(5)
                if thread.is_alive():
                    print("left waiting", file=sys.stderr, flush=True)
                    os._exit(1)
            assert len(seen) == len(set(seen)) == 8
    """)


def test_threads_that_share_an_iteration_end_with_the_last_future() -> None:
    """All sleep when it comes, one of them for it and the others for nothing."""
    promises = [dtorch_ops.TensorPromise() for _ in range(3)]
    futures = [p.get_future() for p in promises]
    iterator = dtorch_ops.as_completed(futures)
    threads = [blocked_in(lambda: list(iterator)) for _ in range(4)]
    assert all(thread.is_alive() for thread in threads)
    for promise in promises:
        promise.set_value(torch.ones(1))
    given = [future for thread in threads for future in thread.finish()]
    assert sorted(map(id, given)) == sorted(map(id, futures))


# ---- Races --------------------------------------------------------------------------------------


def test_groups_made_while_their_members_complete() -> None:
    """Each group completes once, with everything in it, however the threads interleave."""
    rounds, width = 300, 4
    for start_at in range(3):
        sets = [[dtorch_ops.TensorPromise() for _ in range(width)] for _ in range(rounds)]
        futures = [[p.get_future() for p in promises] for promises in sets]
        start = threading.Barrier(3)

        def complete(
            number: int, sets: Any = sets, start: Any = start, skip: int = start_at
        ) -> None:
            start.wait(LIMIT)
            for promises in sets[skip:] + sets[:skip]:
                for i in range(number, width, 2):
                    promises[i].set_value(torch.tensor(i))

        setters = [Worker(lambda n=n, c=complete: c(n)) for n in range(2)]
        start.wait(LIMIT)
        called = [0] * rounds
        for round, members in enumerate(futures):
            all_of = dtorch_ops.collect_all(members)
            any_of = dtorch_ops.collect_any(members)

            def note(_: Any, round: int = round, called: list[int] = called) -> None:
                called[round] += 1

            all_of.add_done_callback(note)
            assert dtorch_ops.wait_all(members, LIMIT * 1000) == [
                torch.tensor(i) for i in range(width)
            ]
            assert all_of.get() == members
            assert any_of.get().item() in range(width)
        for setter in setters:
            setter.finish()
        assert called == [1] * rounds


def test_a_group_of_thousands_completed_by_many_threads() -> None:
    promises = [dtorch_ops.VoidPromise() for _ in range(4000)]
    futures = [p.get_future() for p in promises]
    group = dtorch_ops.collect_all(futures)
    count = itertools.count()
    group.add_done_callback(lambda f: next(count))
    waiters = [blocked_in(group.wait), blocked_in(lambda: dtorch_ops.wait_all(futures))]
    setters = [Worker(lambda n=n: [p.set_value() for p in promises[n::8]]) for n in range(8)]
    for worker in setters + waiters:
        worker.finish()
    assert group.get() == futures
    assert next(count) == 1


# ---- Memory -------------------------------------------------------------------------------------


class _Members:
    def __init__(self) -> None:
        self.promises = [dtorch_ops.TensorPromise() for _ in range(2)]
        self.never, self.other = (p.get_future() for p in self.promises)
        self.ready = ready()
        self.failed = failed(KeyError())
        self.stock = stock()

    def complete(self) -> None:
        for promise in self.promises:
            promise.set_value(torch.ones(1))
        self.stock.set_result(torch.ones(1))


def all_of(*futures: Any) -> Any:
    return dtorch_ops.collect_all(futures)


def any_of(*futures: Any) -> Any:
    return dtorch_ops.collect_any(futures)


# Groups that stay pending.
PENDING_GROUPS: dict[str, Callable[[_Members], Any]] = {
    "all": lambda m: all_of(m.never, m.other),
    "any": lambda m: any_of(m.never, m.other),
    "all_of_one": lambda m: all_of(m.never),
    "any_of_one": lambda m: any_of(m.never),
    "all_of_one_twice": lambda m: all_of(m.never, m.never),
    "any_of_one_twice": lambda m: any_of(m.never, m.never),
    "all_and_ready": lambda m: all_of(m.ready, m.never),
    "all_and_stock": lambda m: all_of(m.stock, m.never),
    "any_and_stock": lambda m: any_of(m.never, m.stock),
    "any_of_any": lambda m: any_of(any_of(m.never, m.other)),
    "any_of_all": lambda m: any_of(all_of(m.never, m.other)),
    "any_of_all_and_ready": lambda m: any_of(all_of(m.never, m.ready), m.other),
    "all_of_any": lambda m: all_of(any_of(m.never, m.other)),
    "all_of_all": lambda m: all_of(all_of(m.never), all_of(m.never, m.other), m.ready),
    "all_of_ready_any": lambda m: all_of(any_of(m.never, m.ready), m.other),
    "three_levels": lambda m: any_of(all_of(any_of(m.never), m.ready), any_of(all_of(m.other))),
}
pending_groups = pytest.mark.parametrize(
    "collect", PENDING_GROUPS.values(), ids=PENDING_GROUPS.keys()
)

LOOPS: dict[str, tuple[int, Callable[[_Members], Any]]] = {
    "any_pending_ready": (100_000, lambda m: any_of(m.never, m.ready)),
    "any_ready_pending": (2000, lambda m: any_of(m.ready, m.never)),
    "any_pending_failed": (2000, lambda m: any_of(m.never, m.failed)),
    "any_operator": (2000, lambda m: ops.collect_any([m.never, m.ready])),
    "all_pending_failed": (2000, lambda m: all_of(m.never, m.failed)),
    "any_of_any_and_ready": (2000, lambda m: any_of(any_of(m.never, m.other), m.ready)),
    "any_of_all_and_ready": (2000, lambda m: any_of(all_of(m.never, m.other), m.ready)),
    "all_of_any_and_failed": (2000, lambda m: all_of(any_of(m.never, m.other), m.failed)),
    "as_completed": (2000, lambda m: next(dtorch_ops.as_completed([m.never, m.ready]))),
    "as_completed_unused": (2000, lambda m: dtorch_ops.as_completed([m.never, m.other])),
    **{name: (2000, collect) for name, collect in PENDING_GROUPS.items()},
}


@pytest.mark.parametrize(("rounds", "collect"), LOOPS.values(), ids=LOOPS.keys())
def test_collecting_on_a_long_pending_member_leaves_nothing(
    rounds: int, collect: Callable[[_Members], Any]
) -> None:
    """One future that stays pending for ever, say a stop signal, beside many that come and go."""
    members = _Members()
    assert_memory_stays_flat(lambda: collect(members), rounds)
    members.complete()


# What is done with a pending group before it is dropped, that leaves nothing either.
def _waited_for(group: Any) -> None:
    with pytest.raises(TimeoutError):
        group.wait(0)
    with pytest.raises(TimeoutError):
        dtorch_ops.wait_all([group], 0)
    with pytest.raises(TimeoutError):
        ops.wait_for(group, 0)


async def _await_and_cancel(group: Any) -> None:
    task = asyncio.ensure_future(group)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


USES: dict[str, Callable[[Any], Any]] = {
    "two_handles": lambda g: dtorch_ops.Future(g),
    "many_handles": lambda g: (dtorch_ops.Future(dtorch_ops.Future(g)), dtorch_ops.Future(g)),
    "waited_for": _waited_for,
    "iterated_over": lambda g: dtorch_ops.as_completed([g]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize("kind", ["all", "any", "all_of_any"])
def test_a_pending_group_that_is_used_and_dropped_leaves_nothing(
    kind: str, use: Callable[[Any], Any]
) -> None:
    members = _Members()
    assert_memory_stays_flat(lambda: use(PENDING_GROUPS[kind](members)), 1000)
    members.complete()


@pytest.mark.parametrize("kind", ["all", "any", "all_of_any"])
def test_a_pending_group_whose_await_was_cancelled_leaves_nothing(kind: str) -> None:
    members = _Members()
    loop = asyncio.new_event_loop()
    assert_memory_stays_flat(
        lambda: loop.run_until_complete(_await_and_cancel(PENDING_GROUPS[kind](members))), 1000
    )
    loop.close()
    members.complete()


def test_waiting_on_a_long_pending_member_leaves_nothing() -> None:
    members = _Members()

    def step() -> None:
        with pytest.raises(KeyError):
            dtorch_ops.wait_all([members.never, members.failed])
        with pytest.raises(TimeoutError):
            dtorch_ops.wait_all([members.never, members.ready], 0)

    assert_memory_stays_flat(step, 1000)


def test_a_settled_group_lets_go_of_its_members() -> None:
    promise, never = pending()
    value = torch.ones(3)
    alive = weakref.ref(value)
    first_promise, first = pending()
    group = dtorch_ops.collect_any([never, first])
    first_promise.set_value(value)
    assert group.get() is value
    del value, first, first_promise, group
    gc.collect()
    assert alive() is None, "the pending member keeps what was collected"
    promise.set_value(torch.ones(1))


# ---- Dropped groups that somebody depends on ----------------------------------------------------

# What depends on a group: from a handle that is then dropped, something that says when it is done.
HOLDS: dict[str, Callable[[Any], Any]] = {
    "another_handle": lambda g: dtorch_ops.Future(g),
    "a_handle_of_another": lambda g: dtorch_ops.Future(dtorch_ops.Future(g)),
    "then": lambda g: g.then(lambda g: 1),
    "then_then": lambda g: g.then(lambda g: 1).then(lambda f: 2),
    "then_of_another_handle": lambda g: dtorch_ops.Future(g).then(lambda g: 1),
    "all": lambda g: all_of(g),
    "any": lambda g: any_of(g),
    "all_of_any": lambda g: all_of(any_of(g)),
    "operator": lambda g: ops.collect_any([g]),
    "operator_all": lambda g: ops.collect_all([g]),
    "torch_collect_all": lambda g: torch.futures.collect_all([g]),
    "torch_then": lambda g: torch._C.Future.then(g, lambda g: 1),
}


@pending_groups
@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS.keys())
def test_a_dropped_group_completes_for_what_was_made_of_it(
    collect: Callable[[_Members], Any], hold: Callable[[Any], Any]
) -> None:
    members = _Members()
    made = hold(collect(members))
    gc.collect()
    assert not made.done()
    members.complete()
    assert made.done()
    made.wait()


@pending_groups
@pytest.mark.parametrize("hang", ["then", "add_done_callback"])
@pytest.mark.parametrize("handles", [1, 2])
def test_a_dropped_group_calls_its_callbacks(
    collect: Callable[[_Members], Any], hang: str, handles: int
) -> None:
    members = _Members()
    called: list[Any] = []
    group = collect(members)
    for _ in range(handles - 1):
        group = dtorch_ops.Future(group)
    getattr(group, hang)(lambda g: called.append(g.is_ready()))
    del group
    gc.collect()
    assert called == []
    members.complete()
    assert called == [True]


@pending_groups
def test_a_dropped_group_wakes_those_who_wait_for_it(collect: Callable[[_Members], Any]) -> None:
    members = _Members()
    waiters = [
        blocked_in(lambda: collect(members).wait()),
        blocked_in(lambda: collect(members).get()),
        blocked_in(lambda: dtorch_ops.Future(collect(members)).wait(60_000)),
        blocked_in(lambda: dtorch_ops.wait_all([collect(members)])),
        blocked_in(lambda: next(dtorch_ops.as_completed([collect(members)])).wait()),
        blocked_in(lambda: asyncio.run(awaited(collect(members)))),
        blocked_in(lambda: asyncio.run(awaited(dtorch_ops.Future(collect(members))))),
        blocked_in(lambda: ops.wait_for(collect(members), 60_000)),
        blocked_in(lambda: ops.wait_all([collect(members)])),
    ]
    gc.collect()
    members.complete()
    for waiter in waiters:
        waiter.finish()


@pytest.mark.parametrize("kind", ["all", "any", "any_of_all", "all_of_any"])
def test_a_group_completes_for_one_handle_after_the_other_was_dropped(kind: str) -> None:
    for first in (True, False):
        members = _Members()
        group = PENDING_GROUPS[kind](members)
        other = dtorch_ops.Future(group)
        if first:
            del group
        else:
            del other
        gc.collect()
        left = other if first else group
        waiter = blocked_in(left.wait)
        members.complete()
        waiter.finish()
        left.get()


def test_a_dropped_group_lets_go_of_what_it_had_collected() -> None:
    promise, never = pending()
    value = torch.ones(3)
    alive = weakref.ref(value)
    first_promise, first = pending()
    group = all_of(first, never)
    first_promise.set_value(value)
    del value, first, first_promise
    assert alive() is not None
    del group
    gc.collect()
    assert alive() is None, "the pending member keeps what was collected"
    promise.set_value(torch.ones(1))


def test_groups_dropped_while_their_members_complete() -> None:
    """By another thread: every second one has another handle, or a callback, and completes."""
    fresh.check(
        """
        sys.setswitchinterval(1e-5)
        count = 3000
        promises = [dtorch_ops.VoidPromise() for _ in range(count)]
        futures = [p.get_future() for p in promises]
        called = []
        start = threading.Barrier(2)
        def complete():
            start.wait()
            for p in promises:
                p.set_value()
        setter = threading.Thread(target=complete)
        setter.start()
        start.wait()
        kept = []
        for i in range(count):
            collect = dtorch_ops.collect_any if i % 3 else dtorch_ops.collect_all
            group = collect([futures[i], futures[-1]])
            if i % 4 == 0:
                kept.append(dtorch_ops.Future(group))
            if i % 4 == 1:
                group.add_done_callback(lambda g: called.append(1))
            if i % 4 == 2:
                kept.append(dtorch_ops.collect_all([group]))
            del group
        setter.join()
        for group in kept:
            group.wait(10000)
        assert len(called) == count // 4, len(called)
        """,
        runs=4,
    )


# ---- Callbacks of groups that block -------------------------------------------------------------


BLOCKING_GROUPS: dict[str, Callable[[Any], Any]] = {
    "all": all_of,
    "any": any_of,
    "all_twice": lambda f: all_of(f, f),
    "any_of_any": lambda f: any_of(any_of(f)),
    "all_of_any": lambda f: all_of(any_of(f), f),
    "any_of_all": lambda f: any_of(all_of(f)),
}


@pytest.mark.parametrize("collect", BLOCKING_GROUPS.values(), ids=BLOCKING_GROUPS.keys())
@pytest.mark.parametrize("hang", ["add_done_callback", "then"])
@pytest.mark.parametrize("blocked_first", [True, False])
@pytest.mark.parametrize("member", ["promise", "then"])
def test_a_callback_of_a_group_that_blocks_stalls_nobody(
    collect: Callable[[Any], Any], hang: str, blocked_first: bool, member: str
) -> None:
    """Not coroutines that await the member, or another future; nor other groups of the member."""
    promise, future = pending()
    if member == "then":
        future = future.then(lambda f: f.value())
    other_promise, other = pending()
    entered, opened = threading.Event(), threading.Event()
    groups: list[Any] = []

    def block(_: Any) -> None:
        entered.set()
        assert opened.wait(60)

    def make_blocked() -> None:
        groups.append(collect(future))
        getattr(groups[-1], hang)(block)

    async def both() -> tuple[Any, Any]:
        return await asyncio.gather(awaited(future), awaited(other))

    if blocked_first:
        make_blocked()
    any_other, all_other = any_of(future), all_of(future, future)
    nested_other = all_of(any_of(future), ready())
    workers = [
        blocked_in(lambda: asyncio.run(both())),
        blocked_in(lambda: asyncio.run(awaited(future))),
        blocked_in(lambda: asyncio.run(awaited(all_other))),
        blocked_in(any_other.wait),
        blocked_in(lambda: dtorch_ops.wait_all([future, any_other, nested_other])),
        blocked_in(lambda: list(dtorch_ops.as_completed([all_other, future]))),
    ]
    if not blocked_first:
        make_blocked()
    setter = Worker(lambda: promise.set_value(torch.tensor(3.0)))
    try:
        assert entered.wait(LIMIT)
        Worker(lambda: other_promise.set_value(torch.tensor(4.0))).finish(LIMIT)
        for worker in workers:
            worker.finish(LIMIT)
        assert any_other.is_ready() and all_other.is_ready() and nested_other.is_ready()
        assert setter.is_alive()
    finally:
        opened.set()
        setter.finish()


@pytest.mark.parametrize("wait", ["wait", "get", "wait_all", "as_completed", "operator"])
@pytest.mark.parametrize("waits_for", ["plain", "with_callback", "member", "chain"])
@pytest.mark.parametrize("first", [True, False])
def test_a_callback_of_a_group_may_wait_for_another_group_of_the_same_member(
    wait: str, waits_for: str, first: bool
) -> None:
    ways: dict[str, Callable[[Any], Any]] = {
        "wait": lambda f: f.wait(LIMIT * 1000),
        "get": lambda f: f.get(),
        "wait_all": lambda f: dtorch_ops.wait_all([f]),
        "as_completed": lambda f: next(dtorch_ops.as_completed([f])),
        "operator": lambda f: ops.wait_for(f, LIMIT * 1000),
    }
    promise, future = pending()
    groups: list[Any] = []
    seen: list[Any] = []

    def make() -> None:
        groups.append(any_of(future))

    if not first:
        make()
    waiting = all_of(future)
    if first:
        make()
    (other,) = groups
    if waits_for == "with_callback":
        other.add_done_callback(lambda f: seen.append("called"))
    elif waits_for == "chain":
        other = other.then(lambda f: f.value())
    elif waits_for == "member":
        other = future

    def callback(_: Any) -> None:
        ways[wait](other)
        seen.append("waited")

    waiting.add_done_callback(callback)
    Worker(lambda: promise.set_value(torch.ones(1))).finish()
    assert sorted(seen) == (["called"] if waits_for == "with_callback" else []) + ["waited"]


def test_callbacks_of_many_groups_of_one_member_wait_for_each_other() -> None:
    """Each for the next one, which was made before or after it."""
    for step in (1, -1):
        promise, future = pending()
        groups = [all_of(future) for _ in range(50)]
        seen: list[int] = []

        def callback(i: int, groups: Any = groups, seen: Any = seen, step: int = step) -> None:
            if 0 <= i + step < len(groups):
                groups[i + step].wait(LIMIT * 1000)
            seen.append(i)

        for i, group in enumerate(groups):
            group.add_done_callback(lambda _, i=i, callback=callback: callback(i))
        Worker(lambda promise=promise: promise.set_value(torch.ones(1))).finish()
        assert sorted(seen) == list(range(50))
