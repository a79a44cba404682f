"""Futures of other engines as ours, and ours as those of ``concurrent.futures``."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import fresh
import pytest
import torch
import torch.distributed as dist
import uvloop
from futures import LIMIT, READ_ONLY, assert_memory_stays_flat, blocked_in, failed, pending
from helpers import Worker, run_python
from on_accelerator import DEVICE, DEVICES, assert_pending, drain, held, on_accelerator, our_threads

import dtorch_ops
from dtorch_ops import BrokenPromiseError, DTorchError, TensorFuture, TreeFuture, VoidFuture

LIMIT_MS = LIMIT * 1000
CancelledError = concurrent.futures.CancelledError


class OfTheSource(ValueError):
    """An error that nobody else raises."""


# ---- Sources of every kind ----------------------------------------------------------------------


class LoopInThread:
    """An event loop that runs in a thread of its own."""

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.loop = new_loop()
        self.loop.set_debug(True)  # refuses much of what another thread must not do
        self._thread = Worker(self.loop.run_forever)
        self.ident = self.call(threading.get_ident)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of ``function``, called in the thread of the loop."""

        async def called() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(LIMIT)

    def turn(self) -> None:
        """Returns when the loop has done all that it had to do before the call."""
        self.call(lambda: None)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.finish()
        self.loop.close()


@contextmanager
def loop_in_thread(kind: str = "asyncio") -> Iterator[LoopInThread]:
    new = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}[kind]
    loop = LoopInThread(new)
    try:
        yield loop
    finally:
        loop.close()


@dataclass
class Source:
    """A pending future of another engine, and what completes it."""

    future: Any
    set_result: Callable[[Any], None]
    set_exception: Callable[[BaseException], None]
    cancel: Callable[[], object] | None = None


@contextmanager
def concurrent_source() -> Iterator[Source]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    yield Source(future, future.set_result, future.set_exception, future.cancel)


@contextmanager
def torch_source() -> Iterator[Source]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    yield Source(future, future.set_result, future.set_exception)


@contextmanager
def asyncio_source(kind: str = "asyncio") -> Iterator[Source]:
    with loop_in_thread(kind) as loop:
        future = loop.loop.create_future()

        def caller(method: Callable[..., Any]) -> Callable[..., None]:
            def call(*args: Any) -> None:
                loop.call(method, *args)
                loop.turn()  # callbacks are called in the next one

            return call

        yield Source(
            future, caller(future.set_result), caller(future.set_exception), caller(future.cancel)
        )


@contextmanager
def task_source() -> Iterator[Source]:
    with asyncio_source() as inner:

        async def wait() -> Any:
            return await inner.future

        made: list[asyncio.Task[Any]] = []
        loop = inner.future.get_loop()
        begun = threading.Event()

        def make() -> None:
            made.append(loop.create_task(wait()))
            begun.set()

        loop.call_soon_threadsafe(make)
        assert begun.wait(LIMIT)

        def caller(call: Callable[..., Any]) -> Callable[..., None]:
            def until_done(*args: Any) -> None:
                call(*args)
                asyncio.run_coroutine_threadsafe(asyncio.wait(made), loop).result(LIMIT)

            return until_done

        yield Source(
            made[0],
            caller(inner.set_result),
            caller(inner.set_exception),
            caller(lambda: loop.call_soon_threadsafe(made[0].cancel)),
        )


SOURCES: dict[str, Callable[[], Any]] = {
    "concurrent": concurrent_source,
    "torch": torch_source,
    "asyncio": asyncio_source,
    "uvloop": lambda: asyncio_source("uvloop"),
    "task": task_source,
}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    with SOURCES[request.param]() as made:
        yield made


# ---- Outcomes -----------------------------------------------------------------------------------


def test_a_tensor_arrives_as_the_object_it_is(source: Source) -> None:
    future = dtorch_ops.from_future(source.future)
    assert type(future) is TensorFuture
    assert not future.is_ready()
    tensor = torch.ones(2, requires_grad=True)
    source.set_result(tensor)
    assert future.wait(LIMIT_MS) is tensor
    for name, read in READ_ONLY.items():
        assert read(future) is tensor, name
    assert future.get() is tensor


def test_an_error_arrives_with_its_type(source: Source) -> None:
    future = dtorch_ops.from_future(source.future)
    error = OfTheSource("of the source", 7)
    source.set_exception(error)
    with pytest.raises(OfTheSource) as raised:
        future.wait(LIMIT_MS)
    assert raised.value.args == error.args
    assert raised.value is not error


