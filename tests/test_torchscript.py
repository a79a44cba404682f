"""All that needs ``torch.jit``: the operators in scripted and traced programs, in one process."""

from __future__ import annotations

import asyncio
import io
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import Worker, check_python, run_python
from torch import Tensor
from torch.futures import Future

import dtorch_ops

ops = torch.ops.dtorch

# TorchScript is being retired and says so at every turn.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),
]


def failed(error: BaseException) -> dtorch_ops.TensorFuture:
    promise = dtorch_ops.TensorPromise()
    promise.set_exception(error)
    return promise.get_future()


def stock(value: Tensor | BaseException) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def save_and_load(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer).eval()


# ---- Programs -----------------------------------------------------------------------------------
# Each is compiled by the tests that use it.


def fetch(x: Tensor) -> Tensor:
    return torch.jit.wait(torch.ops.dtorch.get_tensor_async(x))


def fetch_copy(x: Tensor) -> Tensor:
    return torch.jit.wait(torch.ops.dtorch.get_tensor_async(x, copy=True))


def fetch_to(x: Tensor, device: str) -> Tensor:
    return torch.jit.wait(torch.ops.dtorch.get_tensor_async(x, device=torch.device(device)))


def give_future(x: Tensor) -> Future[Tensor]:
    return torch.ops.dtorch.get_tensor_async(x)


def wait(f: Future[Tensor]) -> Tensor:
    return torch.jit.wait(f)


def wait_method(f: Future[Tensor]) -> Tensor:
    return f.wait()


def wait_add(f: Future[Tensor]) -> Tensor:
    return torch.jit.wait(f) + 1


def wait_nothing(f: Future[None]) -> None:
    torch.jit.wait(f)


def wait_for(f: Future[Tensor], timeout_ms: int) -> Tensor:
    return torch.ops.dtorch.wait_for(f, timeout_ms)


def is_ready(f: Future[Tensor]) -> bool:
    return torch.ops.dtorch.is_ready(f)


def wait_all(fs: list[Future[Tensor]]) -> list[Tensor]:
    return torch.futures.wait_all(fs)


def collect_all(fs: list[Future[Tensor]]) -> list[Tensor]:
    values: list[Tensor] = []
    for f in torch.jit.wait(torch.futures.collect_all(fs)):
        values.append(torch.jit.wait(f))
    return values


def wait_all_operator(fs: list[Future[Tensor]]) -> list[Tensor]:
    return torch.ops.dtorch.wait_all(fs)


def collect_all_operator(fs: list[Future[Tensor]]) -> list[Tensor]:
    values: list[Tensor] = []
    for f in torch.jit.wait(torch.ops.dtorch.collect_all(fs)):
        values.append(torch.jit.wait(f))
    return values


def collect_any(fs: list[Future[Tensor]]) -> Tensor:
    return torch.jit.wait(torch.ops.dtorch.collect_any(fs))


def fulfil(x: Tensor, promise: torch.classes.dtorch.TensorPromise) -> None:
    torch.ops.dtorch.get_tensor(x, promise)


def sync_first(promise: torch.classes.dtorch.VoidPromise) -> None:
    torch.ops.dtorch.sync(promise)


def sync_second(promise: torch.classes.dtorch.VoidPromise) -> None:
    torch.ops.dtorch.sync([torch.device("cpu")], promise)


def sync_unused() -> None:
    torch.ops.dtorch.sync()


def sync_wait() -> None:
    torch.jit.wait(torch.ops.dtorch.sync([torch.device("cpu")]))


# ---- Futures and values -------------------------------------------------------------------------


@pytest.mark.parametrize("program", [fetch, fetch_copy], ids=lambda p: p.__name__)
def test_a_scripted_call(program):
    scripted = torch.jit.script(program)
    x = torch.ones(2)
    for _ in range(4):
        result = scripted(x)
        assert result.tolist() == [1, 1]
        assert (result.data_ptr() == x.data_ptr()) == (program is fetch)


def test_a_scripted_call_with_a_device():
    scripted = torch.jit.script(fetch_to)
    x = torch.ones(2)
    assert scripted(x, "cpu").data_ptr() == x.data_ptr()
    assert scripted(x, "cpu:0").data_ptr() == x.data_ptr()
    assert scripted(x, "meta").device.type == "meta"


def test_a_future_may_leave_a_scripted_function():
    future = torch.jit.script(give_future)(torch.ones(2))
    assert isinstance(future, torch._C.Future)
    assert future.wait().tolist() == [1, 1]
    assert dtorch_ops.Future(future).get().tolist() == [1, 1]


async def _await(future: torch._C.Future[Tensor]) -> Tensor:
    return await future


def test_a_future_of_a_scripted_function_can_be_awaited():
    assert asyncio.run(_await(torch.jit.script(give_future)(torch.ones(2)))).tolist() == [1, 1]


