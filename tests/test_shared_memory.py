"""The memory that promises travel through: lent, counted, kept, and given back."""

from __future__ import annotations

import textwrap
from typing import Any

import producers
import pytest
import torch
from forked import check
from peer import Inheritor

import dtorch_ops

# A producer: runs what it is told, on promises that it keeps by name.
_WORKER = """
def worker(link):
    names = {"held": {}, "lent": {}, "load": pickle.loads}
    while True:
        try:
            data = hear(link)
        except (AssertionError, TimeoutError):
            return
        try:
            answer = eval(data.decode(), globals(), names)
        except Exception as error:
            answer = error
        try:
            message = pickle.dumps(answer)
        except Exception:
            message = pickle.dumps(None)
        del answer
        say(link, message)

class Worker:
    def __init__(self):
        self.child = forked(worker)
    def __call__(self, code):
        self.child.say(code.encode())
        answer = pickle.loads(self.child.hear())
        if isinstance(answer, Exception):
            raise answer
        return answer
    def hold(self, name, promise):
        self(f"held.update({name}=load({pickle.dumps(promise)!r}))")
    def stats(self):
        return self("dtorch_ops.stats()")

run = Worker()
zeros = dict.fromkeys(dtorch_ops.stats(), 0)
"""


def check_with_a_worker(code: str, **kwargs: Any) -> None:
    check(_WORKER + textwrap.dedent(code), **kwargs)


# ---- Memory that is lent ------------------------------------------------------------------------


def test_what_was_lent_is_sent_without_a_copy() -> None:
    """Writing to it later shows at the consumer, and the other way round."""
    check_with_a_worker(
        """
        for size in ((1000,), (100, 7), (2_000_000,), (1,) * 20 + (50,)):
            promise, future = pending()
            run.hold("p", promise)
            run(f"lent.update(t=held['p'].empty({size!r}))")
            run("lent['t'].fill_(1.0)")
            run("held.pop('p').set_value(lent['t'])")
            received = value_of(future)
            assert received.shape == size and bool((received == 1).all())
            run("lent['t'].fill_(2.0)")
            assert bool((received == 2).all())
            received.fill_(3.0)
            assert run("bool((lent['t'] == 3).all())")
            run("lent.clear()")
        """
    )


@pytest.mark.parametrize(
    "value",
    [
        "lent['t'][100:]",
        "lent['t'].clone()",
        "lent['t'].reshape(100, 100).t()",
        "torch.full((10_000,), 1.0)",
    ],
    ids=["a view", "a clone", "transposed", "another tensor"],
)
def test_anything_else_is_copied(value: str) -> None:
    check_with_a_worker(
        f"""
        promise, future = pending()
        run.hold("p", promise)
        run("lent.update(t=held['p'].empty(10_000).fill_(1.0))")
        run({"held.pop('p').set_value(" + value + ")"!r})
        run("lent['t'].fill_(2.0)")
        received = value_of(future)
        assert bool((received == 1).all())
        received.fill_(5.0)
        assert run("bool((lent['t'] == 2).all())")
        """
    )


def test_a_reshaped_one_of_all_elements_is_right_whichever_way() -> None:
    check_with_a_worker(
        """
        promise, future = pending()
        run.hold("p", promise)
        run("lent.update(t=held['p'].empty(10_000).fill_(1.0))")
        run("held.pop('p').set_value(lent['t'].view(10, 1000))")
        received = value_of(future)
        assert received.shape == (10, 1000) and bool((received == 1).all())
        """
    )


def test_one_lent_tensor_set_on_two_promises() -> None:
    """The second gets a copy: two consumers' tensors never share memory."""
    check_with_a_worker(
        """
        first, future = pending()
        second, other = pending()
        run.hold("p", first)
        run.hold("q", second)
        run("lent.update(t=held['p'].empty(10_000).fill_(1.0))")
        run("held.pop('p').set_value(lent['t'])")
        run("held.pop('q').set_value(lent['t'])")
        a, b = value_of(future), value_of(other)
        a.fill_(2.0)
        assert bool((b == 1).all())
        run("lent.clear()")
        b.fill_(3.0)
        assert bool((a == 2).all())
        del a, b, future, other, first, second
        assert run.stats()["live_bytes"] == 0
        """
    )


