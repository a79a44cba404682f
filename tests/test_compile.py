"""The pair in graphs of torch.compile, and what happens there to futures and promises."""

from __future__ import annotations

import concurrent.futures
import functools
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import fake_accelerator as fake
import pytest
import torch
from graphs import MARKS, backends, operators
from helpers import ROOT, Worker, check_python
from on_accelerator import all_streams, on_fake, until
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs, EagerAndRecordGraphs

import dtorch_ops
from dtorch_ops.functional import Transfer, get_start, get_wait

ops = torch.ops.dtorch

pytestmark = MARKS

# ---- Programs -----------------------------------------------------------------------------------


def overlapped(x: Tensor) -> tuple[Tensor, ...]:
    transfer = get_start(x.sum(), "cpu")
    y = x * 2
    return y, get_wait(transfer)


def source_updated(x: Tensor) -> tuple[Tensor, ...]:
    h = x.clone()
    transfer = get_start(h)
    h.add_(1)
    y = h * 2
    h.mul_(3)
    return y, get_wait(transfer), h


def updated_before(x: Tensor) -> tuple[Tensor, ...]:
    h = x.clone()
    h.add_(1)
    first = get_start(h)
    h.add_(1)
    second = get_start(h)
    h.add_(1)
    return get_wait(second), get_wait(first), h


def equal_calls(x: Tensor) -> tuple[Tensor, ...]:
    first, second = get_start(x), get_start(x)
    one, other = get_wait(first), get_wait(second)
    one.add_(1)
    return one, other


def result_unused(x: Tensor) -> tuple[Tensor, ...]:
    get_start(x)
    get_wait(get_start(x + 1))
    return (x + 2,)


def result_updated(x: Tensor) -> tuple[Tensor, ...]:
    value = get_wait(get_start(x))
    value.mul_(0)
    return x + 0, value


def waited_out_of_order(x: Tensor) -> tuple[Tensor, ...]:
    transfers = [get_start(x * i) for i in range(3)]
    return tuple(get_wait(transfer) for transfer in reversed(transfers))


def between_products(x: Tensor) -> tuple[Tensor, ...]:
    y = x @ x
    transfer = get_start(y, "cpu", frozen=True)
    z = (y @ x).relu()
    return get_wait(transfer) + y, z


def views(x: Tensor) -> tuple[Tensor, ...]:
    h = x.clone()
    row = get_start(h[0])
    h[0].zero_()
    column = get_start(h[:, 0])
    h.add_(1)
    return get_wait(row), get_wait(column), h


def in_a_loop(x: Tensor) -> tuple[Tensor, ...]:
    total = x
    for _ in range(3):
        transfer = get_start(total)
        total = total + 1
        total = total + get_wait(transfer)
    return (total,)


PROGRAMS = [
    overlapped,
    source_updated,
    updated_before,
    equal_calls,
    result_unused,
    result_updated,
    waited_out_of_order,
    between_products,
    views,
    in_a_loop,
]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@backends
def test_a_full_graph_does_what_eager_does(backend, program, dynamic):
    """Each start and each wait runs, once, with the same values and gradients."""
    compiled = torch.compile(program, fullgraph=True, backend=backend, dynamic=dynamic)
    for grad in (False, True):
        for size in (4, 5) if dynamic else (4,):
            ours, theirs = (torch.arange(float(size * size)).view(size, size) for _ in range(2))
            ours.requires_grad_(grad), theirs.requires_grad_(grad)
            expected, values = program(theirs), compiled(ours)
            torch.testing.assert_close(values, expected)
            if grad:
                for results in (values, expected):
                    sum((r.sum() for r in results), torch.tensor(0.0)).backward()
                torch.testing.assert_close(ours.grad, theirs.grad)
            ran = operators(functools.partial(compiled, ours))
            expected_to_run = operators(functools.partial(program, ours))
            assert ran == expected_to_run


def beside_products(x: Tensor) -> tuple[Tensor, ...]:
    h = x @ x
    transfer = get_start(h)
    y = (h @ h.t()) @ x
    return get_wait(transfer) + 1, y.sum(0)