KINDS: dict[str, Callable[[Tensor], torch._C.Future[Tensor]]] = {
    "ours": dtorch_ops.to_torch_async,
    "bare": ops.get_tensor_async,
    "stock": stock,
    "handle": lambda t: dtorch_ops.Future(ops.get_tensor_async(t)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_futures_of_any_origin_as_arguments(kind):
    future = KINDS[kind](torch.ones(2))
    for program in (wait, wait_method):
        assert torch.jit.script(program)(future).tolist() == [1, 1]
    assert torch.jit.script(wait_for)(future, 1000).tolist() == [1, 1]
    assert torch.jit.script(is_ready)(future) is True


GROUPS = [wait_all, wait_all_operator, collect_all, collect_all_operator]
groups = pytest.mark.parametrize("program", GROUPS, ids=lambda p: p.__name__)


@groups
def test_groups_of_futures_of_any_origin(program):
    futures = [make(torch.tensor(float(i))) for i, make in enumerate(KINDS.values())]
    scripted = torch.jit.script(program)
    for _ in range(3):
        assert [t.item() for t in scripted(futures)] == [0, 1, 2, 3]
    assert scripted([]) == []
    assert [t.item() for t in scripted([futures[1]] * 2)] == [1, 1]
    assert futures[0].valid()  # nothing is consumed


def test_collect_any_of_a_group():
    scripted = torch.jit.script(collect_any)
    pending = dtorch_ops.TensorPromise()
    futures = [pending.get_future(), dtorch_ops.to_torch_async(torch.tensor(1.0))]
    assert scripted(futures).item() == 1
    with pytest.raises(RuntimeError, match="at least one future"):
        scripted([])
    pending.set_value(torch.tensor(0.0))
    assert scripted(futures).item() == 0


@groups
def test_a_group_waits_for_another_thread(program):
    promises = [dtorch_ops.TensorPromise() for _ in range(3)]
    futures = [p.get_future() for p in promises]
    scripted = torch.jit.script(program)
    waiter = Worker(lambda: scripted(futures))
    for i in (1, 2, 0):
        promises[i].set_value(torch.tensor(float(i)))
    assert [t.item() for t in waiter.finish()] == [0, 1, 2]


def test_is_ready_tells_before_and_after():
    promise = dtorch_ops.TensorPromise()
    scripted = torch.jit.script(is_ready)
    assert scripted(promise.get_future()) is False
    promise.set_value(torch.ones(1))
    assert scripted(promise.get_future()) is True
    assert scripted(failed(ValueError("no"))) is True


def test_wait_for_has_a_bound():
    promise = dtorch_ops.TensorPromise()
    future = promise.get_future()
    scripted = torch.jit.script(wait_for)
    for timeout_ms in (0, 30):
        with pytest.raises(RuntimeError, match="did not complete within the time limit"):
            scripted(future, timeout_ms)
    with pytest.raises(RuntimeError, match="expected a number of milliseconds >= 0, got -1"):
        scripted(future, -1)
    waiter = Worker(lambda: scripted(future, 2**62))
    promise.set_value(torch.ones(1))
    assert waiter.finish().item() == 1
    assert scripted(future, 0).item() == 1


def test_a_future_of_nothing():
    torch.jit.script(sync_wait)()
    torch.jit.script(wait_nothing)(dtorch_ops.sync_future())
    promise = dtorch_ops.VoidPromise()
    waiter = Worker(lambda: torch.jit.script(wait_nothing)(promise.get_future()))
    promise.set_value()
    waiter.finish()


def loop(x: Tensor, n: int) -> Tensor:
    futures = [torch.ops.dtorch.get_tensor_async(x * i, copy=True) for i in range(n)]
    return torch.stack(torch.ops.dtorch.wait_all(futures)).sum()


def test_futures_in_a_loop():
    scripted = torch.jit.script(loop)
    for n in (1, 2, 3, 4):
        assert scripted(torch.ones(1), n).item() == n * (n - 1) / 2


# ---- Errors -------------------------------------------------------------------------------------

READERS: dict[str, tuple[Callable[..., object], Callable[..., tuple[object, ...]]]] = {
    "wait": (wait, lambda f: (f,)),
    "wait_method": (wait_method, lambda f: (f,)),
    "wait_for": (wait_for, lambda f: (f, 1000)),
    **{p.__name__: (p, lambda f: ([f],)) for p in [*GROUPS, collect_any]},
}
readers = pytest.mark.parametrize("program, arguments", READERS.values(), ids=READERS)


class Peculiar(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(left, right)

    def __str__(self) -> str:
        return "a peculiar message"


@readers
@pytest.mark.parametrize(
    "error, message",
    [
        (ValueError("the message"), "the message"),
        (KeyError("k"), "KeyError: 'k'"),
        (Peculiar(1, 2), "a peculiar message"),
        (StopIteration(3), "StopIteration: 3"),
        (SystemExit(4), "SystemExit: 4"),
        (TimeoutError(), "TimeoutError"),
    ],
    ids=lambda e: type(e).__name__ if isinstance(e, BaseException) else "",
)
def test_an_error_set_from_python_is_an_error(program, arguments, error, message):
    scripted = torch.jit.script(program)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            scripted(*arguments(failed(error)))


@pytest.mark.parametrize("name", sorted(set(READERS) - {"wait", "wait_method"}))
def test_an_error_of_a_stock_future_is_an_error_to_our_operators(name):
    """``torch.jit.wait`` on such a future is torch's own, and returns the exception object."""
    program, arguments = READERS[name]
    with pytest.raises(RuntimeError, match="the message"):
        torch.jit.script(program)(*arguments(stock(ValueError("the message"))))


@readers
def test_a_broken_promise_is_an_error(program, arguments):
    future = dtorch_ops.TensorPromise().get_future()
    with pytest.raises(RuntimeError, match="dropped"):
        torch.jit.script(program)(*arguments(future))


@readers
def test_a_cancelled_promise_is_an_error(program, arguments):
    promise = dtorch_ops.TensorPromise()
    promise.cancel()
    with pytest.raises(RuntimeError, match="cancelled"):
        torch.jit.script(program)(*arguments(promise.get_future()))


@readers
def test_an_error_from_another_thread_ends_the_wait(program, arguments):
    promise = dtorch_ops.TensorPromise()
    scripted = torch.jit.script(program)
    waiter = Worker(lambda: scripted(*arguments(promise.get_future())))
    promise.set_exception(ValueError("the message"))
    with pytest.raises(RuntimeError, match="the message"):
        waiter.finish()


@groups
@pytest.mark.parametrize("first", ["pending", "failed"])
@pytest.mark.parametrize("make", [failed, stock])
def test_a_group_fails_at_once_while_the_rest_still_runs(program, first, make):
    promise = dtorch_ops.TensorPromise()
    group = [promise.get_future(), make(ValueError("the message"))]
    if first == "failed":
        group.reverse()
    scripted = torch.jit.script(program)
    with pytest.raises(RuntimeError, match="the message"):
        Worker(lambda: scripted(group)).finish()
    promise.set_value(torch.ones(1))
    assert promise.get_future().get().item() == 1


def caught(f: Future[Tensor], x: Tensor) -> Tensor:
    return x + torch.jit.wait(torch.ops.dtorch.get_tensor_async(torch.jit.wait(f)))


def test_an_error_never_becomes_a_value_in_an_expression():
    with pytest.raises(RuntimeError, match="the message"):
        torch.jit.script(caught)(failed(ValueError("the message")), torch.ones(1))


@pytest.mark.parametrize(
    "future",
    [
        lambda: dtorch_ops.sync_future(),
        lambda: dtorch_ops.collect_all([]),
        lambda: dtorch_ops.to_torch_async(torch.ones(1)).then(lambda f: "text"),
    ],
    ids=["nothing", "list", "string"],
)
def test_a_future_of_another_type_is_an_error_at_its_use(future):
    with pytest.raises(RuntimeError, match="Expected Tensor but got"):
        torch.jit.script(wait_add)(future())


def no_tensor(x: Tensor) -> Tensor:
    return torch.jit.wait(torch.ops.dtorch.get_tensor_async(3))


def wrong_promise(x: Tensor, promise: torch.classes.dtorch.VoidPromise) -> None:
    torch.ops.dtorch.get_tensor(x, promise)


def no_future(x: Tensor) -> bool:
    return torch.ops.dtorch.is_ready(x)


def no_time(f: Future[Tensor]) -> Tensor:
    return torch.ops.dtorch.wait_for(f, "soon")


def no_futures(x: list[Tensor]) -> list[Tensor]:
    return torch.futures.wait_all(x)


@pytest.mark.parametrize(
    "program, expected",
    [
        (no_tensor, "Expected a value of type 'Tensor' for argument 'self'"),
        (wrong_promise, "Expected a value of type '.*TensorPromise.*' for argument 'promise'"),
        (no_future, r"Tensor to Future\[t\] in argument 'future'"),
        (no_time, "Expected a value of type 'int' for argument 'timeout_ms'"),
        (no_futures, r"List\[Tensor\] to List\[Future\[t\]\] in argument 'futures'"),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_wrong_types_are_refused_when_compiling(program, expected):
    with pytest.raises(RuntimeError, match=expected):
        torch.jit.script(program)


def test_wrong_arguments_are_errors_when_run():
    with pytest.raises(RuntimeError, match="expected a TensorPromise, got a VoidPromise"):
        torch.jit.script(fulfil)(torch.ones(1), dtorch_ops.VoidPromise())
    with pytest.raises(RuntimeError, match="expected a VoidPromise, got a TensorPromise"):
        torch.jit.script(sync_first)(dtorch_ops.TensorPromise())
    with pytest.raises(RuntimeError, match="TensorPromise"):
        torch.jit.script(fulfil)(torch.ones(1), None)
    with pytest.raises(RuntimeError, match="Future"):
        torch.jit.script(wait)(torch.ones(1))
    with pytest.raises(RuntimeError, match="expected a tensor, got an undefined one"):
        torch.jit.script(fetch)(None)
    with pytest.raises(RuntimeError, match=r"expected a device .*\(cpu, meta.* got privateuseone"):
        torch.jit.script(fetch_to)(torch.ones(1), "privateuseone")


# ---- Promises -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [dtorch_ops.TensorPromise, torch.classes.dtorch.TensorPromise])
def test_a_promise_as_an_argument(make):
    scripted = torch.jit.script(fulfil)
    for i in range(6):
        promise = make()
        future = ops.get_future(promise)
        assert scripted(torch.tensor(float(i)), promise) is None
        assert future.wait().item() == i


def test_a_promise_takes_one_value_from_scripts_too():
    scripted = torch.jit.script(fulfil)
    promise = dtorch_ops.TensorPromise()
    scripted(torch.ones(1), promise)
    with pytest.raises(RuntimeError, match="fulfilled before"):
        scripted(torch.ones(1), promise)


def own_promise(x: Tensor) -> Tensor:
    promise = torch.classes.dtorch.TensorPromise()
    future = torch.ops.dtorch.get_future(promise)
    torch.ops.dtorch.get_tensor(x, promise)
    return torch.jit.wait(future)


def own_promise_set(x: Tensor) -> Tensor:
    promise = torch.classes.dtorch.TensorPromise()
    promise.set_value(x)
    return torch.ops.dtorch.wait_for(torch.ops.dtorch.get_future(promise), 1000)


def own_promise_failed(x: Tensor) -> Tensor:
    promise = torch.classes.dtorch.TensorPromise()
    promise.set_exception("the message")
    return torch.jit.wait(torch.ops.dtorch.get_future(promise))


def own_promise_cancelled(x: Tensor) -> Tensor:
    promise = torch.classes.dtorch.TensorPromise()
    assert promise.cancel()
    assert not promise.cancel()
    return torch.jit.wait(torch.ops.dtorch.get_future(promise))


def own_promise_dropped(x: Tensor) -> Future[Tensor]:
    promise = torch.classes.dtorch.TensorPromise()
    return torch.ops.dtorch.get_future(promise)


def own_void_promise(x: Tensor) -> Tensor:
    promise = torch.classes.dtorch.VoidPromise()
    future = torch.ops.dtorch.get_future(promise)
    torch.ops.dtorch.sync(promise)
    torch.jit.wait(future)
    other = torch.classes.dtorch.VoidPromise()
    other.set_value()
    torch.jit.wait(torch.ops.dtorch.get_future(other))
    return x


@pytest.mark.parametrize(
    "program", [own_promise, own_promise_set, own_void_promise], ids=lambda p: p.__name__
)
def test_a_promise_made_in_a_script(program):
    scripted = torch.jit.script(program)
    for i in range(4):
        assert scripted(torch.tensor(float(i))).item() == i


@pytest.mark.parametrize(
    "program, message",
    [(own_promise_failed, "the message"), (own_promise_cancelled, "cancelled")],
    ids=["failed", "cancelled"],
)
def test_a_promise_failed_in_a_script(program, message):
    with pytest.raises(RuntimeError, match=message):
        torch.jit.script(program)(torch.ones(1))


def test_a_promise_dropped_by_a_script_is_broken():
    future = torch.jit.script(own_promise_dropped)(torch.ones(1))
    with pytest.raises(dtorch_ops.BrokenPromiseError):
        future.wait()


class Holding(torch.nn.Module):
    """Has a promise for an attribute."""

    def __init__(self, promise: object) -> None:
        super().__init__()
        self.promise = promise

    def forward(self, x: Tensor) -> Tensor:
        torch.ops.dtorch.get_tensor(x, self.promise)
        return x


class Mine(dtorch_ops.TensorPromise):
    """A subclass, which torch.jit.script must not take for a class to compile."""


@pytest.mark.parametrize(
    "compile_",
    [torch.jit.script, lambda m: torch.jit.freeze(torch.jit.script(m.eval()))],
    ids=["script", "freeze"],
)
@pytest.mark.parametrize(
    "make", [dtorch_ops.TensorPromise, torch.classes.dtorch.TensorPromise, Mine]
)
def test_a_module_that_holds_a_promise(make, compile_):
    promise = make()
    module = compile_(Holding(promise))
    assert not ops.get_future(promise).done()
    module(torch.ones(1))
    assert ops.get_future(promise).wait().item() == 1


def test_a_promise_of_the_memory_backend_cannot_be_saved_and_says_so():
    module = torch.jit.script(Holding(dtorch_ops.TensorPromise(mode="memory")))
    with pytest.raises(dtorch_ops.DTorchError, match="memory"):
        torch.jit.save(module, io.BytesIO())
    module(torch.ones(1))  # unharmed
    assert ops.get_future(module.promise).wait().item() == 1


# ---- Effects ------------------------------------------------------------------------------------


class Fulfil(torch.nn.Module):
    """Does nothing but fulfil a promise."""

    def forward(self, x: Tensor, promise: torch.classes.dtorch.TensorPromise) -> None:
        torch.ops.dtorch.get_tensor(x, promise)


class Sync(torch.nn.Module):
    """Does nothing but sync."""

    def forward(self, promise: torch.classes.dtorch.VoidPromise) -> None:
        torch.ops.dtorch.sync()
        torch.ops.dtorch.sync()
        torch.ops.dtorch.sync(promise)


class Mixed(torch.nn.Module):
    """Computes, and has effects on the side that the result does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(self.layer.weight, 1.0)
        torch.nn.init.constant_(self.layer.bias, 0.5)

    def forward(
        self,
        x: Tensor,
        promise: torch.classes.dtorch.TensorPromise,
        done: torch.classes.dtorch.VoidPromise,
    ) -> Tensor:
        y = torch.relu(self.layer(x))
        first = torch.ops.dtorch.get_tensor_async(y, copy=True)
        second = torch.ops.dtorch.get_tensor_async(y, copy=True)
        torch.ops.dtorch.get_tensor(y, promise)
        torch.ops.dtorch.sync(done)
        torch.ops.dtorch.is_ready(first)
        torch.ops.dtorch.is_ready(first)
        torch.jit.wait(first).zero_()
        return torch.jit.wait(second)


class Constant(torch.nn.Module):
    """Depends on nothing but what it has of its own, which freezing makes constants of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        torch.ops.dtorch.sync()
        first = torch.ops.dtorch.get_tensor_async(self.weight, copy=True)
        second = torch.ops.dtorch.get_tensor_async(self.weight, copy=True)
        torch.jit.wait(first).zero_()
        torch.ops.dtorch.collect_all([first, second])
        return torch.jit.wait(second) + x


class Unused(torch.nn.Module):
    """Calls every operator, and uses no result."""

    def forward(
        self,
        x: Tensor,
        p: torch.classes.dtorch.TensorPromise,
        first: torch.classes.dtorch.VoidPromise,
        second: torch.classes.dtorch.VoidPromise,
    ) -> Tensor:
        f = torch.ops.dtorch.get_future(p)
        torch.ops.dtorch.get_future(first)
        torch.ops.dtorch.get_tensor(x, p)
        torch.ops.dtorch.sync(first)
        torch.ops.dtorch.sync(None, second)
        torch.ops.dtorch.sync([x.device])
        g = torch.ops.dtorch.get_tensor_async(x)
        torch.ops.dtorch.is_ready(f)
        torch.ops.dtorch.is_ready(f)
        torch.ops.dtorch.wait_for(f, 1000)
        torch.ops.dtorch.wait_for(f, 1000)
        torch.ops.dtorch.wait_all([f, g])
        torch.ops.dtorch.wait_all([f, g])
        torch.ops.dtorch.collect_all([f, g])
        torch.ops.dtorch.collect_all([f, g])
        torch.ops.dtorch.collect_any([f])
        torch.ops.dtorch.collect_any([f])
        return x


def profiled(module: torch.nn.Module, run: Callable[[object], None]) -> object:
    scripted = torch.jit.script(module.eval())
    for _ in range(5):
        run(scripted)
    return scripted


STAGES: dict[str, Callable[[torch.nn.Module, Callable[[object], None]], object]] = {
    "scripted": lambda m, run: torch.jit.script(m.eval()),
    "profiled": profiled,
    "frozen": lambda m, run: torch.jit.freeze(torch.jit.script(m.eval())),
    "optimised": lambda m, run: torch.jit.optimize_for_inference(torch.jit.script(m.eval())),
    "loaded": lambda m, run: save_and_load(torch.jit.script(m.eval())),
    "frozen and loaded": lambda m, run: save_and_load(torch.jit.freeze(torch.jit.script(m.eval()))),
    "loaded and optimised": lambda m, run: torch.jit.optimize_for_inference(
        torch.jit.freeze(save_and_load(profiled(m, run)))
    ),
}
stages = pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)


def run_fulfil(module: object) -> None:
    promise = dtorch_ops.TensorPromise()
    module(torch.tensor([1.0, 2.0]), promise)
    assert promise.get_future().wait(0).tolist() == [1, 2]


def run_sync(module: object) -> None:
    promise = dtorch_ops.VoidPromise()
    module(promise)
    promise.get_future().wait(0)


def run_mixed(module: object) -> None:
    promise, done = dtorch_ops.TensorPromise(), dtorch_ops.VoidPromise()
    result = module(torch.tensor([[1.0, 2.0]]), promise, done)
    assert result.tolist() == [[3.5, 3.5]]
    assert promise.get_future().wait(0).tolist() == [[3.5, 3.5]]
    done.get_future().wait(0)


def run_constant(module: object) -> None:
    for value in (1.0, 2.0):
        assert module(torch.full((3,), value)).tolist() == [value + 1] * 3


def run_unused(module: object) -> None:
    promise, first, second = dtorch_ops.TensorPromise(), *(dtorch_ops.VoidPromise() for _ in "12")
    module(torch.ones(2), promise, first, second)
    assert promise.get_future().wait(0).tolist() == [1, 1]
    first.get_future().wait(0)
    second.get_future().wait(0)


UNUSED = {
    **{"get_future": 2, "get_tensor": 1, "get_tensor_async": 1, "sync": 3, "is_ready": 2},
    **{"wait_for": 2, "wait_all": 2, "collect_all": 2, "collect_any": 2},
}


@stages
@pytest.mark.parametrize(
    "module, run, kept",
    [
        (Fulfil, run_fulfil, {"get_tensor": 1}),
        (Sync, run_sync, {"sync": 3}),
        (Mixed, run_mixed, {"get_tensor_async": 2, "get_tensor": 1, "sync": 1, "is_ready": 2}),
        (Constant, run_constant, {"get_tensor_async": 2, "sync": 1, "collect_all": 1}),
        (Unused, run_unused, UNUSED),
    ],
    ids=["fulfil", "sync", "mixed", "constant", "unused"],
)
def test_effects_survive(stage, module, run, kept):
    with torch.no_grad():
        compiled = stage(module(), run)
        for _ in range(5):
            run(compiled)
        executed = torch.jit.last_executed_optimized_graph()
    for graph in (compiled.graph, executed):
        found = {name: len(list(graph.findAllNodes(f"dtorch::{name}"))) for name in kept}
        assert found == kept, graph


@pytest.mark.parametrize(
    "program, call, name",
    [
        (fulfil, lambda s: s(torch.ones(1), dtorch_ops.TensorPromise()), "get_tensor"),
        (sync_first, lambda s: s(dtorch_ops.VoidPromise()), "sync"),
        (sync_second, lambda s: s(dtorch_ops.VoidPromise()), "sync"),
        (sync_unused, lambda s: s(), "sync"),
    ],
    ids=["get_tensor", "sync promise", "sync devices promise", "sync unused"],
)
def test_a_function_that_has_one_effect_keeps_it(program, call, name):
    scripted = torch.jit.script(program)
    for _ in range(6):
        call(scripted)
        graph = torch.jit.last_executed_optimized_graph()
        assert len(list(graph.findAllNodes(f"dtorch::{name}"))) == 1, graph


@pytest.mark.parametrize("program", [sync_first, sync_second], ids=["first", "second"])
def test_both_orders_of_the_arguments_of_sync(program):
    promise = dtorch_ops.VoidPromise()
    torch.jit.script(program)(promise)
    assert promise.get_future().is_ready()


def two_copies(x: Tensor) -> list[Tensor]:
    a = torch.ops.dtorch.get_tensor_async(x, copy=True)
    b = torch.ops.dtorch.get_tensor_async(x, copy=True)
    return [torch.jit.wait(a), torch.jit.wait(b)]


def two_futures(p: torch.classes.dtorch.TensorPromise) -> list[Future[Tensor]]:
    return [torch.ops.dtorch.get_future(p), torch.ops.dtorch.get_future(p)]


def ready_before_and_after(x: Tensor, p: torch.classes.dtorch.TensorPromise) -> list[bool]:
    future = torch.ops.dtorch.get_future(p)
    before = torch.ops.dtorch.is_ready(future)
    torch.ops.dtorch.get_tensor(x, p)
    after = torch.ops.dtorch.is_ready(future)
    return [before, after]


def snapshot_then_write(x: Tensor) -> Tensor:
    future = torch.ops.dtorch.get_tensor_async(x, copy=True)
    x.add_(1)
    return torch.jit.wait(future)


def write_then_fetch(x: Tensor) -> Tensor:
    future = torch.ops.dtorch.get_tensor_async(x)
    x.add_(1)
    return torch.jit.wait(future) + 0


def test_two_equal_calls_are_two():
    scripted = torch.jit.script(two_copies)
    for _ in range(5):
        first, second = scripted(torch.ones(1))
        assert first.data_ptr() != second.data_ptr()
    assert (
        len(
            list(torch.jit.last_executed_optimized_graph().findAllNodes("dtorch::get_tensor_async"))
        )
        == 2
    )
    promise = dtorch_ops.TensorPromise()
    scripted = torch.jit.script(two_futures)
    for _ in range(5):
        assert len(scripted(promise)) == 2
    assert (
        len(list(torch.jit.last_executed_optimized_graph().findAllNodes("dtorch::get_future"))) == 2
    )


def test_no_call_is_moved_across_an_effect():
    scripted = torch.jit.script(ready_before_and_after)
    for _ in range(5):
        assert scripted(torch.ones(1), dtorch_ops.TensorPromise()) == [False, True]


def test_no_call_is_moved_across_a_write():
    before, after = torch.jit.script(snapshot_then_write), torch.jit.script(write_then_fetch)
    for _ in range(5):
        assert before(torch.zeros(1)).item() == 0
        assert after(torch.zeros(1)).item() == 1


def test_save_and_load_keeps_every_operator():
    """Each program, saved and loaded by name and schema alone, still runs."""

    class All(torch.nn.Module):
        def forward(self, x: Tensor, p: torch.classes.dtorch.TensorPromise) -> Tensor:
            future = torch.ops.dtorch.get_future(p)
            v = torch.classes.dtorch.VoidPromise()
            torch.ops.dtorch.sync(None, v)
            torch.jit.wait(torch.ops.dtorch.get_future(v))
            torch.jit.wait(torch.ops.dtorch.sync([x.device]))
            torch.ops.dtorch.get_tensor(x * 2, p)
            fetched = torch.ops.dtorch.get_tensor_async(x, device=torch.device("cpu"), copy=True)
            fs = [future, fetched]
            total = torch.ops.dtorch.wait_for(future, 1000)
            for f in torch.jit.wait(torch.ops.dtorch.collect_all(fs)):
                if torch.ops.dtorch.is_ready(f):
                    total = total + torch.jit.wait(f)
            total = total + torch.jit.wait(torch.ops.dtorch.collect_any(fs))
            for t in torch.futures.wait_all(fs):
                total = total + t
            return total

    scripted = torch.jit.script(All().eval())
    loaded = save_and_load(scripted)
    assert "torch.ops.dtorch" in loaded.code or "ops.dtorch" in loaded.code
    for module in (scripted, loaded, torch.jit.optimize_for_inference(torch.jit.freeze(loaded))):
        for _ in range(3):
            # 2 x, then 2 x + x, then 2 x, then 2 x + x
            assert module(torch.ones(1), dtorch_ops.TensorPromise()).item() == 10


# ---- Gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program", [fetch, fetch_copy, own_promise, own_promise_set], ids=lambda p: p.__name__
)
def test_gradients_go_through_a_scripted_function(program):
    scripted = torch.jit.script(program)
    for _ in range(4):
        leaf = torch.ones(2, requires_grad=True)
        (scripted(leaf * 2) * 3).sum().backward()
        assert leaf.grad.tolist() == [6, 6]


def weighted(x: Tensor, w: Tensor) -> Tensor:
    y = torch.jit.wait(torch.ops.dtorch.get_tensor_async(torch.tanh(x * w), copy=True))
    return (y * y).sum()


def test_gradients_of_a_computation_that_is_optimised():
    scripted = torch.jit.script(weighted)
    for _ in range(5):
        leaves = [torch.tensor([0.5, 1.0], requires_grad=True) for _ in range(4)]
        scripted(leaves[0], leaves[1]).backward()
        weighted(leaves[2], leaves[3]).backward()
        assert torch.allclose(leaves[0].grad, leaves[2].grad)
        assert torch.allclose(leaves[1].grad, leaves[3].grad)


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.jit.wait(torch.ops.dtorch.get_tensor_async(x, copy=True))


def test_no_grad_in_a_script():
    assert not torch.jit.script(without_grad)(torch.ones(1, requires_grad=True)).requires_grad


# ---- fork ---------------------------------------------------------------------------------------


def forked_fetches(xs: list[Tensor]) -> list[Tensor]:
    futures: list[Future[Tensor]] = []
    for x in xs:
        futures.append(torch.jit.fork(fetch_copy, x))
    return torch.futures.wait_all(futures)


def forked_wait(f: Future[Tensor]) -> Tensor:
    return torch.jit.wait(torch.jit.fork(wait, f))


def forked_fulfil(x: Tensor, promise: torch.classes.dtorch.TensorPromise) -> Tensor:
    future = torch.ops.dtorch.get_future(promise)
    waiting = torch.jit.fork(wait, future)
    fulfilling = torch.jit.fork(fulfil, x, promise)
    torch.jit.wait(fulfilling)
    return torch.jit.wait(waiting)


def test_operators_inside_of_fork():
    scripted = torch.jit.script(forked_fetches)
    assert [t.item() for t in scripted([torch.tensor(float(i)) for i in range(8)])] == [*range(8)]


def test_a_future_waited_for_inside_of_fork():
    promise = dtorch_ops.TensorPromise()
    scripted = torch.jit.script(forked_wait)
    waiter = Worker(lambda: scripted(promise.get_future()))
    promise.set_value(torch.ones(1))
    assert waiter.finish().item() == 1
    with pytest.raises(RuntimeError, match="the message"):
        scripted(failed(ValueError("the message")))


def test_a_promise_fulfilled_inside_of_fork():
    scripted = torch.jit.script(forked_fulfil)
    for _ in range(4):
        assert scripted(torch.ones(1), dtorch_ops.TensorPromise()).item() == 1


def test_gradients_go_through_fork():
    leaf = torch.ones(1, requires_grad=True)
    (torch.jit.script(forked_fetches)([leaf * 2])[0] * 3).backward()
    assert leaf.grad.item() == 6


PROGRAM = """
    import os
    import sys
    import warnings

    import torch
    from torch import Tensor
    from torch.futures import Future

    import dtorch_ops

    warnings.filterwarnings("ignore", message=".torch.jit")
    torch.set_num_interop_threads(1)

    def leave() -> None:
        # Plain torch aborts about every second time when a process ends just after a fork.
        sys.stdout.flush()
        os._exit(0)
"""


def program_file(path: Path, text: str) -> str:
    """TorchScript wants the source of what it compiles in a file."""
    file = path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM) + textwrap.dedent(text))
    return f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')"


def test_one_inter_op_thread_is_enough_for_forks_that_fetch(tmp_path):
    program = """
    def task(x: Tensor) -> Tensor:
        return torch.jit.wait(torch.ops.dtorch.get_tensor_async(x, copy=True))

    @torch.jit.script
    def main(x: Tensor) -> list[Tensor]:
        tasks = [torch.jit.fork(task, x * i) for i in range(4)]
        return torch.futures.wait_all(tasks)

    print([t.item() for t in main(torch.ones(1))])
    leave()
    """
    assert check_python(program_file(tmp_path, program), timeout=30) == "[0.0, 1.0, 2.0, 3.0]\n"


@pytest.mark.parametrize(
    "waiting",
    [
        "torch.jit.wait(f)",
        "torch.jit.wait(torch.jit.wait(torch.futures.collect_all([f]))[0])",
        "torch.jit.wait(torch.ops.dtorch.collect_any([f]))",
    ],
    ids=["wait", "collect_all", "collect_any"],  # wait_all and wait_for block: see docs/design.md
)
def test_one_inter_op_thread_is_enough_for_forks_that_wait_for_each_other(tmp_path, waiting):
    """Four tasks wait for a promise; the task that fulfils it is queued behind them."""
    program = f"""
    def wait(f: Future[Tensor]) -> Tensor:
        return {waiting}

    def fulfil(x: Tensor, p: torch.classes.dtorch.TensorPromise) -> Tensor:
        torch.ops.dtorch.get_tensor(x, p)
        return x

    @torch.jit.script
    def main(x: Tensor, p: torch.classes.dtorch.TensorPromise) -> Tensor:
        f = torch.ops.dtorch.get_future(p)
        tasks = [torch.jit.fork(wait, f) for i in range(4)]
        tasks.append(torch.jit.fork(fulfil, x, p))
        total = x
        for task in tasks:
            total = total + torch.jit.wait(task)
        return total

    print(main(torch.ones(1), dtorch_ops.TensorPromise()).item())
    leave()
    """
    assert check_python(program_file(tmp_path, program), timeout=15) == "6.0\n"


@pytest.mark.parametrize(
    "waiting", ["torch.futures.wait_all([f])[0]", "torch.ops.dtorch.wait_for(f, 3600000)"]
)
def test_ctrl_c_ends_a_wait_in_a_script(tmp_path, waiting):
    program = f"""
    import signal, threading, time

    @torch.jit.script
    def wait(f: Future[Tensor]) -> Tensor:
        return {waiting}

    promise = dtorch_ops.TensorPromise()
    future = promise.get_future()

    def interrupt():
        asleep = 0
        while asleep < 50:  # not just for the interpreter lock, which each look gives up
            with open(f"/proc/self/task/{{os.getpid()}}/stat") as stat:
                asleep = asleep + 1 if stat.read().rpartition(")")[2].split()[0] == "S" else 0
        os.kill(os.getpid(), signal.SIGINT)

    begin = time.monotonic()
    try:
        threading.Thread(target=interrupt).start()
        wait(future)
    except (KeyboardInterrupt, RuntimeError) as error:
        assert "KeyboardInterrupt" in repr(error), error
    assert time.monotonic() - begin < 30
    promise.set_value(torch.ones(1))
    print(wait(future).item())
    """
    assert check_python(program_file(tmp_path, program), timeout=60) == "1.0\n"


def test_a_pending_future_in_a_script_does_not_hold_up_the_exit(tmp_path):
    program = """
    @torch.jit.script
    def give(p: torch.classes.dtorch.TensorPromise) -> Future[Tensor]:
        return torch.ops.dtorch.get_future(p)

    promise = dtorch_ops.TensorPromise()
    future = give(promise)
    group = torch.ops.dtorch.collect_all([future])
    print("pending", future.done(), group.done())
    """
    done = run_python(program_file(tmp_path, program), timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "pending False False\n", "")


# ---- trace --------------------------------------------------------------------------------------


def _trace_promise_in_scripted(a: Tensor) -> Tensor:
    return torch.jit.script(own_promise)(a) + 1


async def _awaited(a: Tensor) -> Tensor:
    return await dtorch_ops.to_torch_async(a, copy=True)


# Every one adds 1 to what it fetches. A copy, so that a constant cannot pass for the value.
TRACED: dict[str, Callable[[Tensor], Tensor]] = {
    "operator": lambda a: ops.get_tensor_async(a).wait() + 1,
    "operator copy": lambda a: ops.get_tensor_async(a, copy=True).wait() + 1,
    "operator device": lambda a: ops.get_tensor_async(a, device="cpu", copy=True).wait() + 1,
    "overload": lambda a: ops.get_tensor_async.default(a, copy=True).wait() + 1,
    "intermediate": lambda a: ops.get_tensor_async(a * 1, copy=True).wait() + 1,
    "to_torch_async": lambda a: dtorch_ops.to_torch_async(a, copy=True).get() + 1,
    "to_torch_async wait": lambda a: dtorch_ops.to_torch_async(a, copy=True).wait(1000) + 1,
    "to_torch_async value": lambda a: dtorch_ops.to_torch_async(a, copy=True).value() + 1,
    "to_torch": lambda a: dtorch_ops.to_torch(a, copy=True) + 1,
    "method": lambda a: a.to_torch(copy=True) + 1,
    "handle": lambda a: dtorch_ops.Future(ops.get_tensor_async(a, copy=True)).get() + 1,
    "await": lambda a: asyncio.run(_awaited(a)) + 1,
    "torch.jit.wait": lambda a: torch.jit.wait(ops.get_tensor_async(a, copy=True)) + 1,
    "wait_for": lambda a: ops.wait_for(ops.get_tensor_async(a, copy=True), 1000) + 1,
    "wait_all operator": lambda a: ops.wait_all([ops.get_tensor_async(a, copy=True)])[0] + 1,
    "wait_all": lambda a: dtorch_ops.wait_all([ops.get_tensor_async(a, copy=True)])[0] + 1,
    "collect_all operator": lambda a: (
        ops.collect_all([ops.get_tensor_async(a, copy=True)]).wait()[0].wait() + 1
    ),
    "collect_all": lambda a: (
        dtorch_ops.collect_all([ops.get_tensor_async(a, copy=True)]).wait()[0].wait() + 1
    ),
    "collect_any operator": lambda a: (
        ops.collect_any([ops.get_tensor_async(a, copy=True)]).wait() + 1
    ),
    "collect_any": lambda a: (
        dtorch_ops.collect_any([ops.get_tensor_async(a, copy=True)]).wait() + 1
    ),
    "as_completed": lambda a: (
        next(iter(dtorch_ops.as_completed([dtorch_ops.to_torch_async(a, copy=True)]))).value() + 1
    ),
    "then": lambda a: dtorch_ops.to_torch_async(a, copy=True).then(lambda f: f.value() + 1).get(),
    "scripted function": _trace_promise_in_scripted,
}


@pytest.mark.parametrize("program", TRACED.values(), ids=TRACED)
def test_a_trace_runs_again_on_other_inputs(program):
    """Or is refused when it is made: never the value of the example for an answer."""
    try:
        traced = torch.jit.trace(program, (torch.zeros(2),))
    except RuntimeError as error:
        assert "trace" in str(error)
        return
    for value in (1.0, 5.0):
        assert traced(torch.full((2,), value)).tolist() == [value + 1] * 2
    loaded = save_and_load(traced)
    assert loaded(torch.full((2,), 7.0)).tolist() == [8, 8]


@pytest.mark.parametrize(
    "name", ["wait_for", "wait_all operator", "collect_all operator", "collect_any operator"]
)
def test_a_trace_keeps_every_operator(name):
    """A wait is a wait: with a limit, or for all, it is recorded as ``aten::wait``."""
    traced = torch.jit.trace(TRACED[name], (torch.zeros(2),))
    kept = "aten::wait" if name.startswith("wait") else f"dtorch::{name.removesuffix(' operator')}"
    assert kept in str(traced.graph)


def traced_sync(a: Tensor) -> Tensor:
    ops.sync()
    return a + 1


def traced_sync_devices(a: Tensor) -> Tensor:
    ops.sync(["cpu", "meta"])
    return a + 1


def traced_sync_wait(a: Tensor) -> Tensor:
    dtorch_ops.sync()
    return a + 1


def traced_sync_future(a: Tensor) -> Tensor:
    dtorch_ops.sync_future(["cpu"]).get()
    return a + 1


@pytest.mark.parametrize(
    "program",
    [traced_sync, traced_sync_devices, traced_sync_wait, traced_sync_future],
    ids=lambda p: p.__name__,
)
def test_a_trace_keeps_sync(program):
    traced = torch.jit.trace(program, (torch.zeros(2),))
    assert traced(torch.ones(2)).tolist() == [2, 2]
    for module in (traced, save_and_load(traced)):
        module(torch.ones(2))
        graph = torch.jit.last_executed_optimized_graph()
        assert len(list(graph.findAllNodes("dtorch::sync"))) == 1, graph


class TracedHolder(torch.nn.Module):
    """A trace has no promise among its arguments: a module brings it in."""

    def __init__(self) -> None:
        super().__init__()
        self.promise = torch.classes.dtorch.TensorPromise()
        self.done = torch.classes.dtorch.VoidPromise()

    def forward(self, a: Tensor) -> Tensor:
        ops.get_tensor(a * 2, self.promise)
        ops.sync.promise(self.done)
        return ops.get_future(self.promise).wait() + 1


def test_a_trace_keeps_get_tensor_and_get_future():
    module = TracedHolder()
    traced = torch.jit.trace(module, (torch.zeros(2),), check_trace=False)
    assert ops.get_future(module.promise).wait().tolist() == [0, 0]
    for value in (1.0, 5.0):
        promise, done = dtorch_ops.TensorPromise(), dtorch_ops.VoidPromise()
        traced._c.setattr("promise", promise)
        traced._c.setattr("done", done)
        assert traced(torch.full((2,), value)).tolist() == [2 * value + 1] * 2
        assert promise.get_future().wait(0).tolist() == [2 * value] * 2
        done.get_future().wait(0)


def test_gradients_go_through_a_trace():
    traced = torch.jit.trace(TRACED["to_torch_async"], (torch.zeros(2),))
    for _ in range(3):
        leaf = torch.ones(2, requires_grad=True)
        (traced(leaf * 2) * 3).sum().backward()
        assert leaf.grad.tolist() == [6, 6]


def test_tracing_ends_with_the_trace():
    torch.jit.trace(TRACED["to_torch_async"], (torch.zeros(2),))
    promise = dtorch_ops.TensorPromise()
    waiter = Worker(promise.get_future().get)
    promise.set_value(torch.ones(1))
    assert waiter.finish().item() == 1


def test_a_value_from_outside_is_a_constant_of_the_trace():
    """As everything is that is not computed from the inputs."""
    outside = dtorch_ops.to_torch_async(torch.full((2,), 3.0))
    traced = torch.jit.trace(lambda a: a + outside.wait(), (torch.zeros(2),))
    assert traced(torch.ones(2)).tolist() == [4, 4]