def test_lent_by_one_promise_and_set_on_another() -> None:
    check_with_a_worker(
        """
        first, future = pending()
        second, other = pending()
        run.hold("p", first)
        run.hold("q", second)
        run("lent.update(t=held['p'].empty(10_000).fill_(1.0))")
        run("held.pop('q').set_value(lent['t'])")
        assert bool((value_of(other) == 1).all())
        run("held.clear()")
        broken(future)
        """
    )


def test_lent_and_dropped_unset_costs_nothing() -> None:
    check_with_a_worker(
        """
        promise, future = pending()
        run.hold("p", promise)
        for _ in range(300):
            run("lent.update(t=held['p'].empty(100_000).fill_(1.0))")
        assert 400_000 <= run.stats()["live_bytes"] < 1_000_000
        run("lent.clear()")
        assert run.stats()["live_bytes"] == 0
        assert run.stats()["cached_bytes"] < 2_000_000
        run("held.pop('p').set_value(torch.ones(1))")
        value_of(future)
        """
    )


@pytest.mark.parametrize("first", ["consumer", "lender", "in turns"])
def test_lent_memory_is_used_again_when_both_have_dropped_it(first: str) -> None:
    """Hundreds of rounds in which one or the other keeps some of it for a while."""
    check_with_a_worker(
        f"""
        kept = {{}}
        for round in range(300):
            promise, future = pending()
            run.hold("p", promise)
            name = f"t{{round}}"
            run(f"lent.update({{name}}=held['p'].empty(20_000).fill_({{round}}.0))")
            run(f"held.pop('p').set_value(lent['{{name}}'])")
            kept[round] = value_of(future)
            old = round - 5
            if old < 0:
                continue
            turn = {first!r} if {first!r} != "in turns" else ("consumer", "lender")[old % 2]
            if turn == "lender":
                run(f"lent.pop('t{{old}}') is None")
            else:
                assert run(f"bool((lent['t{{old}}'] == {{old}}).all())")
            gone = kept.pop(old) if turn == "consumer" else kept[old]
            assert bool((gone == old).all())
            del gone
            older = old - 5
            if older >= 0:
                turn = {first!r} if {first!r} != "in turns" else ("consumer", "lender")[older % 2]
                if turn == "consumer":
                    assert run(f"bool((lent.pop('t{{older}}') == {{older}}).all())")
                else:
                    assert bool((kept.pop(older) == older).all())
        assert run.stats()["live_bytes"] <= 12 * 100_000
        kept.clear()
        del future, promise
        run("lent.clear()")
        assert run.stats()["live_bytes"] == 0
        assert run.stats()["cached_bytes"] <= 15 * 100_000
        """
    )


def test_lent_memory_outlives_the_promise_and_the_consumer() -> None:
    check_with_a_worker(
        """
        def consumer(link):
            promise, future = pending()
            say(link, pickle.dumps(promise))
            value_of(future)
        consumer = forked(consumer)
        run(f"held.update(p=load({consumer.hear()!r}))")
        run("lent.update(t=held['p'].empty(100_000).fill_(1.0))")
        run("held.pop('p').set_value(lent['t'])")
        consumer.end()
        run("lent['t'].add_(1.0)")
        assert run("bool((lent.pop('t') == 2).all())")
        promise, future = pending()
        run.hold("p", promise)
        run("held.pop('p').set_value(torch.ones(10_000))")
        value_of(future)
        """
    )


# What promise.empty takes, as torch.empty does.
SIZES: list[tuple[tuple[Any, ...], tuple[int, ...]]] = [
    ((3,), (3,)),
    ((2, 3), (2, 3)),
    (((2, 3),), (2, 3)),
    (([2, 3],), (2, 3)),
    ((torch.Size([4, 5, 6]),), (4, 5, 6)),
    ((0,), (0,)),
    (((),), ()),
    ((), ()),
    ((300, 0, 2), (300, 0, 2)),
    ((1000, 1000), (1000, 1000)),
]
BAD: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = [
    ((-1,), {}, ValueError),
    ((3, -2), {}, ValueError),
    ((1 << 62, 4), {}, (ValueError, RuntimeError)),
    ((1 << 70,), {}, (ValueError, TypeError)),
    ((1.5,), {}, TypeError),
    (("3",), {}, TypeError),
    ((None,), {}, TypeError),
    ((3,), {"dtype": "float32"}, TypeError),
    ((3,), {"dtype": torch.qint8}, ValueError),
]