@pytest.mark.parametrize("training", [False, True])
def test_inductor_runs_between_the_two_what_stands_there(training):
    """Not the wait right behind the start, for locality or for less memory, as it might."""
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(64, 64, requires_grad=training)
    compiled = torch.compile(beside_products, fullgraph=True)
    _, code = run_and_get_code(compiled, x)
    kernels = re.findall(r"= torch\.ops\.dtorch\.(\w+)|extern_kernels\.(mm)\(", code[0])
    assert [a or b for a, b in kernels] == ["mm", "get_start", "mm", "mm", "get_wait"]


def starts_of(code: str) -> list[bool]:
    """Of each start, whether it makes no clone."""
    starts = re.findall(r"torch\.ops\.dtorch\.get_start\.default\((.*)\)", code)
    return ["frozen=True" in start for start in starts]


def updated_behind_the_wait(x: Tensor) -> tuple[Tensor, ...]:
    here, h = get_start(x), x @ x
    there, y = get_start(h, device="cpu"), h @ x
    results = get_wait(here), get_wait(there)
    x.add_(1)
    h.add_(1)
    return (*results, y, h)


def updated_between(x: Tensor) -> tuple[Tensor, ...]:
    here, h = get_start(x), x @ x
    there, y = get_start(h, device="cpu"), h @ x
    x.add_(1)
    h.add_(1)
    return get_wait(here), get_wait(there), y, h


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("program", [updated_behind_the_wait, updated_between])
def test_inductor_makes_no_clone_of_what_is_not_updated_before_the_wait(program, training):
    """The memory of the source is neither written to, nor used for anything else, until then."""
    from torch._inductor.utils import run_and_get_code

    weight = torch.eye(32, requires_grad=training)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return (*program(x), x @ weight)

    x = torch.randn(32, 32)
    expected = run(x.clone())
    given = x.clone()
    got, code = run_and_get_code(torch.compile(run, fullgraph=True), given)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(given, x + 1)
    frozen = program is updated_behind_the_wait
    assert starts_of(code[0]) == [frozen, frozen]
    if frozen:
        lines = code[0].splitlines()
        last_wait = max(i for i, line in enumerate(lines) if "dtorch.get_wait" in line)
        added = [i for i, line in enumerate(lines) if re.search(r"^ +cpp_fused.*add.*\(", line)]
        assert added and min(added) > last_wait, code[0]


def test_a_start_whose_wait_is_elsewhere_keeps_its_snapshot():
    from torch._inductor.utils import run_and_get_code

    started = torch.compile(lambda x: (get_start(x), x + 1), fullgraph=True)
    x = torch.zeros(3)
    (transfer, _), code = run_and_get_code(started, x)
    assert starts_of(code[0]) == [False]
    x.add_(1)
    assert get_wait(transfer).tolist() == [0, 0, 0]


def test_inductor_moves_kernels_of_other_graphs_as_ever():
    from torch._inductor import memory
    from torch._inductor.fx_passes import post_grad

    graph = torch.fx.symbolic_trace(lambda x: (x.sin(), x.cos())).graph
    moved = []
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (post_grad, "reorder_for_locality"),
            (memory, "reorder_for_peak_memory"),
        ):
            cell = getattr(module, name).__closure__[0]
            patch.setattr(cell, "cell_contents", lambda given, *_: moved.append(given) or ["moved"])
        post_grad.reorder_for_locality(graph)
        assert memory.reorder_for_peak_memory([]) == ["moved"]
    assert moved == [graph, []]


@backends
def test_an_input_that_is_updated_in_place(backend):
    def program(x: Tensor) -> tuple[Tensor, ...]:
        before = get_start(x)
        x.add_(1)
        after = get_start(x, frozen=True)
        return get_wait(before), get_wait(after), x * 2

    compiled = torch.compile(program, fullgraph=True, backend=backend)
    x = torch.zeros(3)
    for i in range(3):
        before, after, y = compiled(x)
        assert before.tolist() == [i] * 3 and after.tolist() == [i + 1] * 3
        assert x.tolist() == [i + 1] * 3 and y.tolist() == [2 * i + 2] * 3


