"""What holds for a promise wherever it is fulfilled: one suite, run on every backend."""

from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
import functools
import os
import queue
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import producers
import pytest
import tensor_cases
import torch
from futures import READ_ONLY, WAITS, blocked_in
from network_group import Group
from peer import Inheritor, Peer
from producers import Promise

import dtorch_ops

LIMIT_MS = 30_000
BrokenPromiseError = dtorch_ops.BrokenPromiseError
PromiseAlreadySatisfiedError = dtorch_ops.PromiseAlreadySatisfiedError


# ---- Backends -----------------------------------------------------------------------------------


@dataclass
class Backend:
    """Where the promises of a test are fulfilled.

    ``start(function, promise, ...)`` has a producer run a function of producers.py, and
    ``finish()`` gives its result; ``call`` is both. When it has finished, nothing over there but
    what the function has kept refers to the promise any more.
    """

    make_producer: Callable[[], Any]
    crosses: bool  # the border of a process: what arrives is a copy
    close: Callable[[], None] = lambda: None
    producer: Any = None

    def start(self, function: Callable[..., object], *args: object) -> None:
        self.producer.start(function, *args)

    def finish(self) -> Any:
        return self.producer.finish()

    def call(self, function: Callable[..., object], *args: object) -> Any:
        return self.producer.call(function, *args)


def network() -> Backend:
    group = Group(workers=4)  # the module's, and one for each that a test ends
    return Backend(group.take, crosses=True, close=group.close)


BACKENDS = {
    "memory": lambda: Backend(lambda: Peer("thread"), crosses=False),
    "file_by_spawn": lambda: Backend(lambda: Peer("spawn"), crosses=True),
    "file_by_fork": lambda: Backend(lambda: Peer("fork"), crosses=True),
    "file_inherited": lambda: Backend(Inheritor, crosses=True),
    "network": network,
}
CROSSING = [name for name in BACKENDS if name != "memory"]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = BACKENDS[request.param]()
    try:
        with made.make_producer() as producer:
            made.producer = producer
            yield made
    finally:
        made.close()


#: For a test of what crosses the border of a process.
crossing = pytest.mark.parametrize("backend", CROSSING, indirect=True, scope="module")


def pending(cls: Any = Promise) -> tuple[Any, Any]:
    promise = cls()
    return promise, promise.get_future()


# ---- Values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tensor_cases.NAMES)
def test_every_kind_of_tensor_arrives_as_it_is(backend: Backend, name: str) -> None:
    promise, future = pending()
    backend.call(producers.set_case, promise, name)
    received, sent = future.wait(LIMIT_MS), tensor_cases.cases()[name]
    assert received.shape == sent.shape
    assert received.dtype == sent.dtype
    assert torch.equal(tensor_cases.plain(received), tensor_cases.plain(sent))

    if not backend.crosses:
        return
    # No gradients, no lazy flags, no more of the storage than the elements of the view.
    assert type(received) is torch.Tensor
    assert not received.requires_grad and received.grad_fn is None
    assert not received.is_conj() and not received.is_neg()
    assert received.is_contiguous() and received.storage_offset() == 0
    assert received.untyped_storage().nbytes() == sent.numel() * sent.element_size()
    assert received.numel() == 0 or received.data_ptr() % 64 == 0


def test_in_one_process_the_value_is_the_very_tensor() -> None:
    """Gradients and subclasses included; of a process border the next test tells."""
    with Peer("thread") as producer:
        for name in tensor_cases.UNSENDABLE:
            value = tensor_cases.unsendable(name)
            promise, future = pending()
            producer.call(producers.set_tensor, promise, value)
            assert future.wait(LIMIT_MS) is value


@crossing
@pytest.mark.parametrize("kind", tensor_cases.UNSENDABLE)
def test_what_has_no_plain_elements_is_refused_by_name(backend: Backend, kind: str) -> None:
    promise, future = pending()
    said = backend.call(producers.error_of_unsendable, promise, kind)
    assert tensor_cases.UNSENDABLE[kind] in said
    assert {"compressed": "sparse", "jagged": "nested"}.get(kind, kind) in said
    with pytest.raises(TypeError) as told:
        future.wait(LIMIT_MS)
    assert str(told.value) == said