def shapes_of_lent(promise: producers.Promise) -> list[tuple[Any, ...]]:
    shapes = []
    for size, _ in SIZES:
        lent = promise.empty(*size)
        lent.fill_(1.0)
        shapes.append((tuple(lent.shape), lent.dtype, lent.is_contiguous()))
    for dtype in (torch.int8, torch.complex128, torch.bool, torch.float8_e5m2):
        shapes.append((promise.empty(4, dtype=dtype).dtype, promise.empty(999, dtype=dtype).dtype))
    return shapes


def errors_of_lent(promise: producers.Promise) -> list[str]:
    said = []
    for size, keywords, expected in BAD:
        try:
            promise.empty(*size, **keywords)
            said.append(f"{size} {keywords}: accepted")
        except expected:
            pass
        except Exception as error:
            said.append(f"{size} {keywords}: {type(error).__name__} {error}")
    return said


@pytest.fixture(params=["at home", "elsewhere"])
def call(request: pytest.FixtureRequest) -> Any:
    """A promise that is lent from, by its owner or by another process."""
    if request.param == "at home":
        return lambda function, promise: function(promise)
    return Inheritor().call


def test_sizes_and_dtypes_that_can_be_lent(call: Any) -> None:
    promise = dtorch_ops.TensorPromise()
    shapes = call(shapes_of_lent, promise)
    assert shapes[: len(SIZES)] == [(expected, torch.float32, True) for _, expected in SIZES]
    assert all(a == b for a, b in shapes[len(SIZES) :])


def test_sizes_and_dtypes_that_cannot_be_lent(call: Any) -> None:
    assert call(errors_of_lent, dtorch_ops.TensorPromise()) == []


def test_the_default_dtype_is_torchs() -> None:
    promise = dtorch_ops.TensorPromise()
    torch.set_default_dtype(torch.float64)
    try:
        assert promise.empty(3).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_at_home_the_value_is_the_very_tensor() -> None:
    promise = dtorch_ops.TensorPromise()
    future = promise.get_future()
    lent = promise.empty(1000)
    promise.set_value(lent)
    assert future.get() is lent


def test_a_promise_without_a_value_lends_nothing() -> None:
    assert not hasattr(dtorch_ops.VoidPromise(), "empty")


def test_lent_in_a_scripted_function(call: Any) -> None:
    promise = dtorch_ops.TensorPromise()
    future = promise.get_future()
    call(producers.lend_in_a_script, promise)
    assert torch.equal(future.wait(30_000), torch.full((1000,), 2.0, dtype=torch.float64))


def test_more_than_there_is_room_for() -> None:
    check_with_a_worker(
        """
        promise, future = pending()
        run.hold("p", promise)
        for size in (1 << 33, 1 << 50):
            error = error_of(lambda: run(f"held['p'].empty({size})"))
            assert type(error) is dtorch_ops.DTorchError and "shared memory" in str(error), error
        run("held['p'].set_value(held['p'].empty(3).zero_())")
        assert value_of(future).tolist() == [0.0] * 3
        """
    )


# ---- What is counted ----------------------------------------------------------------------------


