"""Promises in graphs of torch.compile and torch.export: an operator fulfils one, once a call."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_accelerator as fake
import pytest
import torch
from graphs import MARKS, backends, operators
from helpers import check_python, run_python
from on_accelerator import on_fake
from torch import Tensor

import dtorch_ops
from dtorch_ops.functional import get_start, get_wait

ops = torch.ops.dtorch
CPU = torch.device("cpu")

pytestmark = [
    *MARKS,
    # torch.export's, of its own use of what is deprecated.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
]

#: A promise as Python has it, and the bare object that TorchScript and C++ hand out.
KINDS = {
    "handle": (dtorch_ops.TensorPromise, dtorch_ops.VoidPromise),
    "bare": (torch.classes.dtorch.TensorPromise, torch.classes.dtorch.VoidPromise),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def compiled(program: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    return torch.compile(program, fullgraph=True, backend=backend, **options)


def value_of(promise: Any) -> Any:
    """What the promise was fulfilled with; it must have been."""
    future = ops.get_future(promise)
    assert future.done()
    return future.wait()


def traced(function: Callable[..., Any], *arguments: Any) -> tuple[Any, list[str]]:
    """The result of a call, and the operators of ours that it has run."""
    results: list[Any] = []
    ran = operators(lambda: results.append(function(*arguments)))
    return results[0], ran


def is_pending(promise: Any) -> bool:
    return not ops.get_future(promise).done()


# ---- torch.compile ------------------------------------------------------------------------------


def in_the_middle(x: Tensor, p: Any, v: Any) -> Tensor:
    h = x @ x
    h.add_(1)
    ops.get_tensor(h, p)
    y = h.relu() + 1
    ops.sync([CPU], v)
    return y.exp()


def copied(x: Tensor, p: Any, v: Any) -> Tensor:
    h = x * 2
    ops.get_tensor(h, p, copy=True)
    h.mul_(0)
    ops.sync(v)
    return h + 1


def overloads(x: Tensor, p: Any, v: Any) -> Tensor:
    ops.get_tensor.default(x * 2, p)
    ops.sync.promise(v, [CPU])
    return x + 1


def by_name(x: Tensor, p: Any, v: Any) -> Tensor:
    ops.get_tensor(x * 2, promise=p)
    ops.sync(devices=None, promise=v)
    return x + 1


def result_only(x: Tensor, p: Any, v: Any) -> None:
    ops.sync.devices_promise(None, v)
    ops.get_tensor(x.sum(), p)


def of_an_input(x: Tensor, p: Any, v: Any) -> Tensor:
    ops.sync(v)
    ops.get_tensor(x, p)
    return x + 1


def of_a_view(x: Tensor, p: Any, v: Any) -> Tensor:
    h = x.clone()
    h[0].zero_()
    ops.get_tensor(h.t()[1:], p)
    ops.sync(v)
    return h * 2


def beside_the_pair(x: Tensor, p: Any, v: Any) -> Tensor:
    transfer = get_start(x * 2)
    ops.get_tensor(x + 1, p)
    y = get_wait(transfer)
    ops.sync(v)
    return y + get_wait(get_start(y))


PROGRAMS = [
    in_the_middle,
    copied,
    overloads,
    by_name,
    result_only,
    of_an_input,
    of_a_view,
    beside_the_pair,
]


CASES = [*((program, "handle") for program in PROGRAMS), (in_the_middle, "bare")]


@pytest.mark.parametrize("program, kind", CASES, ids=[f"{p.__name__}-{kind}" for p, kind in CASES])
@backends
def test_each_call_fulfils_the_promises_of_its_arguments(backend, program, kind):
    run = compiled(program, backend)
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    # Large enough for memory to be used again.
    run(torch.randn(100, 100), *(make() for make in KINDS[kind]))
    for i in range(2):
        x = torch.randn(100, 100) / 100 + i
        outcomes = []
        for function in (run, program):
            promises = [make() for make in KINDS[kind]]
            result, ran = traced(function, x, *promises)
            assert value_of(promises[1]) is None
            outcomes.append((ran, (result, value_of(promises[0]))))
        assert outcomes[0][0] == outcomes[1][0]
        torch.testing.assert_close(outcomes[0][1], outcomes[1][1])
    assert graphs["unique_graphs"] == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_value_is_that_at_the_call(backend):
    """Of such a backend: it neither updates in place nor gives the memory to another value."""

    def program(x: Tensor, p: Any) -> Tensor:
        h = x @ x
        ops.get_tensor(h, p)
        h.add_(1)
        y = h.relu()
        for _ in range(3):
            y = y @ x
        return y

    run = compiled(program, backend)
    x = -torch.eye(200)
    for _ in range(3):
        promise = dtorch_ops.TensorPromise()
        run(x, promise)
        assert torch.equal(value_of(promise), torch.eye(200))


@backends
def test_an_update_of_an_input_before_the_call_is_seen(backend):
    def program(x: Tensor, p: Any, q: Any) -> None:
        x.add_(1)
        ops.get_tensor(x, p)
        x.add_(1)
        ops.get_tensor(x * 1, q)

    x = torch.zeros(3)
    promises = dtorch_ops.TensorPromise(), dtorch_ops.TensorPromise()
    compiled(program, backend)(x, *promises)
    # In one process the value of the first is the input itself, but for a backend with a copy.
    assert value_of(promises[0]).tolist() == [2 if backend == "eager" else 1] * 3
    assert value_of(promises[1]).tolist() == x.tolist() == [2] * 3


@backends
def test_two_equal_calls_both_run(backend):
    def program(x: Tensor, p: Any, q: Any) -> Tensor:
        ops.get_tensor(x, p)
        ops.get_tensor(x, q)
        return x + 1

    run = compiled(program, backend)
    p, q = dtorch_ops.TensorPromise(), dtorch_ops.TensorPromise()
    with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError):
        run(torch.ones(2), p, p)
    assert value_of(p).tolist() == [1, 1]
    p = dtorch_ops.TensorPromise()
    run(torch.full((2,), 3.0), p, q)
    assert value_of(p).tolist() == value_of(q).tolist() == [3, 3]


@backends
def test_the_same_promise_again_is_an_error(backend):
    def program(x: Tensor, p: Any) -> Tensor:
        ops.get_tensor(x * 2, p)
        return x + 1

    run = compiled(program, backend)
    promise = dtorch_ops.TensorPromise()
    run(torch.ones(2), promise)
    with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError, match="it takes one value"):
        run(torch.zeros(2), promise)
    assert value_of(promise).tolist() == [2, 2]


@backends
def test_an_error_before_the_call_leaves_the_promise_pending(backend):
    def program(x: Tensor, i: Tensor, p: Any) -> Tensor:
        y = x[i] + 1
        ops.get_tensor(y, p)
        return y

    run = compiled(program, backend)
    promise = dtorch_ops.TensorPromise()
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        run(torch.ones(3), torch.tensor([7]), promise)
    assert is_pending(promise)
    run(torch.ones(3), torch.tensor([2]), promise)
    assert value_of(promise).tolist() == [2]


@backends
def test_calls_run_in_their_order(backend):
    def program(x: Tensor, v: Any, p: Any) -> Tensor:
        ops.sync(v)
        ops.get_tensor(x * 2, p)
        return x

    run = compiled(program, backend)
    satisfied, promise = dtorch_ops.VoidPromise(), dtorch_ops.TensorPromise()
    satisfied.set_value()
    with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError):
        run(torch.ones(2), satisfied, promise)
    assert is_pending(promise)


@kinds
@backends
def test_a_compiled_function_keeps_no_promise(backend, kind):
    """One that is dropped unset is broken, the first as well, which the graph was traced with."""

    def program(x: Tensor, v: Any, p: Any) -> Tensor:
        ops.sync(v)
        ops.get_tensor(x * 2, p)
        return x

    run = compiled(program, backend)
    futures = []
    for _ in range(2):
        promise, void = (make() for make in KINDS[kind])
        ops.sync(void)
        futures.append(ops.get_future(promise))
        with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError):
            run(torch.ones(2), void, promise)
        assert dtorch_ops.stats()["outstanding"] == 0
        del promise, void
    gc.collect()
    for future in futures:
        assert future.done()
        with pytest.raises(dtorch_ops.BrokenPromiseError):
            future.wait()


class Reporting(torch.nn.Module):
    """With a promise as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.promise = dtorch_ops.TensorPromise()

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        ops.get_tensor(h, self.promise)
        return h + 1