@crossing
@pytest.mark.parametrize("size", [3, 10_000, 1_000_000])
def test_what_the_producer_writes_later_does_not_cross(backend: Backend, size: int) -> None:
    promise, future = pending()
    backend.call(producers.set_then_overwrite, promise, size)
    assert torch.equal(future.wait(LIMIT_MS), torch.ones(size))


@crossing
def test_what_arrived_is_the_receivers_own(backend: Backend) -> None:
    """Writable, and unchanged by what comes later, whatever is dropped."""
    kept = []
    for index in range(50):
        promise, future = pending()
        backend.call(producers.set_full, promise, float(index), (1000,))
        received = future.get()
        if index % 7 == 0:
            received.add_(0.5)
            kept.append((index, received))
    for index, tensor in kept:
        assert torch.equal(tensor, torch.full((1000,), index + 0.5))


def test_empty_values_in_a_group(backend: Backend) -> None:
    names = ["(0,)", "(0, 5)", "(3, 0, 2)", "no dimension"] * 5
    promises = [Promise() for _ in names]
    futures = [promise.get_future() for promise in promises]
    for promise, name in zip(promises, names, strict=True):
        backend.call(producers.set_case, promise, name)
    shapes = [value.shape for value in dtorch_ops.wait_all(futures, LIMIT_MS)]
    assert shapes == [tensor_cases.cases()[name].shape for name in names]


def test_sizes_that_change_from_value_to_value(backend: Backend) -> None:
    for size in [(3,), (1_000_000,), (0,), (2, 3), (), (5000,), (128,), (1,)] * 2:
        promise, future = pending()
        backend.call(producers.set_full, promise, 2.0, size)
        assert torch.equal(future.wait(LIMIT_MS), torch.full(size, 2.0))


def test_through_the_operator(backend: Backend) -> None:
    promise, future = pending()
    backend.call(producers.set_through_operator, promise)
    assert future.wait(LIMIT_MS).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_through_a_scripted_function(backend: Backend) -> None:
    promise, future = pending()
    backend.call(producers.set_in_a_script, promise, 4.0)
    assert future.wait(LIMIT_MS).tolist() == [5.0, 5.0]


@pytest.mark.parametrize("function", [producers.set_void, producers.sync_void])
def test_without_a_value(backend: Backend, function: Any) -> None:
    promise, future = pending(dtorch_ops.VoidPromise)
    backend.call(function, promise)
    assert future.wait(LIMIT_MS) is None
    assert future.get() is None


# ---- Ways of reading ----------------------------------------------------------------------------