def test_each_count_in_a_known_situation() -> None:
    check_with_a_worker(
        """
        stats = dtorch_ops.stats
        assert stats() == zeros and run.stats() == zeros
        unsent, unsent_future = pending()
        assert stats() == zeros
        first, future = pending()
        second, other = pending()
        data = pickle.dumps(first), pickle.dumps(second)
        now = stats()
        assert (now["outstanding"], now["unclaimed"], now["producers"]) == (2, 2, 0)
        assert 0 < now["memory_bytes"] < 1_000_000
        run(f"held.update(p=load({data[0]!r}))")
        now = stats()
        assert (now["outstanding"], now["unclaimed"]) == (2, 1)
        until(lambda: stats()["producers"] == 1)
        now = run.stats()
        assert (now["consumers"], now["held"]) == (1, 1)
        assert (now["live_bytes"], now["cached_bytes"]) == (0, 0)
        assert now["outstanding"] == 0
        run(f"held.update(q=load({data[1]!r}))")
        assert run.stats()["held"] == 2 and stats()["unclaimed"] == 0
        run("held['p'].set_value(torch.ones(250_000))")
        received = value_of(future)
        assert stats()["outstanding"] == 1
        assert stats()["received_bytes"] == 1_000_000
        assert 1_000_000 <= run.stats()["live_bytes"] < 1_400_000
        assert stats()["memory_bytes"] >= 1_000_000
        del received, future, first
        assert stats()["received_bytes"] == 0
        now = run.stats()
        assert now["live_bytes"] == 0 and 1_000_000 <= now["cached_bytes"] < 1_400_000
        run("lent.update(t=held['q'].empty(250_000))")
        assert 1_000_000 <= run.stats()["live_bytes"] < 1_400_000
        assert run.stats()["cached_bytes"] == 0
        run("held['q'].set_value(torch.tensor(1.0))")
        value_of(other)
        assert stats()["outstanding"] == 0
        run("(held.clear(), lent.clear())")
        assert run.stats()["held"] == 0
        os.kill(run.child.pid, signal.SIGKILL)
        run.child.end(-signal.SIGKILL)
        until(lambda: stats()["producers"] == 0)
        until(lambda: stats()["memory_bytes"] < 1_000_000)
        """
    )


@pytest.mark.parametrize("end", ["set", "dropped"])
def test_an_idle_producer_lets_go_of_a_consumer_that_ended(end: str) -> None:
    """So does the child that it has forked; neither of them does anything for it."""
    check_with_a_worker(
        f"""
        def taken(pid):
            with open(f"/proc/{{pid}}/maps") as maps:
                mapped = sum("memfd:dtorch_ops" in line for line in maps)
            return len(os.listdir(f"/proc/{{pid}}/fd")), mapped
        def consumer(link):
            promise, future = pending()
            say(link, pickle.dumps(promise))
            hear(link)
        def producer(link):
            torch.ones(1)
            say(link)
            held = [pickle.loads(hear(link))]
            def heir(link):
                held.clear()
                say(link)
                hear(link)
            child = forked(heir)
            child.hear()
            if {end!r} == "set":
                held[0].set_value(torch.ones(1))
            held.clear()
            say(link, str(child.pid).encode())
            hear(link)
            child.say()
            child.end()
        # Neither of them has to do with this process's own mailbox.
        producer_, consumer_ = forked(producer), forked(consumer)
        producer_.hear()
        before, _ = taken(producer_.pid)
        producer_.say(consumer_.hear())
        pids = producer_.pid, int(producer_.hear())
        assert all(taken(pid)[1] >= 2 for pid in pids), [taken(pid) for pid in pids]
        os.kill(consumer_.pid, signal.SIGKILL)
        consumer_.end(-signal.SIGKILL)
        for pid in pids:
            # The link to the child, or to the parent; the thread's own.
            until(lambda: taken(pid)[0] <= before + 2 and taken(pid)[1] == 0)
        producer_.say()
        producer_.end()
        """
    )


def test_the_end_of_a_consumer_shows_at_its_producers() -> None:
    check_with_a_worker(
        """
        def consumer(link):
            promise, future = pending()
            say(link, pickle.dumps(promise))
            hear(link)
        for _ in range(5):
            consumer_ = forked(consumer)
            run(f"held.update(p=load({consumer_.hear()!r}))")
            consumer_.say()
            consumer_.end()
            error = error_of(lambda: run("held.pop('p').set_value(torch.ones(1))"))
            assert type(error) is dtorch_ops.BrokenPromiseError, repr(error)
            assert "ended" in str(error)
        promise, future = pending()
        run.hold("p", promise)
        assert run.stats()["consumers"] == 1
        """
    )


# ---- Giving back --------------------------------------------------------------------------------