@backends
def test_a_promise_that_is_an_attribute(backend):
    module = Reporting()
    run = torch.compile(module, fullgraph=True, backend=backend)
    for i in range(3):
        assert run(torch.full((2,), float(i))).tolist() == [2 * i + 1] * 2
        assert value_of(module.promise).tolist() == [2 * i] * 2
        with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError):
            run(torch.ones(2))
        module.promise = dtorch_ops.TensorPromise()


@backends
def test_promises_in_containers(backend):
    def program(x: Tensor, promises: dict[str, list[Any]]) -> Tensor:
        for i, promise in enumerate(promises["all"]):
            ops.get_tensor(x + i, promise)
        return x

    promises = {"all": [dtorch_ops.TensorPromise() for _ in range(3)]}
    compiled(program, backend)(torch.zeros(1), promises)
    assert [value_of(promise).item() for promise in promises["all"]] == [0, 1, 2]


@backends
def test_gradients_flow_beside_a_promise(backend):
    def program(x: Tensor, p: Any) -> Tensor:
        h = x * 2
        ops.get_tensor(h, p)
        return (h * h).sum()

    x, promise = torch.ones(2, requires_grad=True), dtorch_ops.TensorPromise()
    compiled(program, backend)(x, promise).backward()
    assert x.grad.tolist() == [8, 8]
    value = value_of(promise)
    assert value.tolist() == [2, 2]
    # Nothing leads from a value that a graph of AOTAutograd has computed back into that graph.
    assert value.requires_grad == (backend == "eager")