def scripted_wait(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    return torch.jit.wait(future)


@functools.cache
def compiled_wait() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is being retired
        return torch.jit.script(scripted_wait)


def outcome_of(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:
        return error


def described(error: Any) -> Any:
    if isinstance(error, getattr(builtins, "BaseExceptionGroup", ())):
        return type(error), error.args[0], [described(member) for member in error.exceptions]
    return type(error), error.args


def test_every_way_of_reading_gives_the_value(backend: Backend) -> None:
    promise, future = pending()
    other = promise.get_future()
    backend.call(producers.set_full, promise, 3.0)
    for _ in range(2):
        for name, read in READ_ONLY.items():
            assert read(future).tolist() == [3.0] * 3, name
        assert compiled_wait()(future).tolist() == [3.0] * 3
    assert other.get().tolist() == [3.0] * 3
    assert future.valid() and not other.valid()
    with pytest.raises(dtorch_ops.FutureAlreadyRetrievedError):
        other.get()
    assert future.get().tolist() == [3.0] * 3


#: Whether a promise has been pickled before anybody waits: then it is waited for where it is set.
pickled_first = pytest.mark.parametrize("pickled", [False, True], ids=["", "pickled first"])


@pickled_first
@pytest.mark.parametrize("way", WAITS)
def test_whoever_is_blocked_is_woken(backend: Backend, way: str, pickled: bool) -> None:
    def started() -> tuple[Any, Any]:
        promise, future = pending()
        if pickled and backend.crosses:
            promise.token()
        return promise, blocked_in(lambda: WAITS[way](future))

    promise, waiter = started()
    backend.call(producers.set_full, promise, 3.0)
    assert waiter.finish().tolist() == [3.0] * 3
    promise, waiter = started()
    backend.call(producers.set_error, promise, "value")
    with pytest.raises(ValueError, match="v"):
        waiter.finish()
    promise, waiter = started()
    backend.start(producers.drop, promise)
    del promise
    backend.finish()
    with pytest.raises(BrokenPromiseError):
        waiter.finish()


#: Those of torch itself, which know nothing of where a value comes from.
STOCK_WAITS: dict[str, Callable[[Any], Any]] = {
    "Future.wait": lambda f: torch._C.Future.wait(f),
    "Future.then": lambda f: torch._C.Future.then(f, lambda g: torch._C.Future.wait(g)).wait(),
    "wait_all": lambda f: torch.futures.wait_all([f])[0],
    "collect_all": lambda f: torch.futures.collect_all([f]).wait()[0].wait(),
    "get_future": lambda f: f.wait(),  # the bare one, of the operator
    "wait_all operator": lambda f: torch.ops.dtorch.wait_all([f])[0],
    "collect_any operator": lambda f: torch.ops.dtorch.collect_any([f]).wait(),
    "script": lambda f: compiled_wait()(f),
}


@pickled_first
@pytest.mark.parametrize("way", STOCK_WAITS)
def test_whoever_is_blocked_in_torch_is_woken(backend: Backend, way: str, pickled: bool) -> None:
    def started() -> tuple[Any, Any]:
        promise, future = pending()
        if pickled and backend.crosses:
            promise.token()
        if way == "get_future":
            future = torch.ops.dtorch.get_future(promise)
        return promise, blocked_in(lambda: STOCK_WAITS[way](future))

    compiled_wait()
    promise, waiter = started()
    backend.call(producers.set_full, promise, 3.0)
    assert waiter.finish().tolist() == [3.0] * 3
    promise, waiter = started()
    backend.call(producers.set_error, promise, "value")
    with pytest.raises((ValueError, RuntimeError), match="v"):
        waiter.finish()
    promise, waiter = started()
    backend.start(producers.drop, promise)
    del promise
    backend.finish()
    with pytest.raises(RuntimeError, match=r"without a value|dropped"):
        waiter.finish()


def test_callbacks_and_chains(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: told.append(u.exc_type))
    promise, future = pending()
    seen: list[Any] = []
    future.add_done_callback(lambda f: seen.append(("first", f.value()[0].item())))
    future.add_done_callback(lambda f: 1 / 0)
    future.add_done_callback(lambda f: seen.append(("second", f.value()[0].item())))
    doubled = future.then(lambda f: f.value() * 2)
    tripled = doubled.then(lambda f: f.value() * 1.5)
    backend.call(producers.set_full, promise, 2.0)
    assert tripled.wait(LIMIT_MS).tolist() == [6.0] * 3
    assert seen == [("first", 2.0), ("second", 2.0)]
    assert told == [ZeroDivisionError]
    future.add_done_callback(lambda f: seen.append("at once"))
    assert seen[-1] == "at once"


def test_groups_and_await(backend: Backend) -> None:
    promises = [Promise() for _ in range(10)]
    futures = [promise.get_future() for promise in promises]
    everything = dtorch_ops.collect_all(futures)

    async def main() -> list[torch.Tensor]:
        gathered = asyncio.gather(*futures)
        for index, promise in enumerate(promises):
            backend.call(producers.set_full, promise, float(index))
        return await asyncio.wait_for(gathered, LIMIT_MS / 1000)

    expected = [float(index) for index in range(10)]
    assert [value[0].item() for value in asyncio.run(main())] == expected
    assert [f.value()[0].item() for f in everything.wait(LIMIT_MS)] == expected
    assert [v[0].item() for v in dtorch_ops.wait_all(futures)] == expected
    completed = dtorch_ops.as_completed(futures, LIMIT_MS)
    assert sorted(f.value()[0].item() for f in completed) == expected


@pytest.mark.parametrize("failed_first", [True, False])
@pytest.mark.parametrize("group", ["wait_all", "collect_all", "operator"])
def test_a_group_fails_while_others_are_pending(
    backend: Backend, group: str, failed_first: bool
) -> None:
    kept, never = pending()
    promise, future = pending()
    members = [future, never] if failed_first else [never, future]
    wait: dict[str, Callable[[], Any]] = {
        "wait_all": lambda: dtorch_ops.wait_all(members),
        "collect_all": lambda: dtorch_ops.collect_all(members).get(),
        "operator": lambda: torch.ops.dtorch.wait_all(members),
    }
    waiter = blocked_in(wait[group])
    backend.call(producers.set_error, promise, "key")
    with pytest.raises(KeyError):
        waiter.finish()
    assert not never.is_ready()
    backend.call(producers.set_full, kept, 1.0)
    assert never.wait(LIMIT_MS).tolist() == [1.0] * 3


def test_a_time_limit_leaves_the_future_alone(backend: Backend) -> None:
    promise, future = pending()
    for limit in (0, 1, 20):
        with pytest.raises(TimeoutError):
            future.wait(limit)
    assert not future.is_ready() and future.valid()
    backend.call(producers.set_full, promise, 1.0)
    assert future.wait(LIMIT_MS).tolist() == [1.0] * 3


def test_a_limit_ends_the_wait_in_time(backend: Backend) -> None:
    """A least time, and not much more: the best of some, for the machine may be busy."""
    promise, future = pending()
    if backend.crosses:
        promise.token()
    for wait in (
        lambda: future.wait(50),
        lambda: dtorch_ops.wait_all([future], 50),
        lambda: torch.ops.dtorch.wait_for(future, 50),
        lambda: next(dtorch_ops.as_completed([future], 50)),
    ):
        took = []
        for _ in range(5):
            start = time.monotonic()
            with pytest.raises(TimeoutError):
                wait()
            took.append(time.monotonic() - start)
        assert 0.05 <= min(took) < 0.25, took
    assert not future.is_ready() and future.valid()
    promise.set_value(torch.tensor(2.0))
    assert future.get().item() == 2.0


# ---- Errors -------------------------------------------------------------------------------------

#: What arrives in another process: the type, or None where it is a RemoteError that names it.
REBUILT = {
    "key": KeyError,
    "value": ValueError,
    "os": FileNotFoundError,
    "timeout": TimeoutError,
    "unicode": ValueError,
    "no message": RuntimeError,
    "torch": torch.OutOfMemoryError,
    "ours": BrokenPromiseError,
    "with a lock": ValueError,
    "large": ValueError,
    "stop": StopIteration,
    "exit": SystemExit,
    "interrupt": KeyboardInterrupt,
    "cancelled": concurrent.futures.CancelledError,
    "group": getattr(builtins, "ExceptionGroup", None),
}
REMOTE = {
    "two arguments": ("TwoArguments", "1 and 2"),
    "local": ("_local_class.<locals>.Local", "of a function"),
    "unknown": ("OnlyHere", "u"),
    "lock in args": ("ValueError", "in args"),
}
KINDS = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(
            kind == "group" and not hasattr(builtins, "ExceptionGroup"), reason="of Python 3.11"
        ),
    )
    for kind in producers.ERRORS
]