def test_trim_gives_memory_back_to_the_system() -> None:
    check_with_a_worker(
        """
        def send(count):
            promises = [pending() for _ in range(count)]
            for index, (promise, _) in enumerate(promises):
                run.hold(f"p{index}", promise)
                run(f"held.pop('p{index}').set_value(torch.full((1_000_000,), {index}.0))")
            return [value_of(future) for _, future in promises]
        received = send(5)
        full = dtorch_ops.stats()["memory_bytes"]
        assert full > 20_000_000
        kept = received[2]
        del received
        run("dtorch_ops.trim()")
        now = dtorch_ops.stats()["memory_bytes"]
        assert 4_000_000 < now < 8_000_000, now
        assert run.stats()["cached_bytes"] == 0
        assert torch.equal(kept, torch.full((1_000_000,), 2.0))
        received = send(5)  # and all of it can be used again
        assert all(bool((t == i).all()) for i, t in enumerate(received))
        assert dtorch_ops.stats()["memory_bytes"] <= full + 6_000_000
        dtorch_ops.trim()  # of a process that has nothing
        """
    )


def test_the_limit_of_what_is_kept() -> None:
    check_with_a_worker(
        """
        def round(count=4):
            promises = [pending() for _ in range(count)]
            for index, (promise, _) in enumerate(promises):
                run.hold(f"p{index}", promise)
                run(f"held.pop('p{index}').set_value(torch.full((1_000_000,), {index}.0))")
            values = [value_of(future) for _, future in promises]
            assert all(bool((v == i).all()) for i, v in enumerate(values))
        run("dtorch_ops.set_cache_limit(0)")
        round()
        assert run.stats()["cached_bytes"] == 0 and run.stats()["live_bytes"] == 0
        assert dtorch_ops.stats()["memory_bytes"] < 1_000_000
        run("dtorch_ops.set_cache_limit(10_000_000)")
        round()
        assert 4_000_000 <= run.stats()["cached_bytes"] <= 10_000_000
        assert dtorch_ops.stats()["memory_bytes"] <= 11_000_000
        run("dtorch_ops.set_cache_limit(1 << 30)")
        round()
        assert run.stats()["cached_bytes"] >= 16_000_000
        for bad in (-1, -(1 << 70)):
            assert type(error_of(lambda: dtorch_ops.set_cache_limit(bad))) is ValueError
        for bad in (1.5, "1", None):
            assert type(error_of(lambda: dtorch_ops.set_cache_limit(bad))) is TypeError, bad
        """
    )


# ---- Nothing for ever ---------------------------------------------------------------------------

_MEMORY = """
def resident():
    gc.collect()
    with open("/proc/self/statm") as statm:
        fields = statm.read().split()
    return (int(fields[1]) - int(fields[2])) * 4096
"""


@pytest.mark.parametrize("kind", ["TensorPromise", "VoidPromise"])
def test_tokens_that_are_thrown_away_cost_nothing(kind: str) -> None:
    """A hundred thousand of them."""
    check(
        _MEMORY
        + textwrap.dedent(f"""
        def throw_away(count):
            for _ in range(count):
                promise = dtorch_ops.{kind}()
                future = promise.get_future()
                promise.token()
        throw_away(10_000)
        assert dtorch_ops.stats()["outstanding"] == 0
        before, shared = resident(), dtorch_ops.stats()["memory_bytes"]
        throw_away(100_000)
        assert dtorch_ops.stats()["outstanding"] == 0
        assert dtorch_ops.stats()["memory_bytes"] == shared
        assert resident() - before < 800_000, resident() - before  # eight bytes each
        """)
    )


def test_a_future_that_is_dropped_is_told_to_the_producer() -> None:
    check_with_a_worker(
        """
        promise, future = pending()
        run.hold("p", promise)
        del promise, future
        assert dtorch_ops.stats()["outstanding"] == 0
        for call in ("set_value(torch.ones(1))", "set_exception(KeyError())"):
            error = error_of(lambda: run(f"held['p'].{call}"))
            assert isinstance(error, dtorch_ops.DTorchError)
            assert "nobody waits for it any more" in str(error), error
        run("held.clear()")
        assert run.stats()["held"] == 0
        # With a chain on it somebody waits.
        seen = []
        promise, future = pending()
        future.add_done_callback(lambda f: seen.append(f.value().item()))
        run.hold("p", promise)
        del promise, future
        run("held.pop('p').set_value(torch.tensor(4.0))")
        until(lambda: seen == [4.0])
        """
    )