@backends
def test_dynamic_shapes_and_modes(backend):
    run = compiled(in_the_middle, backend, dynamic=True)
    for size in (3, 4, 5):
        with torch.inference_mode() if size == 5 else torch.no_grad():
            p, v = dtorch_ops.TensorPromise(), dtorch_ops.VoidPromise()
            x = torch.ones(size, size)
            run(x, p, v)
            torch.testing.assert_close(value_of(p), x @ x + 1)
            assert value_of(v) is None


@backends
def test_methods_of_a_promise_are_for_between_graphs(backend):
    def program(x: Tensor, p: Any, q: Any) -> Tensor:
        ops.get_tensor(x * 2, p)
        y = p.get_future().get()
        if q.is_pending():
            q.set_value(y + 1)
        return y * 3

    run = torch.compile(program, backend=backend)
    for value in (1.0, 2.0):
        p, q = dtorch_ops.TensorPromise(), dtorch_ops.TensorPromise()
        assert run(torch.tensor(value), p, q) == value * 6
        assert value_of(q) == value * 2 + 1


def test_the_error_at_a_method_names_the_operators():
    run = compiled(lambda x, p: p.set_value(x), "eager")
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"ops\.dtorch\.get_tensor\(tensor, promise\)"
    ):
        run(torch.ones(1), dtorch_ops.TensorPromise())


def test_a_promise_of_the_wrong_class_is_an_error():
    run = compiled(lambda x, p: ops.get_tensor(x, p), "eager")
    with pytest.raises(Exception, match="TensorPromise"):
        run(torch.ones(1), dtorch_ops.VoidPromise())