@backends
def test_a_transfer_crosses_the_border_of_a_graph(backend):
    start = torch.compile(lambda x: (get_start(x * 2), x + 1), fullgraph=True, backend=backend)
    wait = torch.compile(lambda t: get_wait(t) + 1, fullgraph=True, backend=backend)
    for value in (1.0, 2.0):
        transfer, more = start(torch.full((2,), value))
        assert isinstance(transfer, Transfer) and more.tolist() == [value + 1] * 2
        assert get_wait(transfer).tolist() == [2 * value] * 2
        transfer, _ = start(torch.full((2,), value))
        assert wait(transfer).tolist() == [2 * value + 1] * 2
        with pytest.raises(dtorch_ops.FutureAlreadyRetrievedError):
            get_wait(transfer)
        assert wait(get_start(torch.full((2,), value))).tolist() == [value + 1] * 2


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
@pytest.mark.parametrize("inside", [False, True])
@backends
def test_modes(backend, mode, inside):
    def program(x: Tensor) -> tuple[Tensor, ...]:
        y = x @ x
        transfer = get_start(y)
        return get_wait(transfer), y

    def with_mode(x: Tensor) -> tuple[Tensor, ...]:
        with mode():
            return program(x)

    x = torch.ones(2, 2, requires_grad=True)
    expected = with_mode(x)
    compiled = torch.compile(with_mode if inside else program, fullgraph=True, backend=backend)
    if inside:
        values = compiled(x)
    else:
        with mode():
            values = compiled(x)
    torch.testing.assert_close(values, expected)
    for value, other in zip(values, expected, strict=True):
        assert value.requires_grad == other.requires_grad and value.dtype == other.dtype


@backends
def test_another_device(backend):
    compiled = torch.compile(
        lambda x: get_wait(get_start(x.t(), "meta")), fullgraph=True, backend=backend
    )
    value = compiled(torch.ones(3, 4))
    assert value.is_meta and value.shape == (4, 3)


@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap of grad"])
@backends
def test_torch_func_transforms(backend, transform):
    from torch.func import grad, vmap

    def f(x: Tensor) -> Tensor:
        return get_wait(get_start(x * x)).sum()

    transformed = {"grad": grad(f), "vmap": vmap(f), "vmap of grad": vmap(grad(f))}[transform]
    x = torch.randn(3, 4)
    compiled = torch.compile(lambda x: transformed(x), fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), transformed(x))


def test_a_training_step_with_a_checkpoint():
    """Which runs its region a second time, in the backward."""
    from torch.utils.checkpoint import checkpoint

    layer = torch.nn.Linear(4, 4)

    def region(x: Tensor) -> Tensor:
        h = layer(x)
        transfer = get_start(h)
        return h.sin() + get_wait(transfer)

    def step(x: Tensor) -> Tensor:
        return checkpoint(region, x, use_reentrant=False).sum()

    x = torch.randn(2, 4, requires_grad=True)
    step(x).backward()
    expected, x.grad = x.grad, None
    torch.compile(step, fullgraph=True, backend="aot_eager")(x).backward()
    torch.testing.assert_close(x.grad, expected)


PRINTED = ["3.0 3.0\n", "3.0\n"]


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_the_programs_of_the_documentation(tmp_path, number):
    text = (ROOT / "docs" / "compile.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(programs) == len(PRINTED)
    program = tmp_path / "program.py"  # Dynamo wants the source in a file
    program.write_text(programs[number])
    ended = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=240, cwd=ROOT
    )
    assert (ended.returncode, ended.stdout) == (0, PRINTED[number]), ended.stderr


# ---- An accelerator -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_fake("its tasks are steered one by one", timeout=120)
def test_what_stands_between_runs_beside_the_copy(backend):
    pair = dtorch_ops.functional

    def program(x):
        transfer = pair.get_start(x, "cpu")
        y = x * 2
        x.add_(1)
        return y, pair.get_wait(transfer)

    compiled = torch.compile(program, backend=backend, fullgraph=True)
    compiled(torch.ones(4, device="fake:0"))
    x = torch.ones(4, device="fake:0")
    fake.drain("fake:0")
    fake.reset_counters()
    compiled(x.clone())
    kernels = fake.counters().kernels
    fake.reset_counters()
    with fake.held(*all_streams(0)):
        running = Worker(lambda: compiled(x))
        # Of the graph all but the copy, which is held, has been queued, and done.
        until(lambda: fake.counters().kernels == kernels)
        fake.drain("fake:0")
        assert running.is_alive()
    y, value = running.finish()
    assert value.tolist() == [1] * 4 and y.cpu().tolist() == [2] * 4
    assert x.cpu().tolist() == [2] * 4


