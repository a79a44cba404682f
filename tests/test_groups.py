"""collect_all, collect_any, wait_all and as_completed, of ours and of torch's futures together."""

from __future__ import annotations

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


def test_two_threads_may_share_an_iteration() -> None:
    """Each future goes to one of them, and neither is left waiting."""
    fresh.check("""
        for _ in range(100):
            promises = [dtorch_ops.VoidPromise() for _ in range(8)]
            iterator = dtorch_ops.as_completed([p.get_future() for p in promises])
            seen = []
            def consume():
                for future in iterator:
                    seen.append(future)
            threads = [threading.Thread(target=consume, daemon=True) for _ in range(2)]
            for thread in threads:
                thread.start()
            for promise in promises:
                promise.set_value()
            for thread in threads:
                thread.join(5)
                if thread.is_alive():
                    print("left waiting", file=sys.stderr, flush=True)
                    os._exit(1)
            assert len(seen) == len(set(seen)) == 8
    """)


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
        for members in futures:
            all_of = dtorch_ops.collect_all(members)
            any_of = dtorch_ops.collect_any(members)
            called: list[int] = []
            all_of.add_done_callback(lambda f, called=called: called.append(1))
            assert dtorch_ops.wait_all(members, LIMIT * 1000) == [
                torch.tensor(i) for i in range(width)
            ]
            assert all_of.get() == members
            assert any_of.get().item() in range(width)
            assert called in ([1], []) and all_of.is_ready()
        for setter in setters:
            setter.finish()


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


LOOPS: dict[str, tuple[int, Callable[[_Members], Any]]] = {
    "any_pending_ready": (100_000, lambda m: dtorch_ops.collect_any([m.never, m.ready])),
    "any_ready_pending": (2000, lambda m: dtorch_ops.collect_any([m.ready, m.never])),
    "any_pending_failed": (2000, lambda m: dtorch_ops.collect_any([m.never, m.failed])),
    "any_operator": (2000, lambda m: ops.collect_any([m.never, m.ready])),
    "all_pending_failed": (2000, lambda m: dtorch_ops.collect_all([m.never, m.failed])),
    "as_completed": (2000, lambda m: next(dtorch_ops.as_completed([m.never, m.ready]))),
    "as_completed_unused": (2000, lambda m: dtorch_ops.as_completed([m.never, m.other])),
}


@pytest.mark.parametrize(("rounds", "collect"), LOOPS.values(), ids=LOOPS.keys())
def test_collecting_on_a_long_pending_member_leaves_nothing(
    rounds: int, collect: Callable[[_Members], Any]
) -> None:
    """One future that stays pending for ever, say a stop signal, beside many that come and go.

    A group that is still pending stays until its members complete or go: callbacks may hang on it.
    """
    members = _Members()
    assert_memory_stays_flat(lambda: collect(members), rounds)
    for promise in members.promises:
        promise.set_value(torch.ones(1))


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