@pytest.mark.parametrize("copy", [{}, {"copy": True}], ids=str)
def test_a_transform_of_torch_func_is_refused(copy):
    def program(x: Tensor, p: Any) -> Tensor:
        return torch.vmap(lambda row: (ops.get_tensor(row, p, **copy), row)[1])(x)

    promise = dtorch_ops.TensorPromise()
    for run in (program, compiled(program, "eager")):
        with pytest.raises(Exception, match=r"outside of torch\.func transforms"):
            run(torch.ones(2, 2), promise)
    assert is_pending(promise)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_worker_in_another_process(backend):
    """It gets promises as pickles, and answers through shared memory."""
    promises = [dtorch_ops.TensorPromise() for _ in range(3)]
    check_python(
        """
        import pickle
        def work(x, promise):
            h = x @ x
            torch.ops.dtorch.get_tensor(h, promise)
            return h.add_(1).relu()
        run = torch.compile(work, fullgraph=True, backend=sys.argv[1])
        for i, promise in enumerate(pickle.loads(bytes.fromhex(sys.argv[2]))):
            result = run(torch.eye(50) * i, promise)
            assert torch.equal(result, torch.eye(50) * i * i + 1), result
            try:
                run(torch.eye(50), promise)
            except dtorch_ops.PromiseAlreadySatisfiedError:
                continue
            raise AssertionError("no error")
        """,
        args=(backend, pickle.dumps(promises).hex()),
        prelude="import sys, warnings\nwarnings.simplefilter('ignore')\nimport torch, dtorch_ops\n",
        timeout=200,
    )
    for i, promise in enumerate(promises):
        assert torch.equal(promise.get_future().get(), torch.eye(50) * i * i)


# ---- An accelerator -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_fake("its tasks are held", timeout=120)
def test_a_graph_goes_on_while_its_device_computes_the_value(backend):
    """The value is that in the order of the stream, and the promise is nobody else's."""

    def program(x, promise, void):
        h = x * 2
        torch.ops.dtorch.get_tensor(h, promise, copy=True)
        torch.ops.dtorch.sync([torch.device("fake:0")], void)
        return h.mul_(0)

    run = torch.compile(program, backend=backend, fullgraph=True)
    x = torch.ones(4, device="fake:0")
    run(x, dtorch_ops.TensorPromise(), dtorch_ops.VoidPromise())
    fake.drain("fake:0")
    promise, void = dtorch_ops.TensorPromise(), dtorch_ops.VoidPromise()
    future, done = promise.get_future(), void.get_future()
    with fake.held("fake:0"):
        result = run(x, promise, void)
        assert not future.is_ready() and not done.is_ready()
        assert not promise.is_pending() and not void.is_pending()
    done.wait(30000)
    assert future.wait(30000).cpu().tolist() == [2] * 4
    assert result.cpu().tolist() == [0] * 4


# ---- torch.export -------------------------------------------------------------------------------

strict_and_not = pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])


class Model(torch.nn.Module):
    def forward(self, x: Tensor, p: Any, v: Any) -> Tensor:
        h = x * 2
        ops.get_tensor(h, p)
        y = h + 1
        ops.sync(v)
        return y


def exported(strict: bool) -> torch.export.ExportedProgram:
    """Its promises are pending then, and broken when they go."""
    promises = dtorch_ops.TensorPromise(), dtorch_ops.VoidPromise()
    futures = [promise.get_future() for promise in promises]
    program = torch.export.export(Model(), (torch.ones(2), *promises), strict=strict)
    assert not any(future.done() for future in futures)
    del promises
    gc.collect()
    for future in futures:
        assert future.done()
        with pytest.raises(dtorch_ops.BrokenPromiseError):
            future.wait()
    return program


def check_fulfils_once(run: Callable[..., Any]) -> None:
    for i in range(3):
        p, v = dtorch_ops.TensorPromise(), dtorch_ops.VoidPromise()
        x = torch.full((2,), float(i))
        result, ran = traced(run, x, p, v)
        assert ran == ["get_tensor", "sync"] and result.tolist() == [2 * i + 1] * 2
        assert value_of(p).tolist() == [2 * i] * 2 and value_of(v) is None
        with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError):
            run(x, p, v)


@strict_and_not
def test_an_exported_program_takes_promises(strict):
    program = exported(strict)
    kinds = [str(spec.kind) for spec in program.graph_signature.input_specs]
    assert kinds == ["InputKind.USER_INPUT"] * 3
    check_fulfils_once(program.module())
    check_fulfils_once(program.run_decompositions().module())


