"""``await`` of torch futures: without polling, without threads, in every loop."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
import uvloop
from futures import LIMIT, assert_memory_stays_flat, awaited, pending
from helpers import Worker, check_python

import dtorch_ops

NEW_LOOP: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.fixture(params=NEW_LOOP)
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Awaitable[Any]], Any]]:
    """Runs a coroutine to its end in a new loop of the named kind, with a time limit."""

    def run_in_loop(awaitable: Awaitable[Any]) -> Any:
        loop = NEW_LOOP[request.param]()
        try:
            return loop.run_until_complete(asyncio.wait_for(awaitable, LIMIT))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    yield run_in_loop


def set_from_thread(promise: dtorch_ops.TensorPromise, value: float = 1.0) -> Worker:
    return Worker(lambda: promise.set_value(torch.full((2,), value)))


async def one_turn() -> None:
    """Let everything that is ready run once."""
    await asyncio.sleep(0)


def test_resumes_with_the_value_set_by_another_thread(run: Any) -> None:
    async def main() -> torch.Tensor:
        promise, future = pending()
        task = asyncio.ensure_future(future)
        await one_turn()
        assert not task.done()
        set_from_thread(promise, 3.0).finish()
        return await task

    assert run(main()).tolist() == [3.0, 3.0]


def test_every_torch_future_can_be_awaited(run: Any) -> None:
    async def main() -> None:
        x = torch.ones(2)
        assert await torch.ops.dtorch.get_tensor_async(x) is x
        assert await torch.ops.dtorch.sync(None) is None
        stock: torch.futures.Future[int] = torch.futures.Future()
        waiting = asyncio.ensure_future(stock)
        await one_turn()
        Worker(lambda: stock.set_result(7)).finish()
        assert await waiting == 7
        assert await stock.then(lambda f: f.value() + 1) == 8
        promise, future = pending()
        promise.set_value(x)
        (member,) = await torch.futures.collect_all([future])
        assert member.value() is x
        assert await dtorch_ops.collect_all([future]) == [future]

    run(main())


def test_a_tuple_or_an_exception_as_value_stays_one_value(run: Any) -> None:
    async def main() -> None:
        stock: torch.futures.Future[Any] = torch.futures.Future()
        stock.set_result((1, 2))
        assert await stock == (1, 2)
        assert await pending_then((3, 4)) == (3, 4)

    async def pending_then(value: object) -> object:
        promise, future = pending()
        child = asyncio.ensure_future(future.then(lambda _: value))
        await one_turn()
        set_from_thread(promise).finish()
        return await child

    run(main())


def test_a_complete_future_resumes_in_the_same_step(run: Any) -> None:
    async def main() -> None:
        other_ran = False

        async def other() -> None:
            nonlocal other_ran
            other_ran = True

        task = asyncio.ensure_future(other())
        await dtorch_ops.to_torch_async(torch.ones(1))
        assert not other_ran
        await task

    run(main())


def test_awaiting_again_and_mixing_with_get(run: Any) -> None:
    async def main() -> None:
        promise, future = pending()
        waiting = asyncio.gather(future, future, promise.get_future())
        await one_turn()
        set_from_thread(promise, 2.0).finish()
        assert [t.tolist() for t in await waiting] == [[2.0, 2.0]] * 3
        assert (await future).tolist() == (await future).tolist() == [2.0, 2.0]
        assert future.get().tolist() == [2.0, 2.0]
        assert (await future).tolist() == [2.0, 2.0]
        with pytest.raises(dtorch_ops.FutureAlreadyRetrievedError):
            future.get()

    run(main())


def test_is_awaitable_for_inspect_and_ensure_future() -> None:
    _, future = pending()
    assert inspect.isawaitable(future)
    assert inspect.isawaitable(torch.ops.dtorch.get_tensor_async(torch.ones(1)))


def test_a_failure_is_raised_with_its_type(run: Any) -> None:
    async def main() -> None:
        promise, future = pending()
        waiting = asyncio.ensure_future(future)
        await one_turn()
        promise.set_exception(KeyError("k"))
        for awaitable in (waiting, future, promise.get_future().then(lambda f: f.value())):
            with pytest.raises(KeyError) as raised:
                await awaitable
            assert raised.value.args == ("k",)

    run(main())


def test_a_broken_promise_ends_the_await(run: Any) -> None:
    async def main() -> None:
        promise, future = pending()
        waiting = asyncio.ensure_future(future)
        await one_turn()
        del promise
        with pytest.raises(dtorch_ops.BrokenPromiseError):
            await waiting

    run(main())


def test_stop_iteration_ends_the_await_as_a_runtime_error(run: Any) -> None:
    async def main() -> None:
        promise, future = pending()
        promise.set_exception(StopIteration(3))
        with pytest.raises(RuntimeError) as raised:
            await future
        assert isinstance(raised.value.__cause__, StopIteration)
        assert raised.value.__cause__.value == 3

    run(main())


def test_cancelling_the_task_leaves_the_future_alone(run: Any) -> None:
    async def main() -> None:
        promise, future = pending()
        task = asyncio.ensure_future(future)
        await one_turn()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not future.done()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.01)
        assert not future.done()
        set_from_thread(promise, 5.0).finish()
        assert (await future).tolist() == [5.0, 5.0]

    run(main())


def test_cancelling_between_completion_and_resumption(run: Any) -> None:
    async def main() -> None:
        promise, future = pending()
        kept = asyncio.ensure_future(future)
        dropped = asyncio.ensure_future(future)
        await one_turn()
        set_from_thread(promise).finish()
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        assert (await kept).tolist() == [1.0, 1.0]

    run(main())


@pytest.mark.skipif(not hasattr(asyncio, "TaskGroup"), reason="TaskGroup came with Python 3.11")
def test_in_a_task_group(run: Any) -> None:
    async def fetch(future: dtorch_ops.TensorFuture) -> torch.Tensor:
        return await future

    async def main() -> None:
        pairs = [pending() for _ in range(3)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(fetch(future)) for _, future in pairs]
            for index, (promise, _) in enumerate(pairs):
                set_from_thread(promise, float(index))
        assert [task.result()[0].item() for task in tasks] == [0.0, 1.0, 2.0]

    run(main())


def test_two_loops_in_two_threads_await_one_future() -> None:
    promise, future = pending()
    started = [threading.Event(), threading.Event()]

    async def main(event: threading.Event) -> list[float]:
        waiting = asyncio.ensure_future(future)
        await one_turn()
        event.set()
        return list((await asyncio.wait_for(waiting, LIMIT)).tolist())

    workers = [Worker(lambda event=event: asyncio.run(main(event))) for event in started]
    assert all(event.wait(LIMIT) for event in started)
    promise.set_value(torch.full((2,), 4.0))
    assert [worker.finish() for worker in workers] == [[4.0, 4.0]] * 2


def test_completion_after_the_loop_was_closed_is_no_error() -> None:
    check_python(
        """
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        loop = asyncio.new_event_loop()
        async def wait():
            await future
        task = loop.create_task(wait())
        loop.run_until_complete(asyncio.sleep(0))
        loop._default_executor = None
        loop.close()
        promise.set_value(torch.ones(1))
        assert future.get().item() == 1
        task._log_destroy_pending = False
        """
    )


def test_needs_a_running_loop_only_while_pending() -> None:
    _, future = pending()
    with pytest.raises(dtorch_ops.DTorchError, match="event loop"):
        next(future.__await__())
    done = dtorch_ops.to_torch_async(torch.ones(1))
    with pytest.raises(StopIteration) as stopped:
        next(done.__await__())
    assert stopped.value.value.item() == 1


def test_an_existing_await_is_never_overwritten() -> None:
    check_python(
        """
        import asyncio, torch
        def theirs(self):
            return iter([])
        torch._C.Future.__await__ = theirs
        import dtorch_ops
        assert torch._C.Future.__await__ is theirs
        promise = dtorch_ops.TensorPromise()
        promise.set_value(torch.ones(1))
        async def main():
            return await promise.get_future()
        assert asyncio.run(main()).item() == 1
        """,
        prelude="",
    )


def test_as_completed_gives_futures_in_the_order_of_completion(run: Any) -> None:
    async def main() -> None:
        pairs = [pending() for _ in range(4)]
        pairs[3][0].set_value(torch.ones(1))
        order: list[int] = []
        futures = [future for _, future in pairs]
        async for future in dtorch_ops.as_completed(futures):
            order.append(futures.index(future))
            following = {3: 1, 1: 0, 0: 2}.get(order[-1])
            if following is not None:
                set_from_thread(pairs[following][0]).finish()
        assert order == [3, 1, 0, 2]

    run(main())


def test_as_completed_times_out_and_can_be_left(run: Any) -> None:
    async def main() -> None:
        promise, future = pending()
        with pytest.raises(TimeoutError, match="1 of 1"):
            async for _ in dtorch_ops.as_completed([future], timeout_ms=20):
                pass
        ready = dtorch_ops.to_torch_async(torch.ones(1))
        async for first in dtorch_ops.as_completed([future, ready]):
            assert first is ready
            break
        promise.set_value(torch.ones(1))

    run(main())


@pytest.mark.parametrize("count", [1, 2, 300])
def test_as_completed_without_time_gives_all_that_are_complete(run: Any, count: int) -> None:
    async def main() -> None:
        done = [dtorch_ops.to_torch_async(torch.ones(1)) for _ in range(count)]
        assert [f async for f in dtorch_ops.as_completed(done, timeout_ms=0)] == done
        never_promise, never = pending()
        iterator = dtorch_ops.as_completed([never, *done, never], timeout_ms=0)
        for future in done:
            assert await iterator.__anext__() is future
        with pytest.raises(TimeoutError, match=f"2 of {count + 2} "):
            await iterator.__anext__()
        never_promise.set_value(torch.ones(1))

    run(main())


@pytest.mark.parametrize("count", [1, 2, 300])
def test_as_completed_without_time_gives_what_has_completed_meanwhile(run: Any, count: int) -> None:
    """In another thread, while the loop has not looked."""

    async def main() -> None:
        done = [dtorch_ops.to_torch_async(torch.ones(1)) for _ in range(count)]
        never_promise, never = pending()
        pairs = [pending() for _ in range(count)]
        futures = [future for _, future in pairs]
        given = []
        with pytest.raises(TimeoutError, match=f"1 of {2 * count + 1} "):
            async for future in dtorch_ops.as_completed([never, *futures, *done], timeout_ms=0):
                if not given:
                    Worker(lambda: [p.set_value(torch.ones(1)) for p, _ in pairs]).finish()
                given.append(future)
        assert set(given) == {*futures, *done} and len(given) == 2 * count
        never_promise.set_value(torch.ones(1))

    run(main())


def test_as_completed_goes_on_after_its_time(run: Any) -> None:
    async def main() -> None:
        promise, future = pending()
        done = dtorch_ops.to_torch_async(torch.ones(1))
        iterator = dtorch_ops.as_completed([future, done], timeout_ms=0)
        assert await iterator.__anext__() is done
        for _ in range(2):
            with pytest.raises(TimeoutError, match="1 of 2"):
                await iterator.__anext__()
        waiting = asyncio.ensure_future(future)
        await one_turn()
        set_from_thread(promise).finish()
        await waiting  # the loop has looked
        assert [f async for f in iterator] == [future]
        assert [f async for f in iterator] == []

    run(main())


async def _given(iterator: Any) -> list[Any]:
    return [future async for future in iterator]


@pytest.mark.parametrize("timeout_ms", [None, 1000 * LIMIT])
@pytest.mark.parametrize("complete", [0, 2, 5])
@pytest.mark.parametrize("tasks", [2, 7])
def test_tasks_may_share_an_iteration(
    run: Any, timeout_ms: float | None, complete: int, tasks: int
) -> None:
    """Each future goes to one of them, and none is left waiting."""

    async def main() -> None:
        pairs = [pending() for _ in range(5)]
        futures = [future for _, future in pairs]
        for promise, _ in pairs[:complete]:
            promise.set_value(torch.ones(1))
        iterator = dtorch_ops.as_completed(futures, timeout_ms)
        sharing = [asyncio.ensure_future(_given(iterator)) for _ in range(tasks)]
        await one_turn()
        for promise, _ in pairs[complete:]:
            set_from_thread(promise).finish()
            await one_turn()
        given = [f for some in await asyncio.gather(*sharing) for f in some]
        assert sorted(map(id, given)) == sorted(map(id, futures))

    run(main())


@pytest.mark.parametrize("timeout_ms", [None, 1000 * LIMIT])
@pytest.mark.parametrize("turns", range(5))
def test_a_task_that_is_cancelled_takes_no_future_out_of_an_iteration(
    run: Any, timeout_ms: float | None, turns: int
) -> None:
    """Cancelled so many turns of the loop after the future has completed."""

    async def main() -> None:
        promise, future = pending()
        iterator = dtorch_ops.as_completed([future], timeout_ms)
        task = asyncio.ensure_future(_given(iterator))
        await one_turn()
        await one_turn()
        set_from_thread(promise).finish()
        for _ in range(turns):
            await one_turn()
        task.cancel()
        try:
            given = await task
        except asyncio.CancelledError:
            given = []
        given += await _given(iterator)
        assert given == [future]

    run(main())


def test_one_task_goes_on_with_an_iteration_when_another_is_cancelled(run: Any) -> None:
    async def main() -> None:
        pairs = [pending() for _ in range(3)]
        iterator = dtorch_ops.as_completed([future for _, future in pairs])
        first, second = (asyncio.ensure_future(_given(iterator)) for _ in range(2))
        await one_turn()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        for promise, _ in pairs:
            set_from_thread(promise).finish()
        assert set(await second) == {future for _, future in pairs}

    run(main())


@pytest.mark.parametrize("wait", ["await", "as_completed"])
def test_an_await_works_after_the_loop_has_refused_to_watch(wait: str) -> None:
    class Loop(asyncio.SelectorEventLoop):
        refusals = 2

        def add_reader(self, *arguments: Any) -> None:
            if self.refusals:
                self.refusals -= 1
                raise OSError("too many open files")
            super().add_reader(*arguments)

    async def wait_for(future: Any) -> Any:
        if wait == "await":
            return await future
        async for given in dtorch_ops.as_completed([future]):
            return given.value()

    async def main() -> None:
        promise, future = pending()
        for _ in range(2):
            with pytest.raises(OSError, match="too many open files"):
                await wait_for(future)
        waiting = asyncio.ensure_future(wait_for(future))
        await one_turn()
        set_from_thread(promise, 2.0).finish()
        assert (await waiting).tolist() == [2.0, 2.0]

    loop = Loop()
    loop.run_until_complete(asyncio.wait_for(main(), LIMIT))
    assert loop.refusals == 0
    loop.close()


def test_get_in_a_coroutine_warns_once_and_names_await() -> None:
    out = check_python(
        """
        import warnings
        def fetch():
            promise = dtorch_ops.TensorPromise()
            future = promise.get_future()
            threading.Timer(0.05, promise.set_value, (torch.ones(1),)).start()
            return future
        async def main():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                dtorch_ops.to_torch_async(torch.ones(1)).get()  # blocks nothing
                assert not caught
                fetch().get()
                fetch().get()
            return caught
        (warning,) = asyncio.run(main())
        assert issubclass(warning.category, RuntimeWarning)
        print(warning.message)
        fetch().get()  # no loop, no warning
        """
    )
    assert "await" in out and "event loop" in out


def test_the_loop_goes_on_while_a_coroutine_awaits(run: Any) -> None:
    """A ticker beside the await keeps ticking: nothing blocks the loop until the value is set."""

    async def main() -> int:
        promise, future = pending()
        ticks = 0
        enough = asyncio.Event()

        async def ticker() -> None:
            nonlocal ticks
            while not future.done():
                await asyncio.sleep(0)
                ticks += 1
                if ticks == 1000:
                    enough.set()

        ticking = asyncio.ensure_future(ticker())
        waiting = asyncio.ensure_future(future)
        await enough.wait()
        set_from_thread(promise).finish()
        await waiting
        await ticking
        return ticks

    assert run(main()) >= 1000


@pytest.mark.parametrize("make_loop", NEW_LOOP.values(), ids=NEW_LOOP.keys())
def test_cancelled_awaits_leave_nothing_on_the_future(make_loop: Callable[[], Any]) -> None:
    promise, future = pending()

    async def cancel() -> None:
        task = asyncio.ensure_future(awaited(future))
        await one_turn()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    loop = make_loop()
    assert_memory_stays_flat(lambda: loop.run_until_complete(cancel()), 2000)
    loop.close()
    promise.set_value(torch.ones(1))


@pytest.mark.parametrize("make_loop", NEW_LOOP.values(), ids=NEW_LOOP.keys())
def test_an_asynchronous_iteration_that_stops_early_leaves_nothing(
    make_loop: Callable[[], Any],
) -> None:
    (promise, never), ready = pending(), dtorch_ops.to_torch_async(torch.ones(1))

    async def iterate() -> None:
        async for future in dtorch_ops.as_completed([never, ready]):
            assert future is ready
            break
        with pytest.raises(TimeoutError):
            await _given(dtorch_ops.as_completed([never], timeout_ms=0))

    loop = make_loop()
    assert_memory_stays_flat(lambda: loop.run_until_complete(iterate()), 1000)
    loop.close()
    promise.set_value(torch.ones(1))


def test_a_loop_is_not_kept_alive() -> None:
    loop = asyncio.new_event_loop()
    promise, future = pending()

    async def main() -> None:
        waiting = asyncio.ensure_future(future)
        await one_turn()
        set_from_thread(promise).finish()
        await waiting

    loop.run_until_complete(main())
    loop.close()
    gone = weakref.ref(loop)
    del loop
    # The queue of the last loop is cached: another loop takes its place.
    other = asyncio.new_event_loop()
    other_promise, other_future = pending()
    threading.Timer(0.01, other_promise.set_value, (torch.ones(1),)).start()
    other.run_until_complete(asyncio.ensure_future(other_future, loop=other))
    other.close()
    gc.collect()
    assert gone() is None


def test_stress_of_loops_threads_and_cancellation() -> None:
    """Coroutines of two loops await shared futures, are cancelled now and then, see every value."""

    async def client(futures: list[dtorch_ops.TensorFuture], seed: int) -> int:
        generator = torch.Generator().manual_seed(seed)
        got = 0
        for index, future in enumerate(futures):
            task = asyncio.ensure_future(future)
            await one_turn()
            if torch.rand((), generator=generator).item() < 0.3:
                task.cancel()
                await asyncio.wait([task])
            value = await future
            assert value.item() == index
            got += 1
        return got

    count = 300
    pairs = [pending() for _ in range(count)]
    futures = [future for _, future in pairs]

    async def clients(seed: int) -> list[int]:
        tasks = [client(futures, seed * 10 + i) for i in range(10)]
        return list(await asyncio.wait_for(asyncio.gather(*tasks), LIMIT))

    workers = [Worker(lambda seed=seed: asyncio.run(clients(seed))) for seed in range(2)]
    for index, (promise, _) in enumerate(pairs):
        promise.set_value(torch.tensor(float(index)))
    for worker in workers:
        assert worker.finish(LIMIT) == [count] * 10


def test_no_warning_is_left_behind() -> None:
    """A whole life of a future in a loop, with warnings as errors and in debug mode."""

    async def main() -> None:
        promise, future = pending()
        waiting = asyncio.ensure_future(future)
        await one_turn()
        set_from_thread(promise).finish()
        await waiting

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(asyncio.wait_for(main(), LIMIT), debug=True)