def test_a_value_that_nobody_has_read_goes_with_its_future() -> None:
    """Whether it came before the future was dropped, or while it was."""
    check(
        """
        def worker(link):
            while data := hear(link):
                promise = pickle.loads(data)
                say(link)
                try:
                    promise.set_value(torch.ones(100_000))
                except dtorch_ops.DTorchError as error:
                    assert "nobody waits for it any more" in str(error), error
                del promise
                say(link)
            until(lambda: dtorch_ops.stats()["live_bytes"] == 0)
            say(link, pickle.dumps(dtorch_ops.stats()))
        child = forked(worker)
        for number in range(200):
            promise, future = pending()
            child.say(pickle.dumps(promise))
            del promise
            child.hear()
            if number % 2:
                child.hear()
                until(future.is_ready)
                del future
            else:
                for _ in range(number):
                    pass
                del future
                child.hear()
        child.say(b"")
        there = pickle.loads(child.hear())
        child.end()
        assert there["held"] == 0 and there["cached_bytes"] < 10 * 450_000, there
        here = dtorch_ops.stats()
        assert here["outstanding"] == here["received_bytes"] == 0, here
        """
    )


def test_thousands_of_kept_tensors_under_a_limit_of_descriptors() -> None:
    check_with_a_worker(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        run("__import__('resource').setrlimit(__import__('resource').RLIMIT_NOFILE, (256, 256))")
        def counts():
            with open("/proc/self/maps") as maps:
                return len(os.listdir("/proc/self/fd")), len(maps.readlines())
        def receive(count):
            promises = [pending() for _ in range(count)]
            run(f"held.update(all=load({pickle.dumps([p for p, _ in promises])!r}))")
            run("[p.set_value(torch.full((100,), float(i))) for i, p in enumerate(held.pop('all'))]"
                " and None")
            return [value_of(future) for _, future in promises]
        kept = receive(100)
        descriptors, mappings = counts()
        kept = receive(2000)
        after = counts()
        assert after[0] <= descriptors, (descriptors, after[0])
        assert after[1] <= mappings + 100, (mappings, after[1])
        assert all(t[0].item() == i and t[99].item() == i for i, t in enumerate(kept))
        assert dtorch_ops.stats()["received_bytes"] == 2000 * 400
        """
    )


def test_nothing_has_a_name() -> None:
    check_with_a_worker(
        """
        before = set(os.listdir("/dev/shm"))
        promise, future = pending()
        run.hold("p", promise)
        run("held.pop('p').set_value(torch.ones(100_000))")
        received = value_of(future)
        assert set(os.listdir("/dev/shm")) == before
        links = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                 if os.path.islink(f"/proc/self/fd/{n}")]
        (memory,) = [link for link in links if "dtorch" in link]
        assert memory == "/memfd:dtorch_ops (deleted)"
        """
    )


# ---- Tensors that were received -----------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 31, 33, 1000, 1_000_000])
def test_a_received_tensor_is_like_any_other(size: int) -> None:
    check_with_a_worker(
        f"""
        import io
        promise, future = pending()
        run.hold("p", promise)
        run("held.pop('p').set_value(torch.arange({size}.0))")
        received = value_of(future)
        expected = torch.arange({size}.0)
        assert received.data_ptr() % 64 == 0 and received.is_contiguous()
        received += 1
        expected += 1
        assert torch.equal(received, expected)
        received.requires_grad_()
        (received * 2).sum().backward()
        assert torch.equal(received.grad, torch.full(({size},), 2.0))
        received = received.detach()
        file = io.BytesIO()
        torch.save(received, file)
        file.seek(0)
        assert torch.equal(torch.load(file), expected)
        assert torch.equal(pickle.loads(pickle.dumps(received)), expected)
        assert received.numpy().tolist() == expected.tolist()
        # Passed on, by another promise and by torch's own sharing.
        def other(link):
            pickle.loads(hear(link)).set_value(torch.ones(1))
        passed, passed_future = pending()
        passed.set_value(received)
        assert value_of(passed_future) is received
        def consumer(link):
            mine, its_future = pending()
            say(link, pickle.dumps(mine))
            assert torch.equal(value_of(its_future), expected)
        consumer_ = forked(consumer)
        pickle.loads(consumer_.hear()).set_value(received)
        consumer_.end()
        shared = received.share_memory_()
        assert shared.is_shared() and torch.equal(shared, expected)
        """
    )