def test_the_error_of_a_source_is_not_touched() -> None:
    """Others read it too: raising it here would add to its traceback."""
    with concurrent_source() as source:
        future = dtorch_ops.from_future(source.future)
        error = OfTheSource()
        source.set_exception(error)
        with pytest.raises(OfTheSource):
            future.get()
    assert error.__traceback__ is None and error.__cause__ is None


def test_no_kind_of_error_is_too_much() -> None:
    """An executor passes on whatever its function raises."""
    for error in (KeyboardInterrupt(), SystemExit(3), StopIteration(4), GeneratorExit()):
        with concurrent_source() as source:
            future = dtorch_ops.from_future(source.future)
            source.set_exception(error)
            with pytest.raises(type(error)):
                future.wait(0)


@pytest.mark.parametrize("kind", [TensorFuture, VoidFuture, dtorch_ops.Future])
@pytest.mark.parametrize("source", [name for name in SOURCES if name != "torch"], indirect=True)
def test_a_cancelled_source_is_a_cancelled_future(source: Source, kind: Any) -> None:
    assert source.cancel
    future = dtorch_ops.from_future(source.future, kind)
    source.cancel()
    with pytest.raises(CancelledError):
        future.wait(LIMIT_MS)


def test_awaiting_a_future_of_a_cancelled_source_cancels_nobody() -> None:
    """As asyncio's own error would: it means that the awaiting task is to end."""

    async def main() -> str:
        source = asyncio.get_running_loop().create_future()
        future = dtorch_ops.from_future(source)
        source.cancel()
        try:
            await future
        except CancelledError:
            return "went on"
        return "no error"

    assert asyncio.run(main()) == "went on"


def test_where_ours_are_expected_an_error_leads_here() -> None:
    with concurrent_source() as source, pytest.raises(TypeError, match=r"dtorch_ops\.from_future"):
        dtorch_ops.wait_all([source.future])


def test_an_error_that_means_cancelled_does_so_too() -> None:
    with concurrent_source() as source:
        future = dtorch_ops.from_future(source.future)
        source.set_exception(asyncio.CancelledError())
        with pytest.raises(CancelledError):
            future.get()


# ---- Kinds --------------------------------------------------------------------------------------

