"""The pair in exported programs: torch.export, its files, and AOTInductor's packages."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from helpers import check_python, run_python
from torch import Tensor
from torch.export import Dim, ExportedProgram

import dtorch_ops
from dtorch_ops.functional import get_start, get_wait

pytestmark = [
    pytest.mark.timeout(300),
    # The compiler's, of its own use of what is deprecated.
    pytest.mark.filterwarnings("ignore:.torch.jit"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
]


class Model(torch.nn.Module):
    """Equal starts, one of a buffer that is updated, one that nobody waits for, a to_torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.layer(x)
        first, second = get_start(h, "cpu"), get_start(h, "cpu")
        before = get_start(self.calls)
        self.calls.add_(1)
        get_start(self.calls)
        h.mul_(2)
        one, other = get_wait(first), get_wait(second)
        one.add_(1)
        return h, one, other, get_wait(before), dtorch_ops.to_torch(h, device="cpu", copy=True)


STARTS, WAITS = 5, 4


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def exported(model: Model, strict: bool) -> ExportedProgram:
    rows = Dim("rows")
    return torch.export.export(
        model, (torch.randn(3, 4),), dynamic_shapes={"x": {0: rows}}, strict=strict
    )


def calls(program: ExportedProgram, operator: str) -> int:
    return str(program.graph).count(f"dtorch.{operator}.default")


def check_runs(run: torch.nn.Module, model: Model) -> None:
    """As the model does, call for call, whatever the number of rows."""
    model = copy.deepcopy(model)
    for rows in (2, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(run(x), model(x))


strict_and_not = pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])


@strict_and_not
def test_an_exported_program_keeps_every_call(model, strict):
    program = exported(model, strict)
    assert (calls(program, "get_start"), calls(program, "get_wait")) == (STARTS, WAITS)
    check_runs(program.module(), model)


@strict_and_not
def test_decompositions_keep_every_call(model, strict):
    program = exported(model, strict).run_decompositions()
    assert (calls(program, "get_start"), calls(program, "get_wait")) == (STARTS, WAITS)
    check_runs(program.module(), model)


@strict_and_not
def test_a_saved_program(model, strict, tmp_path):
    program = exported(model, strict)
    for saved in (program, program.run_decompositions()):
        torch.export.save(saved, tmp_path / "model.pt2")
        loaded = torch.export.load(tmp_path / "model.pt2")
        assert (calls(loaded, "get_start"), calls(loaded, "get_wait")) == (STARTS, WAITS)
        check_runs(loaded.module(), model)


def test_a_saved_program_in_another_process(model, tmp_path):
    path = tmp_path / "model.pt2"
    program = exported(model, strict=False)
    torch.export.save(program, path)
    x = torch.ones(2, 4)
    expected = [value.detach().tolist() for value in program.module()(x)]
    said = check_python(
        """
        program = torch.export.load(sys.argv[1])
        print([value.detach().tolist() for value in program.module()(torch.ones(2, 4))])
        """,
        args=(str(path),),
        timeout=120,
    )
    assert eval(said) == expected


def test_gradients_of_an_exported_program(model):
    x = torch.randn(2, 4)
    run = exported(model, strict=False).module()
    grads = []
    for module in (model, run):
        model.zero_grad()  # whose parameters the program has
        sum(value.sum() for value in module(x)).backward()
        grads.append({name: p.grad.clone() for name, p in module.named_parameters()})
    torch.testing.assert_close(grads[0], grads[1])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            exported(Model(), strict=False), package_path=str(path)
        )
    return path


def test_a_package_of_aotinductor(model, package):
    check_runs(torch._inductor.aoti_load_package(str(package)), model)


def test_a_package_of_aotinductor_makes_every_call(package):
    run = torch._inductor.aoti_load_package(str(package))
    run(torch.randn(2, 4))
    with torch.profiler.profile() as profile:
        run(torch.randn(2, 4))
    names = [event.name for event in profile.events()]
    assert names.count("dtorch::get_start") == STARTS
    assert names.count("dtorch::get_wait") == WAITS


def test_a_package_of_aotinductor_in_another_process(model, package):
    done = run_python(
        """
        model = torch._inductor.aoti_load_package(sys.argv[1])
        print([value.tolist() for value in model(torch.ones(2, 4))])
        """,
        args=(str(package),),
        prelude="import sys, warnings\nwarnings.simplefilter('ignore')\nimport torch, dtorch_ops\n",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr  # where a CUDA build of torch speaks of a missing GPU
    values = model(torch.ones(2, 4))
    for value, expected in zip(eval(done.stdout), values, strict=True):
        torch.testing.assert_close(torch.tensor(value), expected.detach())


class Fetch(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return dtorch_ops.to_torch_async(x * 2).get()


class Sync(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        dtorch_ops.sync()
        return x + 1


@pytest.mark.parametrize("kind", [Fetch, Sync])
@strict_and_not
def test_a_future_in_an_exported_program_is_an_error(strict, kind):
    with pytest.raises(Exception, match=r"get_start\s+and\s+get_wait"):
        torch.export.export(kind(), (torch.ones(2),), strict=strict)