def check_error(backend: Backend, kind: str, error: BaseException) -> None:
    original = producers.ERRORS[kind]()
    if backend.crosses and kind in REMOTE:
        name, message = REMOTE[kind]
        assert type(error) is dtorch_ops.RemoteError
        assert error.type_name == name
        assert message in error.message
        assert "in set_error" in error.traceback_text
        assert name.split(".")[-1] in str(error) and message in str(error)
        return
    if kind in REMOTE:
        assert type(error).__qualname__ == type(original).__qualname__
        assert str(error).startswith(str(original)[:7])
    elif kind == "group":
        assert isinstance(error, REBUILT[kind])
        assert described(error) == described(original)
    else:
        assert type(error) is REBUILT[kind]
        assert error.args == original.args
    assert "in set_error" in str(error.__cause__), "where it was raised is told"
    if kind == "os":
        assert (error.errno, error.filename) == (2, "name")  # type: ignore[attr-defined]
    if kind == "exit":
        assert error.code == 4  # type: ignore[attr-defined]
    if kind == "stop":
        assert error.value == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_reading_gives_the_error(backend: Backend, kind: str) -> None:
    promise, future = pending()
    other = promise.get_future()
    backend.call(producers.set_error, promise, kind)
    for _ in range(2):
        for name, read in READ_ONLY.items():
            error = outcome_of(lambda read=read: read(future))
            assert isinstance(error, BaseException), name
            if kind == "stop" and name == "await":  # an awaitable cannot raise it
                assert type(error) is RuntimeError
                error = error.__cause__
            check_error(backend, kind, error)
    check_error(backend, kind, outcome_of(other.get))
    assert not other.valid()
    # A value of no kind: TorchScript has its own error, with ours inside.
    error = outcome_of(lambda: compiled_wait()(future))
    assert isinstance(error, RuntimeError), error
    if kind != "unicode":
        assert str(producers.ERRORS[kind]())[:7] in str(error)
    assert future._state() == "failed"