@strict_and_not
def test_a_saved_program_has_nobodys_promise(strict, tmp_path):
    program = exported(strict)
    for saved in (program, program.run_decompositions()):
        torch.export.save(saved, tmp_path / "model.pt2")
        assert dtorch_ops.stats()["outstanding"] == 0
        check_fulfils_once(torch.export.load(tmp_path / "model.pt2").module())


def test_a_saved_program_in_another_process(tmp_path):
    path = tmp_path / "model.pt2"
    torch.export.save(exported(strict=False), path)
    promises = dtorch_ops.TensorPromise(), dtorch_ops.VoidPromise()
    check_python(
        """
        run = torch.export.load(sys.argv[1]).module()
        promise = dtorch_ops.TensorPromise.from_token(sys.argv[2])
        void = dtorch_ops.VoidPromise.from_token(sys.argv[3])
        assert run(torch.ones(2), promise, void).tolist() == [3, 3]
        """,
        args=(str(path), *(promise.token() for promise in promises)),
        timeout=120,
    )
    assert promises[0].get_future().get().tolist() == [2, 2]
    assert promises[1].get_future().get() is None


def test_an_exported_program_with_a_promise_as_an_attribute():
    """It is good for one call, of the program or of what it is decomposed into."""
    module = Reporting()
    program = torch.export.export(module, (torch.ones(2),), strict=False)
    for decomposed in (False, True):
        run = (program.run_decompositions() if decomposed else program).module()
        assert is_pending(module.promise) != decomposed
        if not decomposed:
            run(torch.ones(2))
        assert value_of(module.promise).tolist() == [2, 2]
        with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError):
            run(torch.zeros(2))


def test_strict_export_with_a_promise_as_an_attribute_is_an_error():
    module = Reporting()
    with pytest.raises(NotImplementedError, match=r"pass it as an argument, or .* strict=False"):
        torch.export.export(module, (torch.ones(2),), strict=True)
    assert is_pending(module.promise)


class Method(torch.nn.Module):
    def forward(self, x: Tensor, p: Any) -> Tensor:
        p.set_value(x)
        return x + 1


class Future(torch.nn.Module):
    def forward(self, x: Tensor, p: Any) -> Tensor:
        ops.get_tensor(x, p)
        return ops.get_future(p).wait()


@pytest.mark.parametrize("kind", [Method, Future])
@strict_and_not
def test_methods_and_futures_in_an_exported_program_are_an_error(strict, kind):
    promise = dtorch_ops.TensorPromise()
    with pytest.raises(Exception, match=r"ops\.dtorch\.get_tensor\(tensor,\s+promise\)"):
        torch.export.export(kind(), (torch.ones(2), promise), strict=strict)
    assert is_pending(promise)


# ---- AOTInductor --------------------------------------------------------------------------------


def packaged(module: torch.nn.Module, arguments: tuple[Any, ...], path: Path) -> str:
    with torch.no_grad():
        program = torch.export.export(module, arguments, strict=False)
        return str(torch._inductor.aoti_compile_and_package(program, package_path=str(path)))


def test_a_package_of_aotinductor_takes_the_promise_of_a_module(tmp_path):
    """Its token is in the package, which another process may run, once."""
    module = Reporting()
    path = packaged(module, (torch.ones(2),), tmp_path / "model.pt2")
    assert is_pending(module.promise)
    done = run_python(
        """
        run = torch._inductor.aoti_load_package(sys.argv[1])
        assert run(torch.full((2,), 5.0)).tolist() == [11, 11]
        try:
            run(torch.ones(2))
        except RuntimeError:
            print("once")
        """,
        args=(path,),
        prelude="import sys, warnings\nwarnings.simplefilter('ignore')\nimport torch, dtorch_ops\n",
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr
    assert module.promise.get_future().get().tolist() == [10, 10]


def test_a_package_of_aotinductor_takes_no_promise_as_an_input(tmp_path):
    promises = dtorch_ops.TensorPromise(), dtorch_ops.VoidPromise()
    with pytest.raises(Exception, match="can only be attributes"):
        packaged(Model(), (torch.ones(2), *promises), tmp_path / "model.pt2")