VALUES = {
    "none": None,
    "number": 3,
    "tree": {"loss": torch.ones(1), "steps": 3},
    "tensors": [torch.ones(1)],
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_what_is_no_tensor_is_an_error_that_says_what_to_do(source: Source, value: Any) -> None:
    future = dtorch_ops.from_future(source.future)
    source.set_result(value)
    with pytest.raises(TypeError) as raised:
        future.wait(LIMIT_MS)
    said = str(raised.value)
    assert f"got {type(value).__name__}" in said
    assert "kind=dtorch_ops.Future" in said and "dtorch_ops.VoidFuture" in said


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_void_future_is_of_completion_alone(source: Source, value: Any) -> None:
    future = dtorch_ops.from_future(source.future, VoidFuture)
    assert type(future) is VoidFuture
    assert not future.is_ready()
    source.set_result(value)
    assert future.wait(LIMIT_MS) is None
    assert torch.ops.dtorch.wait_for(future, 0) is None


@pytest.mark.parametrize("value", [*VALUES.values(), torch.ones(1)], ids=[*VALUES, "tensor"])
def test_a_future_takes_any_value_as_it_is(source: Source, value: Any) -> None:
    future = dtorch_ops.from_future(source.future, dtorch_ops.Future)
    assert type(future) is dtorch_ops.Future
    assert not future.is_ready()
    source.set_result(value)
    assert future.wait(LIMIT_MS) is value
    assert future.then(lambda f: [f.value()]).get()[0] is value
    assert future.get() is value


def test_an_exception_as_a_value_counts_as_raised() -> None:
    """As torch's own futures have it, which keep their errors so."""
    with concurrent_source() as source:
        future = dtorch_ops.from_future(source.future, dtorch_ops.Future)
        source.set_result(OfTheSource())
        with pytest.raises(OfTheSource):
            future.get()


@pytest.mark.parametrize("kind", [TensorFuture, VoidFuture, dtorch_ops.Future])
def test_every_kind_passes_errors_on(source: Source, kind: Any) -> None:
    future = dtorch_ops.from_future(source.future, kind)
    source.set_exception(OfTheSource("of the source"))
    with pytest.raises(OfTheSource, match="of the source"):
        future.wait(LIMIT_MS)


@pytest.mark.parametrize("kind", [TensorFuture, VoidFuture, dtorch_ops.Future])
def test_of_a_source_that_is_done_the_future_is_complete(source: Source, kind: Any) -> None:
    tensor = torch.ones(1)
    source.set_result(tensor)
    future = dtorch_ops.from_future(source.future, kind)
    assert future.is_ready()
    assert future.value() is (None if kind is VoidFuture else tensor)


def test_our_own_futures_keep_their_class() -> None:
    promise, future = pending()
    for ours in (
        future,
        dtorch_ops.VoidPromise().get_future(),
        dtorch_ops.to_torch_async([torch.ones(1)]),
        future.then(lambda f: 3),
    ):
        made = dtorch_ops.from_future(ours)
        assert type(made) is type(ours) and made is not ours
    another = dtorch_ops.from_future(future)
    promise.set_value(torch.ones(2))
    assert another.get() is future.get()
    assert dtorch_ops.from_future(future, VoidFuture).get() is None
    assert dtorch_ops.from_future(future, dtorch_ops.Future).get() is future.value()
    tree = dtorch_ops.to_torch_async({"a": torch.ones(1)})
    assert list(dtorch_ops.from_future(tree, TreeFuture).get()) == ["a"]
    assert list(dtorch_ops.from_future(tree, dtorch_ops.Future).get()) == ["a"]


@pytest.mark.parametrize("kind", [TreeFuture, int, "TensorFuture", torch.futures.Future, 3])
def test_another_kind_is_refused_by_name(kind: Any) -> None:
    with concurrent_source() as source, pytest.raises(TypeError, match="kind: expected") as raised:
        dtorch_ops.from_future(source.future, kind)
    assert (kind.__name__ if isinstance(kind, type) else repr(kind)) in str(raised.value)


async def _coroutine() -> None:
    pass


def test_another_source_is_refused_by_name() -> None:
    coroutine = _coroutine()
    for source in (3, None, torch.ones(1), coroutine, concurrent.futures.Future):
        with pytest.raises(TypeError, match="source: expected") as raised:
            dtorch_ops.from_future(source)  # type: ignore[call-overload]
        assert f"got {type(source).__name__}" in str(raised.value)
    coroutine.close()


# ---- Neither blocking nor polling ---------------------------------------------------------------


def test_work_of_an_executor_that_is_held() -> None:
    gate = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        source = pool.submit(lambda: gate.wait(LIMIT) and torch.ones(1))
        future = dtorch_ops.from_future(source)
        assert not future.is_ready()
        waiting = blocked_in(future.get)
        gate.set()
        assert waiting.finish() is source.result()


def test_no_thread_is_made() -> None:
    with loop_in_thread() as loop:
        dtorch_ops.from_future(loop.loop.create_future())
        before = threading.active_count(), our_threads()
        sources = [loop.loop.create_future() for _ in range(50)]
        sources += [concurrent.futures.Future() for _ in range(50)]  # type: ignore[misc]
        sources += [torch.futures.Future() for _ in range(50)]  # type: ignore[misc]
        futures = [dtorch_ops.from_future(source) for source in sources]
        loop.turn()
        assert (threading.active_count(), our_threads()) == before
        assert not any(future.is_ready() for future in futures)


def test_callbacks_run_in_the_thread_that_completes_the_source() -> None:
    with concurrent_source() as source:
        ran: list[int] = []
        future = dtorch_ops.from_future(source.future)
        future.add_done_callback(lambda f: ran.append(threading.get_ident()))
        worker = Worker(lambda: source.set_result(torch.ones(1)))
        worker.finish()
        assert ran == [worker.ident]


# ---- asyncio ------------------------------------------------------------------------------------


class Watched(asyncio.Future[Any]):
    """Notes the thread in which callbacks are added."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.added_in: list[int] = []

    def add_done_callback(self, *args: Any, **kwargs: Any) -> None:
        self.added_in.append(threading.get_ident())
        super().add_done_callback(*args, **kwargs)


def test_another_thread_leaves_the_loops_future_to_the_loop() -> None:
    with loop_in_thread() as loop:
        source = Watched(loop=loop.loop)
        future = dtorch_ops.from_future(source)
        loop.turn()
        assert source.added_in == [loop.ident]
        loop.call(source.set_result, torch.ones(1))
        assert future.wait(LIMIT_MS) is source.result()


def test_the_thread_of_the_loop_adds_the_callback_at_once() -> None:
    with loop_in_thread() as loop:
        source = Watched(loop=loop.loop)

        def make() -> TensorFuture:
            future = dtorch_ops.from_future(source)
            assert source.added_in == [loop.ident]
            return future

        future = loop.call(make)
        loop.call(source.set_result, torch.ones(1))
        assert future.wait(LIMIT_MS) is source.result()


def test_a_coroutine_of_another_loop() -> None:
    """It runs in a loop, but not in that of the source."""
    with loop_in_thread() as loop:
        source = Watched(loop=loop.loop)

        async def main() -> torch.Tensor:
            future = dtorch_ops.from_future(source)
            loop.turn()
            assert source.added_in == [loop.ident]
            loop.call(source.set_result, torch.ones(1))
            return await future

        assert asyncio.run(asyncio.wait_for(main(), LIMIT)) is source.result()


def test_a_future_that_is_made_before_its_loop_runs() -> None:
    loop = asyncio.new_event_loop()
    source = loop.create_future()
    future = dtorch_ops.from_future(source)

    async def main() -> torch.Tensor:
        source.set_result(torch.ones(1))
        return await future

    assert loop.run_until_complete(asyncio.wait_for(main(), LIMIT)) is source.result()
    loop.close()


def test_a_task_that_nobody_holds_runs_to_its_end() -> None:
    async def work() -> torch.Tensor:
        await asyncio.sleep(0)
        gc.collect()
        await asyncio.sleep(0.001)
        gc.collect()
        return torch.ones(1)

    async def main() -> torch.Tensor:
        return await dtorch_ops.from_future(asyncio.create_task(work()))

    assert asyncio.run(asyncio.wait_for(main(), LIMIT)).tolist() == [1]


def test_sources_of_a_closed_loop() -> None:
    loop = asyncio.new_event_loop()
    done, never, watched = loop.create_future(), loop.create_future(), loop.create_future()
    done.set_result(torch.ones(1))
    future = dtorch_ops.from_future(watched)  # whose callback the loop never comes to add
    loop.close()
    assert dtorch_ops.from_future(done).value() is done.result()
    with pytest.raises(DTorchError, match="closed loop"):
        dtorch_ops.from_future(never)
    with pytest.raises(BrokenPromiseError):
        future.wait(0)


# ---- Lifetimes ----------------------------------------------------------------------------------

DROPPED: dict[str, Callable[[], Any]] = {
    "concurrent": concurrent.futures.Future,
    "torch": torch.futures.Future,
    "asyncio": lambda: asyncio.get_running_loop().create_future(),
}
KINDS = [TensorFuture, VoidFuture, dtorch_ops.Future]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", DROPPED.values(), ids=DROPPED)
def test_a_source_that_is_gone_breaks_the_future(make: Any, kind: Any) -> None:
    async def main() -> None:
        source = make()
        future = dtorch_ops.from_future(source, kind)
        assert not future.is_ready()
        del source
        gc.collect()
        with pytest.raises(BrokenPromiseError):
            future.wait(0)

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", DROPPED.values(), ids=DROPPED)
def test_a_future_that_is_gone_leaves_its_source_alone(make: Any, kind: Any) -> None:
    async def main() -> None:
        source = make()
        dtorch_ops.from_future(source, kind)
        gc.collect()
        source.set_result(torch.ones(1))
        await asyncio.sleep(0)

    asyncio.run(main())


def test_a_future_does_not_hold_its_source() -> None:
    source: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future = dtorch_ops.from_future(source)
    gone = weakref.ref(source)
    source.set_result(torch.ones(1))
    del source
    assert gone() is None
    assert future.get().tolist() == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_behind(kind: Any) -> None:
    value = torch.ones(1)

    def completed() -> None:
        for source in (concurrent.futures.Future[Any](), torch.futures.Future[Any]()):
            future = dtorch_ops.from_future(source, kind)
            source.set_result(value)
            future.as_concurrent().result(0)

    def dropped() -> None:
        for make in (concurrent.futures.Future, torch.futures.Future):
            future = dtorch_ops.from_future(make(), kind)
            future.as_concurrent()
        _promise, ours = pending()
        ours.as_concurrent().cancel()
        dtorch_ops.from_future(ours, VoidFuture)

    def refused() -> None:
        source: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future = dtorch_ops.from_future(source, kind)
        source.set_exception(OfTheSource())
        assert isinstance(future.as_concurrent().exception(0), OfTheSource)

    for step in (completed, dropped, refused):
        assert_memory_stays_flat(step, 500)


def test_an_exit_with_sources_that_are_pending() -> None:
    fresh.check(
        """
        import concurrent.futures, torch.distributed as dist
        from datetime import timedelta
        groups, store = [None, None], dist.HashStore()
        def join(rank):
            groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        joining = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        for thread in joining:
            thread.start()
        for thread in joining:
            thread.join()
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        gate = threading.Event()
        running = concurrent.futures.Future()
        value = torch.ones(1)  # made here: torch's own functions in a thread may abort the exit
        def work():
            gate.wait()
            running.set_result(value)
        threading.Thread(target=work, daemon=True).start()
        sources = [
            loop.create_future(),
            asyncio.run_coroutine_threadsafe(asyncio.sleep(60), loop),
            torch.futures.Future(),
            concurrent.futures.Future(),
            running,
            groups[0].allreduce([value]),
        ]
        kinds = dtorch_ops.TensorFuture, dtorch_ops.VoidFuture, dtorch_ops.Future
        futures = [dtorch_ops.from_future(s, kind) for s in sources for kind in kinds]
        followers = [future.as_concurrent() for future in futures]
        gate.set()
        """,
        runs=10,
    )


def test_a_child_is_told_that_a_future_is_its_parents_and_does_not_break_it() -> None:
    fresh.check(
        """
        import concurrent.futures, logging
        source = concurrent.futures.Future()
        futures = [
            dtorch_ops.from_future(source, kind)
            for kind in (dtorch_ops.TensorFuture, dtorch_ops.VoidFuture, dtorch_ops.Future)
        ]
        def assert_refused():
            for future in futures:
                try:
                    future.wait(20_000)
                except dtorch_ops.DTorchError:
                    continue
                os._exit(1)
        pid = os.fork()
        if pid == 0:
            assert_refused()
            logging.disable()  # it tells of callbacks that raise
            source.set_result(torch.ones(1))
            assert_refused()
            del source, futures
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert not any(future.is_ready() for future in futures)
        source.set_result(torch.ones(1))
        assert [f is not None for f in dtorch_ops.wait_all(futures, 0)] == [True, False, True]
        """
    )


# ---- torch.distributed --------------------------------------------------------------------------


@contextmanager
def two_ranks(seconds: float = LIMIT) -> Iterator[list[dist.ProcessGroupGloo]]:
    """Both ends of a group, in this process: a collective of one waits for that of the other."""
    store = dist.HashStore()

    def make(rank: int) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=seconds))

    workers = [Worker(lambda rank=rank: make(rank)) for rank in range(2)]  # type: ignore[misc]
    groups: list[Any] = [worker.finish() for worker in workers]
    workers.clear()
    yield groups
    groups.clear()


def test_a_work_is_a_void_future_complete_when_it_is_done() -> None:
    with two_ranks() as groups:
        tensors = [torch.ones(2), torch.ones(2) * 2]
        future = dtorch_ops.from_future(groups[0].allreduce([tensors[0]]))
        assert type(future) is VoidFuture
        assert not future.is_ready()
        groups[1].allreduce([tensors[1]]).wait()
        assert future.wait(LIMIT_MS) is None
        assert tensors[0].tolist() == [3, 3]


def test_a_work_gives_its_only_tensor_to_whom_asks_for_it() -> None:
    with two_ranks() as groups:
        tensors = [torch.ones(2), torch.ones(2) * 2]
        works = [g.allreduce([t]) for g, t in zip(groups, tensors, strict=True)]
        future = dtorch_ops.from_future(works[0], TensorFuture)
        assert type(future) is TensorFuture
        assert future.wait(LIMIT_MS).tolist() == [3, 3]
        assert future.value().data_ptr() == tensors[0].data_ptr()
        assert torch.ops.dtorch.wait_for(future, 0).tolist() == [3, 3]
        (only,) = dtorch_ops.from_future(works[1], dtorch_ops.Future).wait(LIMIT_MS)
        assert only.data_ptr() == tensors[1].data_ptr()
        barriers = [dtorch_ops.from_future(g.barrier()) for g in groups]
        assert dtorch_ops.wait_all(barriers, LIMIT_MS) == [None, None]
        works = [g.barrier() for g in groups]
        for work in works:
            with pytest.raises(TypeError, match="expected a tensor as the value, got list"):
                dtorch_ops.from_future(work, TensorFuture).wait(LIMIT_MS)


def test_the_error_of_a_work_arrives() -> None:
    with two_ranks(seconds=0.05) as groups:
        future = dtorch_ops.from_future(groups[0].allreduce([torch.ones(2)]))
        with pytest.raises(RuntimeError) as raised:
            future.wait(LIMIT_MS)
        assert not isinstance(raised.value, DTorchError)


def test_a_work_without_a_future_is_refused_and_a_thread_can_wait_for_it() -> None:
    with two_ranks() as groups, concurrent.futures.ThreadPoolExecutor(1) as pool:
        received = torch.zeros(2)
        work = groups[0].recv([received], 1, 0)
        with pytest.raises(NotImplementedError, match=r"executor\.submit\(work\.wait\)"):
            dtorch_ops.from_future(work)
        future = dtorch_ops.from_future(pool.submit(work.wait), VoidFuture)
        sent = groups[1].send([torch.ones(2)], 0, 0)
        future.wait(LIMIT_MS)
        assert received.tolist() == [1, 1]
        sent.wait()


def test_a_work_that_is_written_in_python() -> None:
    class Mine(dist.Work):
        def __init__(self) -> None:
            super().__init__()
            self.future: torch.futures.Future[Any] = torch.futures.Future()

        def get_future(self) -> torch.futures.Future[Any]:
            return self.future

    work = Mine()
    future = dtorch_ops.from_future(work)
    assert type(future) is VoidFuture and not future.is_ready()
    work.future.set_result(None)
    assert future.wait(0) is None


def test_collectives_of_the_default_group() -> None:
    """As users call them: of a group of one process."""
    fresh.check(
        """
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        x = torch.ones(2)
        future = dtorch_ops.from_future(dist.all_reduce(x, async_op=True))
        assert type(future) is dtorch_ops.VoidFuture and future.wait(20_000) is None
        work = dist.broadcast(x, 0, async_op=True)
        assert dtorch_ops.from_future(work, dtorch_ops.TensorFuture).wait(20_000).tolist() == [1, 1]
        async def main():
            await dtorch_ops.from_future(dist.barrier(async_op=True))
        asyncio.run(main())
        dist.destroy_process_group()
        """,
        timeout=60,
    )


# ---- Ray ----------------------------------------------------------------------------------------


def test_nothing_imports_ray() -> None:
    fresh.check(
        """
        import concurrent.futures
        dtorch_ops.from_future(concurrent.futures.Future())
        try:
            dtorch_ops.from_future(3)
        except TypeError:
            pass
        assert "ray" not in sys.modules
        """
    )


def test_a_module_that_is_called_ray_and_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (types.ModuleType("ray"), types.SimpleNamespace(ObjectRef="none"), None):
        monkeypatch.setitem(sys.modules, "ray", module)  # type: ignore[arg-type]
        with concurrent_source() as source:
            future = dtorch_ops.from_future(source.future)
            source.set_result(torch.ones(1))
            assert future.get().tolist() == [1]
        with pytest.raises(TypeError):
            dtorch_ops.from_future(3)  # type: ignore[call-overload]


@pytest.mark.slow
def test_references_of_a_ray_cluster() -> None:
    """Of one node. In a process of its own, since a cluster leaves threads and children."""
    pytest.importorskip("ray", reason="there is none to be had here")
    program = textwrap.dedent("""
        import ray
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")

        @ray.remote
        class Worker:
            def __init__(self):
                self.gate = asyncio.Event()
            async def open(self):
                self.gate.set()
            async def wait(self, value):
                await self.gate.wait()
                return value
            async def fail(self):
                raise KeyError("of the task")
            async def hang(self):
                await asyncio.Event().wait()
            async def die(self):
                os._exit(1)

        worker = Worker.remote()
        x = torch.arange(3.0)
        big = torch.ones(1 << 20)  # goes through the store
        call = worker.wait.remote
        held = [
            dtorch_ops.from_future(call(x)),
            dtorch_ops.from_future(call(big)),
            dtorch_ops.from_future(call(None), dtorch_ops.VoidFuture),
            dtorch_ops.from_future(call({"x": x, "n": 3}), dtorch_ops.Future),
            dtorch_ops.from_future(call(None)),
        ]
        assert [type(f).__name__ for f in held] == [
            "TensorFuture", "TensorFuture", "VoidFuture", "Future", "TensorFuture"
        ]
        threads = threading.active_count()
        waiting = [dtorch_ops.from_future(call(x)) for _ in range(50)]
        assert threading.active_count() == threads
        gc.collect()  # nobody holds the references
        assert not any(f.is_ready() for f in held + waiting)
        worker.open.remote()
        assert held[0].wait(60_000).tolist() == [0, 1, 2]
        assert held[1].wait(60_000).equal(big)
        assert held[2].wait(60_000) is None
        tree = held[3].wait(60_000)
        assert tree["x"].equal(x) and tree["n"] == 3
        try:
            held[4].wait(60_000)
            raise AssertionError
        except TypeError as error:
            assert "got NoneType" in str(error)
        assert len(dtorch_ops.wait_all(waiting, 60_000)) == 50

        async def main():
            return await dtorch_ops.from_future(call(x))
        assert asyncio.run(main()).equal(x)

        reference = ray.put(x)
        assert dtorch_ops.from_future(reference).wait(60_000).equal(x)
        try:
            dtorch_ops.from_future(worker.fail.remote()).wait(60_000)
            raise AssertionError
        except KeyError as error:
            assert isinstance(error, ray.exceptions.RayTaskError), type(error)
            assert "of the task" in str(error)
        reference = worker.hang.remote()
        cancelled = dtorch_ops.from_future(reference)
        ray.cancel(reference)
        try:
            cancelled.wait(60_000)
            raise AssertionError
        except ray.exceptions.TaskCancelledError:  # Ray's own
            pass
        try:
            dtorch_ops.from_future(worker.die.remote()).wait(60_000)
            raise AssertionError
        except ray.exceptions.RayActorError:
            pass
        ray.shutdown()
    """)
    done = run_python(program, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- Accelerators -------------------------------------------------------------------------------


@pytest.mark.timeout(600)  # the first one may have to build the fake
@pytest.mark.parametrize("kind", ["TensorFuture", "VoidFuture"])
@pytest.mark.parametrize("of", ["concurrent", "torch"])
@on_accelerator()
def test_a_tensor_of_an_accelerator_has_been_computed_when_it_arrives(of, kind):
    import concurrent.futures

    tensor = torch.zeros(3, device=DEVICE)
    if of == "concurrent":
        source = concurrent.futures.Future()
    else:
        source = torch.futures.Future(devices=[DEVICES[0]])
    future = dtorch_ops.from_future(source, getattr(dtorch_ops, kind))
    drain(DEVICE)
    with held(DEVICE):
        tensor.add_(1)
        source.set_result(tensor)
        assert_pending(future)
    assert future.wait(LIMIT_MS) is (tensor if kind == "TensorFuture" else None)


# ---- as_concurrent ------------------------------------------------------------------------------


def test_a_follower_has_the_value_and_consumes_nothing() -> None:
    promise, future = pending()
    follower = future.as_concurrent()
    assert isinstance(follower, concurrent.futures.Future)
    assert not follower.done() and not follower.running()
    with pytest.raises(concurrent.futures.TimeoutError):
        follower.result(timeout=0)
    tensor = torch.ones(2)
    promise.set_value(tensor)
    assert follower.done() and follower.result() is tensor and follower.exception() is None
    assert future.valid() and future.get() is tensor
    # Nor does it need what get() has taken.
    assert future.as_concurrent().result(0) is tensor


def test_followers_of_every_class() -> None:
    tree = dtorch_ops.to_torch_async({"a": torch.ones(1), "n": 3})
    assert tree.as_concurrent().result(0)["n"] == 3
    assert dtorch_ops.sync_future("cpu").as_concurrent().result(LIMIT) is None
    assert dtorch_ops.collect_all([tree]).as_concurrent().result(0) == [tree]
    assert tree.then(lambda f: 7).as_concurrent().result(0) == 7
    bare = torch.ops.dtorch.get_tensor_async(torch.ones(1))
    assert dtorch_ops.Future(bare).as_concurrent().result(0).tolist() == [1]


def test_a_follower_outlives_the_handle() -> None:
    promise, future = pending()
    follower = future.as_concurrent()
    del future
    gc.collect()
    promise.set_value(torch.ones(1))
    assert follower.result(0).tolist() == [1]


def test_a_follower_has_the_error_and_no_cycle_with_it() -> None:
    follower = failed(OfTheSource("of the promise")).as_concurrent()
    error = follower.exception(0)
    assert isinstance(error, OfTheSource) and error.args == ("of the promise",)
    with pytest.raises(OfTheSource):
        follower.result(0)
    follower = failed(OfTheSource()).as_concurrent()
    gone = weakref.ref(follower)
    gc.disable()
    try:
        del follower
        assert gone() is None
    finally:
        gc.enable()


def test_a_broken_promise_breaks_the_follower() -> None:
    promise, future = pending()
    follower = future.as_concurrent()
    waiting = blocked_in(follower.exception)
    del promise
    assert isinstance(waiting.finish(), BrokenPromiseError)


def test_a_cancelled_promise_cancels_the_follower() -> None:
    promise, future = pending()
    follower = future.as_concurrent()
    waiting = blocked_in(lambda: concurrent.futures.wait([follower]))
    promise.cancel()
    assert follower.cancelled()
    assert waiting.finish().done == {follower}  # type: ignore[attr-defined]
    with pytest.raises(CancelledError):
        follower.result(0)


def test_cancelling_a_follower_tells_those_who_wait_for_it_and_nobody_else() -> None:
    promise, future = pending()
    follower, other = future.as_concurrent(), future.as_concurrent()
    called: list[Any] = []
    follower.add_done_callback(called.append)
    waiting = [
        blocked_in(lambda: concurrent.futures.wait([follower]).done),
        blocked_in(lambda: set(concurrent.futures.as_completed([follower]))),
        blocked_in(lambda: {follower} if raises_cancelled(follower.result) else set()),
    ]
    assert follower.cancel() is True
    assert [worker.finish() for worker in waiting] == [{follower}] * 3
    assert follower.cancelled() and called == [follower]
    assert follower.cancel() is True  # as that of concurrent.futures says, again
    assert not future.is_ready() and not other.done()
    promise.set_value(torch.ones(1))
    assert follower.cancelled() and other.result(0) is future.get()
    assert other.cancel() is False


def test_a_follower_that_is_cancelled_is_let_go() -> None:
    """The future that it followed may be pending for long yet."""
    _promise, future = pending()
    follower = future.as_concurrent()
    gone = weakref.ref(follower)
    follower.cancel()
    del follower
    assert gone() is None


def raises_cancelled(call: Callable[[], object]) -> bool:
    try:
        call()
    except CancelledError:
        return True
    return False


def test_a_follower_is_either_cancelled_or_complete(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever is first; concurrent.futures logs what it takes for an unexpected state."""
    hooked: list[Any] = []
    before, sys.unraisablehook = sys.unraisablehook, hooked.append
    try:
        with caplog.at_level(logging.DEBUG, logger="concurrent.futures"):
            for _ in range(300):
                promise, future = pending()
                follower = future.as_concurrent()
                ready = threading.Barrier(3)

                def cancel(ready: Any = ready, follower: Any = follower) -> Any:
                    ready.wait(LIMIT)
                    return follower.cancel()

                workers = [Worker(cancel), Worker(cancel)]
                ready.wait(LIMIT)
                promise.set_value(torch.ones(1))
                concurrent.futures.wait([follower], LIMIT)
                cancelled = {worker.finish() for worker in workers}
                assert follower.cancelled() in cancelled
                assert follower.cancelled() or follower.result(0) is future.value()
    finally:
        sys.unraisablehook = before
    assert not caplog.records and not hooked


def test_followers_in_wait_and_as_completed() -> None:
    pairs = [pending() for _ in range(3)]
    followers = [future.as_concurrent() for _, future in pairs]
    pairs[1][0].set_value(torch.ones(1))
    done, not_done = concurrent.futures.wait(
        followers, LIMIT, return_when=concurrent.futures.FIRST_COMPLETED
    )
    assert done == {followers[1]} and not_done == {followers[0], followers[2]}
    completed = concurrent.futures.as_completed(followers, LIMIT)
    assert next(completed) is followers[1]
    pairs[2][0].set_exception(OfTheSource())
    assert next(completed) is followers[2]
    Worker(lambda: pairs[0][0].set_value(torch.ones(1)))
    assert next(completed) is followers[0]


def test_callbacks_of_a_follower_run_in_the_thread_that_sets_the_promise() -> None:
    promise, future = pending()
    follower = future.as_concurrent()
    ran: list[int] = []
    follower.add_done_callback(lambda f: ran.append(threading.get_ident()))
    worker = Worker(lambda: promise.set_value(torch.ones(1)))
    worker.finish()
    assert ran == [worker.ident]
    follower.add_done_callback(lambda f: ran.append(threading.get_ident()))
    assert ran == [worker.ident, threading.get_ident()]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_follower_in_asyncio(new_loop: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        promise, future = pending()
        wrapped = asyncio.wrap_future(future.as_concurrent())
        Worker(lambda: promise.set_value(torch.ones(1)))
        assert (await wrapped) is future.value()
        in_thread = loop.run_in_executor(None, future.as_concurrent().result)
        assert (await in_thread) is future.value()

        # Cancelled by asyncio, the future goes on.
        promise, future = pending()
        follower = future.as_concurrent()
        wrapped = asyncio.wrap_future(follower)
        wrapped.cancel()
        await asyncio.wait([wrapped])
        assert follower.cancelled() and not future.is_ready()
        promise.set_value(torch.ones(1))
        assert (await future).tolist() == [1]
        await loop.shutdown_default_executor()

    loop = new_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(main(), LIMIT))
    finally:
        loop.close()


def test_there_and_back_again() -> None:
    promise, future = pending()
    again = dtorch_ops.from_future(future.as_concurrent())
    promise.set_value(torch.ones(1))
    assert again.get() is future.get()
    promise, future = pending()
    again = dtorch_ops.from_future(future.as_concurrent())
    promise.cancel()
    with pytest.raises(CancelledError):
        again.get()