def check_group(backend: Backend, group: str) -> None:
    errors = producers.ERROR_GROUPS[group]()
    promises = {name: pending() for name in errors}
    backend.call(producers.set_errors, {name: p for name, (p, _) in promises.items()}, group)
    for name, (_, future) in promises.items():
        error = outcome_of(lambda future=future: future.wait(LIMIT_MS))
        assert described(error) == described(errors[name]), name


@pytest.mark.parametrize("group", ["builtin", "torch"])
def test_every_type_of_python_and_torch_is_rebuilt(backend: Backend, group: str) -> None:
    check_group(backend, group)


@crossing
def test_builtin_types_are_rebuilt_whatever_their_arguments(backend: Backend) -> None:
    """A tuple, as the key of a KeyError; the bytes of a UnicodeDecodeError."""
    check_group(backend, "nested")


@pytest.mark.parametrize("kind", ["key", "two arguments", "stop"])
def test_errors_of_a_promise_without_a_value(backend: Backend, kind: str) -> None:
    promise, future = pending(dtorch_ops.VoidPromise)
    backend.call(producers.set_error, promise, kind)
    check_error(backend, kind, outcome_of(lambda: future.wait(LIMIT_MS)))
    check_error(backend, kind, outcome_of(future.get))


@pytest.mark.parametrize("kind", ["exit", "interrupt", "stop", "cancelled"])
def test_errors_that_end_programs_end_nobody(backend: Backend, kind: str) -> None:
    """Neither whoever set it, nor what listens for it: both go on."""
    promise, future = pending()
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
    future.add_done_callback(lambda f: seen.put(outcome_of(f.value)))
    child = future.then(lambda f: f.value())
    backend.call(producers.set_error, promise, kind)
    assert isinstance(outcome_of(lambda: child.wait(LIMIT_MS)), REBUILT[kind])
    assert isinstance(seen.get(timeout=30), REBUILT[kind])
    promise, future = pending()
    backend.call(producers.set_full, promise, 1.0)
    assert future.wait(LIMIT_MS).tolist() == [1.0] * 3


# ---- Once ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Promise, dtorch_ops.VoidPromise])
def test_it_is_set_once(backend: Backend, cls: Any) -> None:
    promise, future = pending(cls)
    assert backend.call(producers.set_twice, promise) == "PromiseAlreadySatisfiedError"
    value = future.wait(LIMIT_MS)
    assert value is None if cls is dtorch_ops.VoidPromise else value.tolist() == [1.0]
    assert not promise.is_pending()
    for late in (lambda: promise.set_exception(KeyError()), lambda: producers.set_twice(promise)):
        with pytest.raises(PromiseAlreadySatisfiedError):
            late()
    assert not promise.cancel()