# ---- to_torch -----------------------------------------------------------------------------------

FETCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda t: dtorch_ops.to_torch(t * 2),
    "device": lambda t: dtorch_ops.to_torch(t * 2, device="cpu"),
    "copy": lambda t: dtorch_ops.to_torch(t * 2, copy=True),
    "another device": lambda t: dtorch_ops.to_torch(t * 2, device=torch.device("meta")),
    "method": lambda t: (t * 2).to_torch(),
    "method with a copy": lambda t: (t * 2).to_torch(device="cpu", copy=True),
}


@pytest.mark.parametrize("name", FETCHES)
@backends
def test_to_torch_in_a_full_graph(backend, name):
    compiled = torch.compile(FETCHES[name], fullgraph=True, backend=backend)
    x = torch.ones(3, requires_grad=True)
    value, expected = compiled(x), FETCHES[name](x)
    assert value.device == expected.device and value.shape == expected.shape
    if not value.is_meta:
        assert value.tolist() == [2] * 3
        value.sum().backward()
        assert x.grad.tolist() == [2] * 3
    if backend != "eager":
        assert operators(lambda: compiled(x)) == ["get_start", "get_wait"]


@pytest.mark.parametrize("name", [n for n in FETCHES if "method" not in n])
def test_to_torch_becomes_the_pair(name):
    backend = EagerAndRecordGraphs()
    torch.compile(FETCHES[name], fullgraph=True, backend=backend)(torch.ones(3))
    targets = [node.target for node in backend.graphs[0].graph.nodes]
    assert targets.count(ops.get_start.default) == targets.count(ops.get_wait.default) == 1


def test_a_method_becomes_the_pair_below_dynamo():
    backend = AotEagerAndRecordGraphs()
    torch.compile(FETCHES["method"], fullgraph=True, backend=backend)(torch.ones(3))
    text = str(backend.fw_graphs[0].graph)
    assert text.count("dtorch.get_start.default") == text.count("dtorch.get_wait.default") == 1


@backends
def test_to_torch_without_a_copy_is_the_tensor_itself(backend):
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        same, copied = dtorch_ops.to_torch(x), dtorch_ops.to_torch(x, copy=True)
        x.add_(1)
        return same + 0, copied

    compiled = torch.compile(program, fullgraph=True, backend=backend)
    for run in (program, compiled):
        assert [v.tolist() for v in run(torch.zeros(2))] == [[1, 1], [0, 0]]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_fake("its tasks are steered one by one", timeout=120)
def test_to_torch_without_a_copy_waits_for_an_accelerator(backend):
    compiled = torch.compile(
        lambda x: dtorch_ops.to_torch(x * 2, device="fake:0"), backend=backend, fullgraph=True
    )
    x = torch.ones(4, device="fake:0")
    assert compiled(x).cpu().tolist() == [2] * 4
    with fake.held("fake:0"):
        running = Worker(lambda: compiled(x))
        fake.until_blocked(1)
        assert running.is_alive()
    value = running.finish()
    assert value.device == x.device and value.cpu().tolist() == [2] * 4


# ---- Futures and promises -----------------------------------------------------------------------


def promised(t: Tensor) -> Tensor:
    promise = dtorch_ops.TensorPromise()
    ops.get_tensor(t * 2, promise)
    return promise.get_future().get()


def fulfilled() -> Any:
    return dtorch_ops.to_torch_async(torch.full((2,), 3.0))


def submitted() -> Any:
    future: concurrent.futures.Future[Tensor] = concurrent.futures.Future()
    future.set_result(torch.full((2,), 3.0))
    return future


def bare() -> Any:
    return ops.get_tensor_async(torch.full((2,), 3.0))


