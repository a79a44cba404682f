"""The errors of the plugin, and how exceptions travel through futures: whole, fresh, leak-free."""

from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
import dataclasses
import gc
import sys
import textwrap
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import fresh
import pytest
import torch
from futures import (
    LIMIT,
    READ_ONLY,
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

ExceptionGroup = getattr(builtins, "ExceptionGroup", None)  # since Python 3.11, as are notes
with_groups = pytest.mark.skipif(ExceptionGroup is None, reason="no groups or notes in 3.10")

READS = READ_ONLY | {"get": lambda f: dtorch_ops.Future(f).get()}
every_way = pytest.mark.parametrize("read", READS.values(), ids=READS.keys())


# ---- The classes --------------------------------------------------------------------------------


def test_the_hierarchy() -> None:
    assert issubclass(dtorch_ops.DTorchError, RuntimeError)
    for name in (
        "BrokenPromiseError",
        "PromiseAlreadySatisfiedError",
        "FutureAlreadyRetrievedError",
        "RemoteError",
    ):
        cls = getattr(dtorch_ops, name)
        assert issubclass(cls, dtorch_ops.DTorchError)
        assert cls.__doc__ and cls.__module__ == "dtorch_ops.errors"
    assert not issubclass(TimeoutError, dtorch_ops.DTorchError)


def test_what_a_remote_error_tells() -> None:
    error = dtorch_ops.RemoteError("pkg.Odd", "it went wrong", "Traceback: here\n")
    assert (error.type_name, error.message) == ("pkg.Odd", "it went wrong")
    assert error.traceback_text == "Traceback: here\n"
    assert "pkg.Odd: it went wrong" in str(error) and "Traceback: here" in str(error)
    assert str(dtorch_ops.RemoteError("pkg.Odd", "")) == "pkg.Odd"


# ---- What arrives -------------------------------------------------------------------------------


class TwoArguments(Exception):
    """Its constructor does not take what ``args`` holds: it pickles, and does not unpickle."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class KeywordOnly(ValueError):
    def __init__(self, *, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class WithNew(Exception):
    """Neither ``__new__`` nor ``__init__`` takes what ``args`` holds."""

    def __new__(cls, first: int, second: int) -> WithNew:
        return super().__new__(cls)

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first}+{second}")
        self.sum = first + second


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses to have any attribute set."""

    code: int


class HoldingALock(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class Slotted(Exception):
    __slots__ = ("__private", "public")

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.public = value
        self.__private = -value

    @property
    def private(self) -> int:
        return self.__private


class CountingInit(Exception):
    made = 0

    def __init__(self) -> None:
        CountingInit.made += 1


class MyOSError(OSError):
    def __init__(self, name: str) -> None:
        super().__init__(2, "no such thing", name)
        self.extra = name


class RaisingStr(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class EqualToNothing(Exception):
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("do not compare me")


def _local_class() -> BaseException:
    class Local(LookupError):
        pass

    return Local("local", 1)


def _attribute_error() -> BaseException:
    return AttributeError("no attribute", name="missing", obj=None)


def _named_error() -> BaseException:
    return NameError("not defined", name="missing")


def _with_attributes() -> BaseException:
    error = ValueError("v")
    error.anything = {"a": [1]}
    return error


def _with_notes() -> BaseException:
    error = ValueError("v")
    error.add_note("a note")
    return error


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "KeyError": lambda: KeyError("k"),
    "ValueError": lambda: ValueError(),
    "IndexError": lambda: IndexError(1, "two", None),
    "NotImplementedError": lambda: NotImplementedError("n"),
    "TimeoutError": lambda: TimeoutError("of the producer"),
    "RuntimeError": lambda: RuntimeError("r"),
    "DTorchError": lambda: dtorch_ops.DTorchError("ours"),
    "BrokenPromiseError": lambda: dtorch_ops.BrokenPromiseError("ours"),
    "RemoteError": lambda: dtorch_ops.RemoteError("type", "message", "text"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("too big"),
    "AssertionError": lambda: AssertionError((1, 2)),
    "ZeroDivisionError": lambda: ZeroDivisionError("z"),
    "OSError": lambda: OSError(2, "no such file", "a.txt"),
    "OSError_two_files": lambda: FileExistsError(17, "exists", "a.txt", None, "b.txt"),
    "OSError_text": lambda: OSError("only text"),
    "MyOSError": lambda: MyOSError("a.txt"),
    "BlockingIOError": lambda: BlockingIOError(11, "again", 5),
    "ConnectionResetError": lambda: ConnectionResetError(104, "reset"),
    "ImportError": lambda: ImportError("i", name="pkg", path="/path"),
    "AttributeError": _attribute_error,
    "NameError": _named_error,
    "SyntaxError": lambda: SyntaxError("s", ("file.py", 3, 7, "a b\n", 3, 8)),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff\x00", 0, 1, "invalid"),
    "UnicodeEncodeError": lambda: UnicodeEncodeError("ascii", "\u00e9", 0, 1, "not ascii"),
    "StopAsyncIteration": lambda: StopAsyncIteration("s"),
    "GeneratorExit": lambda: GeneratorExit("g"),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("k"),
    "CancelledError": lambda: concurrent.futures.CancelledError("c"),
    "BaseException": lambda: BaseException("b"),
    "surrogate": lambda: ValueError("\ud800 is no text"),
    "huge": lambda: ValueError("x" * 10_000_000),
    "two_arguments": lambda: TwoArguments(7, "because"),
    "keyword_only": lambda: KeywordOnly(detail="d"),
    "local_class": _local_class,
    "with_new": lambda: WithNew(1, 2),
    "frozen": lambda: Frozen(5),
    "holding_a_lock": HoldingALock,
    "slotted": lambda: Slotted(4),
    "attributes": _with_attributes,
    "raising_str": lambda: RaisingStr(1),
    "equal_to_nothing": lambda: EqualToNothing(1),
}
if ExceptionGroup is not None:
    EXCEPTIONS["ExceptionGroup"] = lambda: ExceptionGroup("g", [KeyError("k"), OSError(1, "o")])
    EXCEPTIONS["notes"] = _with_notes

every_exception = pytest.mark.parametrize("make", EXCEPTIONS.values(), ids=EXCEPTIONS.keys())


def the_function_that_raises(error: BaseException) -> None:
    local = "a local of the setter"
    assert local
    raise error


def set_raised(promise: Any, error: BaseException) -> None:
    try:
        the_function_that_raises(error)
    except BaseException as raised:
        promise.set_exception(raised)


def outcome_of(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def described(error: BaseException) -> dict[str, Any]:
    """All that an exception tells, but its traceback and what it came from."""
    told: dict[str, Any] = {"type": type(error), "args": error.args}
    for name in dir(error):
        if name.startswith("__") and name != "__notes__":
            continue
        value = getattr(error, name, "unset")
        if not callable(value):
            told[name] = value
    if ExceptionGroup is not None and isinstance(error, ExceptionGroup):
        told["exceptions"] = [described(e) for e in error.exceptions]
        told["args"] = (error.args[0],)
    return told


@every_exception
def test_an_error_arrives_whole(make: Callable[[], BaseException]) -> None:
    error = make()
    expected = described(error)
    promise, future = pending()
    set_raised(promise, error)
    for _ in range(2):
        read = outcome_of(future.wait)
        assert described(read) == expected
        assert "the_function_that_raises" in "".join(traceback.format_exception(read))
    assert type(error) is type(outcome_of(future.get))


@every_exception
def test_an_error_that_was_never_raised_arrives_whole(make: Callable[[], BaseException]) -> None:
    error = make()
    expected = described(error)
    future = failed(error)
    read = outcome_of(future.wait)
    assert described(read) == expected
    assert read is not error
    assert error.__traceback__ is None, "the setter's own object is left alone"


@every_exception
def test_an_error_arrives_whole_at_the_end_of_a_chain(make: Callable[[], BaseException]) -> None:
    error = make()
    expected = described(error)
    promise, future = pending()
    last = future.then(lambda f: f.value()).then(lambda f: f.wait()).then(lambda f: f.get())
    set_raised(promise, error)
    for _ in range(2):
        read = outcome_of(last.wait)
        assert described(read) == expected
        assert "the_function_that_raises" in "".join(traceback.format_exception(read))


@every_exception
def test_what_a_callback_of_then_raises_arrives_whole(make: Callable[[], BaseException]) -> None:
    error = make()
    expected = described(error)
    promise, future = pending()
    child = future.then(lambda f: the_function_that_raises(error))
    promise.set_value(torch.ones(1))
    for _ in range(2):
        assert described(outcome_of(child.wait)) == expected


@pytest.mark.parametrize("name", ["KeyError", "two_arguments", "OSError"])
@pytest.mark.parametrize("first", ["complete", "pending"])
def test_where_a_callback_of_then_raised_is_told(name: str, first: str) -> None:
    promise, future = pending()
    if first == "complete":
        promise.set_value(torch.ones(1))
    child = future.then(lambda f: the_function_that_raises(EXCEPTIONS[name]()))
    last = child.then(lambda f: f.value())
    if first == "pending":
        promise.set_value(torch.ones(1))
    for read in (child.wait, child.wait, last.wait, last.get):
        text = "".join(traceback.format_exception(outcome_of(read)))
        assert "the_function_that_raises" in text


@every_way
@pytest.mark.parametrize(
    "make",
    [EXCEPTIONS[name] for name in ("KeyError", "two_arguments", "ImportError", "CancelledError")],
    ids=["KeyError", "two_arguments", "ImportError", "CancelledError"],
)
def test_every_way_of_reading_gives_the_same_error_again_and_again(
    read: Callable[[Any], Any], make: Callable[[], BaseException]
) -> None:
    error = make()
    expected = described(error)
    promise, future = pending()
    set_raised(promise, error)
    for _ in range(3):
        outcome = outcome_of(lambda: read(future))
        assert described(outcome) == expected
        assert "the_function_that_raises" in "".join(traceback.format_exception(outcome))


@every_way
def test_every_way_of_reading_a_void_future_gives_its_error(read: Callable[[Any], Any]) -> None:
    promise = dtorch_ops.VoidPromise()
    future = promise.get_future()
    promise.set_exception(TwoArguments(1, "one"))
    for _ in range(2):
        outcome = outcome_of(lambda: read(future))
        assert type(outcome) is TwoArguments and outcome.reason == "one"


def test_the_constructor_of_a_class_is_not_called_again() -> None:
    future = failed(CountingInit())
    made = CountingInit.made
    for _ in range(3):
        assert type(outcome_of(future.wait)) is CountingInit
    assert CountingInit.made == made


def test_later_changes_to_the_original_do_not_show() -> None:
    error = ValueError("original")
    future = failed(error)
    error.args = ("changed",)
    error.added = 1
    read = outcome_of(future.wait)
    assert read.args == ("original",) and not hasattr(read, "added")


def test_what_an_error_came_from_is_in_its_traceback() -> None:
    def setter(promise: Any) -> None:
        try:
            try:
                the_function_that_raises(KeyError("the root of it"))
            except KeyError as root:
                raise ValueError("what came of it") from root
        except ValueError as error:
            promise.set_exception(error)

    promise, future = pending()
    setter(promise)
    text = "".join(traceback.format_exception(outcome_of(future.wait)))
    for part in ("the root of it", "the_function_that_raises", "direct cause", "what came of it"):
        assert part in text


def test_an_error_read_from_one_future_and_set_on_another_keeps_its_origin() -> None:
    first_promise, first = pending()
    set_raised(first_promise, KeyError("k"))

    def the_relay(promise: Any) -> None:
        try:
            first.wait()
        except KeyError as error:
            promise.set_exception(error)

    for _ in range(3):
        promise, future = pending()
        the_relay(promise)
        read = outcome_of(future.wait)
        text = "".join(traceback.format_exception(read))
        assert type(read) is KeyError and read.args == ("k",)
        assert "the_function_that_raises" in text and "the_relay" in text
        first = future
    assert len(text) < 10_000


def test_the_traceback_of_an_error_does_not_swell_in_a_long_chain() -> None:
    promise, future = pending()
    for _ in range(300):
        future = future.then(lambda f: f.value())
    set_raised(promise, KeyError("k"))
    read = outcome_of(future.wait)
    text = "".join(traceback.format_exception(read))
    assert type(read) is KeyError and "the_function_that_raises" in text
    assert len(text) < 30_000


def test_one_error_set_on_two_promises() -> None:
    error = TwoArguments(1, "one")
    futures = [failed(error), failed(error)]
    reads = [outcome_of(f.wait) for f in futures]
    assert reads[0] is not reads[1]
    assert all(type(r) is TwoArguments for r in reads)


# ---- Fresh at every read ------------------------------------------------------------------------

FRESH = [name for name in EXCEPTIONS if name not in ("huge",)]


@pytest.mark.parametrize("name", FRESH)
def test_each_read_is_a_fresh_exception_whose_traceback_does_not_grow(name: str) -> None:
    promise, future = pending()
    set_raised(promise, EXCEPTIONS[name]())
    reads = [outcome_of(future.wait) for _ in range(5)]
    assert len({id(read) for read in reads}) == 5
    assert len({len(traceback.extract_tb(read.__traceback__)) for read in reads}) == 1
    assert len({len(traceback.format_exception(read)) for read in reads}) == 1


@with_groups
def test_a_note_that_a_reader_adds_is_its_own() -> None:
    error = ValueError("v")
    error.add_note("of the producer")
    future = failed(error)
    for _ in range(3):
        read = outcome_of(future.wait)
        assert read.__notes__ == ["of the producer"]
        read.add_note("of the reader")
    assert error.__notes__ == ["of the producer"]


@with_groups
def test_the_members_of_a_group_are_fresh_as_well() -> None:
    promise, future = pending()
    set_raised(promise, ExceptionGroup("g", [ValueError("v"), KeyError("k")]))
    depths = set()
    for _ in range(3):
        group = outcome_of(future.wait)
        assert isinstance(group, ExceptionGroup)
        member = outcome_of(lambda g=group: the_function_that_raises(g.exceptions[0]))
        depths.add(len(traceback.extract_tb(member.__traceback__)))
    assert len(depths) == 1, "raising a member of one read shows in the next"


@pytest.mark.parametrize("name", FRESH)
def test_threads_that_read_at_once_do_not_share_an_exception(name: str) -> None:
    promise, future = pending()
    error = EXCEPTIONS[name]()
    set_raised(promise, error)
    start = threading.Barrier(4)

    def read() -> list[BaseException]:
        start.wait(LIMIT)
        return [outcome_of(future.wait) for _ in range(25)]

    workers = [Worker(read) for _ in range(4)]
    reads: list[Any] = [read for worker in workers for read in worker.finish()]
    assert len({id(read) for read in reads}) == 100
    assert {type(read) for read in reads} == {type(error)}
    assert len({len(traceback.extract_tb(read.__traceback__)) for read in reads}) == 1


# ---- Nothing is kept alive ----------------------------------------------------------------------


class Resource:
    """What a frame holds."""


LEAKY = ["KeyError", "two_arguments", "with_new", "frozen", "slotted", "OSError", "local_class"]
if ExceptionGroup is not None:
    LEAKY.append("ExceptionGroup")


@pytest.mark.parametrize("name", LEAKY)
def test_the_locals_of_the_setter_are_not_kept_alive(name: str) -> None:
    def setter(promise: Any) -> weakref.ref[Resource]:
        resource = Resource()
        try:
            raise EXCEPTIONS[name]()
        except BaseException as error:
            promise.set_exception(error)
        return weakref.ref(resource)

    promise, future = pending()
    resource = setter(promise)
    gc.collect()
    assert resource() is None
    outcome_of(future.wait)


@pytest.mark.parametrize("name", LEAKY)
def test_the_locals_of_a_callback_of_then_are_not_kept_alive(name: str) -> None:
    watched: list[weakref.ref[Resource]] = []

    def callback(f: Any) -> None:
        resource = Resource()
        watched.append(weakref.ref(resource))
        raise EXCEPTIONS[name]()

    child = ready().then(callback)
    gc.collect()
    assert watched[0]() is None
    outcome_of(child.wait)


@pytest.mark.parametrize("name", LEAKY)
def test_the_locals_of_a_reader_are_not_kept_alive(name: str) -> None:
    future = failed(EXCEPTIONS[name]())

    def reader() -> weakref.ref[Resource]:
        resource = Resource()
        try:
            future.wait()
        except BaseException:
            return weakref.ref(resource)
        raise AssertionError

    resource = reader()
    gc.collect()
    assert resource() is None


@with_groups
def test_the_locals_of_those_who_raised_the_members_of_a_group_are_not_kept_alive() -> None:
    def setter(promise: Any) -> weakref.ref[Resource]:
        resource = Resource()
        try:
            raise ValueError("a member")
        except ValueError as error:
            promise.set_exception(ExceptionGroup("g", [error]))
        return weakref.ref(resource)

    promise, future = pending()
    resource = setter(promise)
    gc.collect()
    assert resource() is None
    text = "".join(traceback.format_exception(outcome_of(future.wait)))
    assert "in setter" in text, "where the member was raised is told all the same"


def test_a_promise_that_is_a_local_of_the_setter_goes() -> None:
    """Else the promise holds the error, the error its frame, the frame the promise."""
    promise, future = pending()
    watch = weakref.ref(promise)
    set_raised(promise, WithNew(1, 2))
    del promise
    gc.collect()
    assert watch() is None
    del future


def test_reading_an_error_leaves_nothing() -> None:
    promise, future = pending()
    set_raised(promise, KeyError("k"))

    def step() -> None:
        outcome_of(future.wait)
        outcome_of(lambda: dtorch_ops.wait_all([future]))

    assert_memory_stays_flat(step, 1000)


# ---- Exceptions that are hard to carry ----------------------------------------------------------


async def _await_in_a_coroutine(future: Any) -> Any:
    return await future


@pytest.mark.parametrize("error", [StopIteration(5), StopIteration(), StopAsyncIteration("s")])
def test_await_turns_what_would_end_an_iteration_into_a_runtime_error(error: Exception) -> None:
    for future in (failed(error), ready().then(lambda f: the_function_that_raises(error))):
        for _ in range(2):
            outcome = outcome_of(lambda f=future: asyncio.run(_await_in_a_coroutine(f)))
            if isinstance(error, StopIteration):
                assert type(outcome) is RuntimeError
                assert type(outcome.__cause__) is StopIteration
                assert outcome.__cause__.args == error.args
            else:
                assert type(outcome) is StopAsyncIteration
            assert type(outcome_of(future.wait)) is type(error)


def test_await_of_a_stop_iteration_under_a_tracing_debugger_or_coverage() -> None:
    """With a trace function Python looks at the error itself to see whether the await has ended."""
    future = failed(StopIteration(5))
    tracer = sys.gettrace()
    sys.settrace(lambda *event: None)
    try:
        outcome = outcome_of(lambda: asyncio.run(_await_in_a_coroutine(future)))
    finally:
        sys.settrace(tracer)
    assert type(outcome) is RuntimeError


def test_an_await_that_is_suspended_gets_a_stop_iteration_as_runtime_error() -> None:
    promise, future = pending()
    waiter = blocked_in(lambda: asyncio.run(_await_in_a_coroutine(future)))
    promise.set_exception(StopIteration(5))
    with pytest.raises(RuntimeError) as info:
        waiter.finish()
    assert type(info.value.__cause__) is StopIteration


def test_a_generator_that_reads_a_stop_iteration() -> None:
    future = failed(StopIteration(5))

    def generator() -> Any:
        yield future.wait()

    with pytest.raises(RuntimeError) as info:
        list(generator())
    assert type(info.value.__cause__) is StopIteration


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_errors_that_end_threads_or_programs_end_only_the_reader(error: BaseException) -> None:
    promise, future = pending()
    waiters = [blocked_in(promise.get_future().get) for _ in range(3)]
    child = future.then(lambda f: f.value())
    promise.set_exception(error)
    for waiter in waiters:
        with pytest.raises(type(error)):
            waiter.finish()
    with pytest.raises(type(error)):
        child.get()
    assert ready().get() == torch.tensor(1.0)


def test_an_asyncio_cancelled_error_arrives_as_such() -> None:
    future = failed(asyncio.CancelledError("c"))
    with pytest.raises(asyncio.CancelledError):
        future.wait()

    async def main() -> str:
        try:
            await future
        except asyncio.CancelledError:
            return "cancelled"
        return "not cancelled"

    assert asyncio.run(main()) == "cancelled"


@pytest.mark.parametrize(
    "definition",
    [
        """
        class Hostile(Exception):
            @property
            def __cause__(self):
                raise ValueError("no cause")
        """,
        """
        class Meta(type):
            def __getattribute__(cls, name):
                if name == "__qualname__":
                    raise ValueError("no name")
                return super().__getattribute__(name)
        class Hostile(Exception, metaclass=Meta):
            pass
        """,
        """
        class Hostile(Exception):
            def __getattribute__(self, name):
                raise ValueError("no attribute")
        """,
        """
        class Hostile(Exception):
            def __setattr__(self, name, value):
                raise KeyboardInterrupt
        """,
    ],
    ids=["cause", "name", "getattribute", "setattr"],
)
def test_an_exception_that_cannot_be_looked_at_does_not_end_the_process(definition: str) -> None:
    """Whatever the future then fails with: it is complete, everybody is told, and told again."""
    fresh.check(
        textwrap.dedent(definition)
        + textwrap.dedent("""
        def bad(f):
            raise Hostile("mine")

        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        seen = []
        child = future.then(bad)
        future.add_done_callback(lambda f: seen.append("called"))
        promise.set_value(torch.ones(1))
        assert seen == ["called"]
        for _ in range(3):
            try:
                child.wait()
            except BaseException as error:
                kind = type(error)
            else:
                raise AssertionError("a failed callback gives a value")

        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        try:
            promise.set_exception(Hostile("mine"))
        except BaseException:
            assert promise.is_pending()  # refused is right as well, if the promise can still be set
            promise.set_exception(ValueError("instead"))
        for _ in range(3):
            try:
                future.wait(0)
            except TimeoutError:
                raise AssertionError("neither set nor refused")
            except BaseException as error:
                kind = type(error)

        stock = torch.futures.Future()
        groups = [dtorch_ops.collect_all([stock]), dtorch_ops.collect_any([stock])]
        stock.add_done_callback(lambda f: seen.append("last"))
        try:
            stock.set_exception(Hostile("mine"))
        except BaseException:
            raise AssertionError("the setter of a stock future gets an error of its readers")
        assert seen == ["called", "last"]
        assert all(group.is_ready() for group in groups)
        for group in groups * 2:
            try:
                group.wait(0)
            except BaseException as error:
                kind = type(error)
            else:
                raise AssertionError("an error became a value")
        """)
    )


# ---- Errors of torch's own futures --------------------------------------------------------------

STOCK_READS = {
    "Future_get": lambda f: dtorch_ops.Future(f).get(),
    "Future_wait": lambda f: dtorch_ops.Future(f).wait(),
    "Future_value": lambda f: dtorch_ops.Future(f).value(),
    "TensorFuture": lambda f: dtorch_ops.TensorFuture(f).get(),
    "Future_await": lambda f: asyncio.run(awaited(dtorch_ops.Future(f))),
    "await": lambda f: asyncio.run(awaited(f)),
    "then": lambda f: dtorch_ops.Future(f).then(lambda g: g.value()).get(),
    "wait_all": lambda f: dtorch_ops.wait_all([f]),
    "wait_all_with_ours": lambda f: dtorch_ops.wait_all([ready(), f, pending()[1]]),
    "collect_all": lambda f: dtorch_ops.collect_all([f]).get(),
    "collect_all_with_ours": lambda f: dtorch_ops.collect_all([ready(), f, pending()[1]]).wait(100),
    "collect_any": lambda f: dtorch_ops.collect_any([f]).get(),
    "as_completed": lambda f: dtorch_ops.Future(next(dtorch_ops.as_completed([f]))).get(),
    "wait_for_operator": lambda f: ops.wait_for(f, 1000),
    "wait_all_operator": lambda f: ops.wait_all([f]),
    "collect_all_operator": lambda f: ops.collect_all([f]).wait(),
    "collect_any_operator": lambda f: ops.collect_any([f]).wait(),
    "collect_any_of_both": lambda f: dtorch_ops.Future(ops.collect_any([f, f])).get(),
}
every_stock_way = pytest.mark.parametrize("read", STOCK_READS.values(), ids=STOCK_READS.keys())


@every_stock_way
def test_an_error_set_on_a_stock_future_is_an_error(read: Callable[[Any], Any]) -> None:
    stock = stock_failed(TwoArguments(4, "four"))
    for _ in range(2):
        outcome = outcome_of(lambda: read(stock))
        assert type(outcome) is TwoArguments
        assert outcome.args == ("4: four",) and outcome.reason == "four"


@pytest.mark.parametrize("wait", ["get", "wait_all", "collect_all", "collect_any", "operator"])
def test_an_error_set_later_on_a_stock_future(wait: str) -> None:
    stock: torch.futures.Future[Any] = torch.futures.Future()
    call: dict[str, Callable[[], Any]] = {
        "get": dtorch_ops.Future(stock).get,
        "wait_all": lambda: dtorch_ops.wait_all([pending()[1], stock]),
        "collect_all": lambda: dtorch_ops.collect_all([stock]).get(),
        "collect_any": lambda: dtorch_ops.collect_any([stock]).get(),
        "operator": lambda: ops.wait_for(stock, 60_000),
    }
    waiter = blocked_in(call[wait])
    stock.set_exception(KeyError("later"))
    with pytest.raises((KeyError, dtorch_ops.BrokenPromiseError)) as info:
        waiter.finish()
    assert info.value.args == ("later",) or wait == "wait_all"


def test_the_state_of_a_failed_stock_future_is_failed() -> None:
    assert repr(dtorch_ops.Future(stock_failed(ValueError()))) == "<Future failed>"


def test_the_error_of_a_stock_chain() -> None:
    """Torch's own ``then`` makes a RuntimeError of every error; that much arrives."""
    stock: torch.futures.Future[Any] = torch.futures.Future()
    child = stock.then(lambda f: f.value() / 0)
    stock.set_result(1)
    for read in STOCK_READS.values():
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            read(child)


def test_errors_reach_torch_functions_and_stock_chains_of_ours() -> None:
    future = failed(KeyError("k"))
    with pytest.raises(KeyError):
        torch.futures.wait_all([future])
    with pytest.raises(KeyError):
        torch.futures.collect_all([future]).wait()[0].wait()