@pytest.mark.parametrize("end", ["set_value", "set_exception", "cancel"])
def test_the_owner_is_first_and_the_producer_is_told(
    backend: Backend, tmp_path: Path, end: str
) -> None:
    promise, future = pending()
    ready, go = str(tmp_path / "ready"), str(tmp_path / "go")
    os.mkfifo(ready)
    os.mkfifo(go)
    backend.start(producers.set_when_told, promise, ready, go)
    with open(ready):
        pass
    assert promise.is_pending()
    if end == "set_value":
        promise.set_value(torch.tensor(5.0))
        assert future.wait(LIMIT_MS).item() == 5.0
    elif end == "set_exception":
        promise.set_exception(KeyError("mine"))
        with pytest.raises(KeyError, match="mine"):
            future.wait(LIMIT_MS)
    else:
        assert promise.cancel()
        assert not promise.cancel()
        for name, read in READ_ONLY.items():
            assert type(outcome_of(lambda read=read: read(future))) is (
                concurrent.futures.CancelledError
            ), name
    with open(go, "w"):
        pass
    told = backend.finish()
    assert told.startswith("PromiseAlreadySatisfiedError: ")
    assert ("cancelled" in told) == (end == "cancel"), told


@crossing
def test_the_future_stays_with_the_owner(backend: Backend) -> None:
    promise, future = pending()
    for said in backend.call(producers.errors_of_get_future, promise):
        assert "unpickled" in said and "fork" in said
    with pytest.raises(BrokenPromiseError):
        future.wait(LIMIT_MS)
    promise, future = pending()
    assert "unpickled" in backend.call(producers.error_of_cancel, promise)


# ---- Broken promises ----------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Promise, dtorch_ops.VoidPromise])
@pytest.mark.parametrize("end", [producers.drop, producers.raise_with])
def test_a_producer_that_drops_it_breaks_the_promise(backend: Backend, cls: Any, end: Any) -> None:
    promise, future = pending(cls)
    other = promise.get_future()
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
    future.add_done_callback(lambda f: seen.put(outcome_of(f.value)))
    backend.start(end, promise)
    del promise
    if end is producers.raise_with:
        with pytest.raises(AssertionError, match="of the producer"):
            backend.finish()
    else:
        backend.finish()
    with pytest.raises(BrokenPromiseError):
        future.wait(LIMIT_MS)
    for name, read in READ_ONLY.items():
        if cls is Promise or "operator" not in name:
            assert type(outcome_of(lambda read=read: read(future))) is BrokenPromiseError, name
    assert type(seen.get(timeout=30)) is BrokenPromiseError and seen.empty()
    if cls is Promise:
        with pytest.raises(RuntimeError, match="value"):
            compiled_wait()(future)
    assert other.valid()
    with pytest.raises(BrokenPromiseError):
        other.get()
    assert not other.valid()


@crossing
@pytest.mark.parametrize("end", [producers.leave, producers.kill_itself])
def test_a_producer_that_ends_breaks_the_promise(backend: Backend, end: Any) -> None:
    """Though the owner keeps its own object: that may set it, but is no producer."""
    with backend.make_producer() as producer:
        promise, future = pending()
        waiter = blocked_in(future.wait)
        producer.start(end, promise)
        with pytest.raises(BrokenPromiseError):
            waiter.finish()
        with pytest.raises(BrokenPromiseError):
            future.get()
        with pytest.raises(PromiseAlreadySatisfiedError):
            promise.set_value(torch.ones(1))


@crossing
def test_what_was_set_outlives_its_producer(backend: Backend) -> None:
    with backend.make_producer() as producer:
        promises = [Promise() for _ in range(4)]
        futures = [promise.get_future() for promise in promises]
        for index, promise in enumerate(promises[:3]):
            producer.call(producers.set_full, promise, float(index), (100_000,))
        early = futures[0].get()
        producer.start(producers.kill_itself, promises[3])
        with pytest.raises(BrokenPromiseError):
            futures[3].wait(LIMIT_MS)
    for index, future in enumerate(futures[1:3], 1):
        assert torch.equal(future.get(), torch.full((100_000,), float(index)))
    assert torch.equal(early, torch.zeros(100_000))