#: The program, and what makes its other arguments.
BREAKS: dict[str, tuple[Callable[..., Tensor], tuple[Callable[[], Any], ...]]] = {
    "to_torch_async": (lambda t: dtorch_ops.to_torch_async(t * 2).get() + 1, ()),
    "method": (lambda t: (t * 2).to_torch_async().get() + 1, ()),
    "operator": (lambda t: ops.get_tensor_async(t * 2).wait() + 1, ()),
    "overload": (lambda t: ops.get_tensor_async.default(t * 2, copy=True).wait() + 1, ()),
    "promise made": (promised, ()),
    "future.get": (lambda t, f: t + f.get(), (fulfilled,)),
    "future.wait": (lambda t, f: t + f.wait(100), (fulfilled,)),
    "future.is_ready": (lambda t, f: t + f.is_ready(), (fulfilled,)),
    "future.then": (lambda t, f: t + f.then(lambda g: g.value()).wait(), (fulfilled,)),
    "stock future": (lambda t, f: t + f.wait(), (bare,)),
    "future wrapped": (lambda t, f: t + dtorch_ops.Future(f).get(), (bare,)),
    "promise set": (
        lambda t, p: (p.set_value(t * 2), p.get_future().get())[1],
        (dtorch_ops.TensorPromise,),
    ),
    "get_future": (
        lambda t, p: (p.set_value(t), ops.get_future(p).wait())[1],
        (dtorch_ops.TensorPromise,),
    ),
    "sync": (lambda t: (dtorch_ops.sync(), t + 1)[1], ()),
    "sync_future": (lambda t: (dtorch_ops.sync_future().get(), t + 1)[1], ()),
    "sync operator": (lambda t: (ops.sync().wait(), t + 1)[1], ()),
    "wait_all": (lambda t, f: dtorch_ops.wait_all([f])[0] + t, (fulfilled,)),
    "wait_all operator": (lambda t, f: ops.wait_all([f])[0] + t, (fulfilled,)),
    "collect_all": (lambda t, f: dtorch_ops.collect_all([f]).get()[0].value() + t, (fulfilled,)),
    "from_future": (lambda t, f: dtorch_ops.from_future(f).get() + t, (submitted,)),
    "as_concurrent": (lambda t, f: f.as_concurrent().result(0) + t, (fulfilled,)),
    "collect_any": (lambda t, f: dtorch_ops.collect_any([f]).get() + t, (fulfilled,)),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_graph_breaks_at_a_future_with_the_right_result(name):
    program, makers = BREAKS[name]
    compiled = torch.compile(program, backend="aot_eager")
    for value in (1.0, 5.0):
        x = torch.full((2,), value)
        expected = program(x, *(make() for make in makers))
        assert torch.equal(compiled(x, *(make() for make in makers)), expected)


@pytest.mark.parametrize("name", BREAKS)
def test_a_full_graph_says_what_to_use_in_place_of_a_future(name):
    program, makers = BREAKS[name]
    compiled = torch.compile(program, backend="eager", fullgraph=True)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"functional\.get_start and\s+get_wait"
    ):
        compiled(torch.ones(2), *(make() for make in makers))


def test_the_reason_of_a_graph_break_names_the_pair():
    explanation = torch._dynamo.explain(BREAKS["to_torch_async"][0])(torch.ones(2))
    assert "get_start" in explanation.break_reasons[0].reason


def test_other_graph_breaks_say_nothing_of_us():
    def program(x: Tensor) -> Tensor:
        y = get_wait(get_start(x))
        torch._dynamo.graph_break()
        return y

    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        torch.compile(program, backend="eager", fullgraph=True)(torch.ones(2))
    assert "get_start and" not in str(raised.value)


@pytest.mark.parametrize("first", ["torch._dynamo", "dtorch_ops"])
def test_the_reason_is_there_whichever_is_imported_first(first):
    check_python(
        f"""
        import torch, {first}
        assert ("torch._dynamo" in sys.modules) == ("{first}" == "torch._dynamo")
        import dtorch_ops
        def program(x):
            return dtorch_ops.to_torch_async(x).get()
        try:
            torch.compile(program, backend="eager", fullgraph=True)(torch.ones(1))
        except Exception as error:
            assert "get_start" in str(error), error
        else:
            raise AssertionError("no error")
        """,
        prelude="import sys\n",
        timeout=120,
    )


def test_importing_the_package_imports_no_compiler():
    check_python(
        """
        heavy = {"torch._dynamo", "torch._inductor", "torch.onnx"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        """
    )
