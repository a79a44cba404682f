"""What tests on an accelerator rely on: one set of names, and a reason for what only one shows."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import accelerators
import accelerators.cuda
import accelerators.fake
import accelerators.gated
import pytest
from helpers import ROOT

FILES = sorted([*ROOT.glob("tests/test_accelerator_*.py"), *ROOT.glob("tests/gpu/test_*.py")])
FILES.append(ROOT / "tests" / "test_accelerator.py")


def cases_of(file: Path) -> list[ast.FunctionDef]:
    tree = ast.parse(file.read_text())
    return [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def decorated_by(test: ast.FunctionDef) -> str:
    names = [
        call.func.id
        for call in test.decorator_list
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    ]
    (name,) = [name for name in names if name.startswith("on_")]
    return name


def test_all_accelerators_have_the_same_names():
    modules = (accelerators.fake, accelerators.gated, accelerators.cuda)
    for module in modules:
        assert module.__all__ == list(accelerators.NAMES)
    for name in accelerators.NAMES:
        values = [getattr(module, name) for module in modules]
        if not any(map(callable, values)):
            continue
        # A call of one is a call of the others.
        parameters = [
            [(p.kind, p.default is p.empty) for p in inspect.signature(f).parameters.values()]
            for f in values
        ]
        assert parameters[0] == parameters[1] == parameters[2], name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_runs_on_both_names_none_of_them(file):
    for test in cases_of(file):
        if decorated_by(test) == "on_accelerator":
            text = ast.unparse(ast.Module(test.body, []))
            for word in ("fake.", "'fake", "torch.cuda", "'cuda"):
                assert word not in text, f"{test.name} is @on_accelerator, and says {word}"


def test_most_run_on_both():
    kinds = [decorated_by(test) for file in FILES for test in cases_of(file)]
    assert kinds.count("on_accelerator") > len(kinds) / 2


def pytest_on(accelerator: str, *arguments: str) -> str:
    """What it says, once it has not failed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        env=os.environ | {"TEST_ACCELERATOR": accelerator},
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.skipif(accelerators.cuda.device_count() > 0, reason="there is a CUDA device")
def test_an_accelerator_that_is_not_there_is_a_skip_with_a_reason():
    said = pytest_on("cuda", "tests/test_accelerator.py", "tests/gpu")
    assert "there is no device cuda" in said
    assert "failed" not in said and "passed" not in said


@pytest.mark.skipif(accelerators.NAME != "fake", reason="one of them is enough")
@pytest.mark.timeout(600)
def test_they_run_with_no_more_than_cuda_offers():
    accelerators.prepare()
    said = pytest_on("gated", "tests/test_accelerator.py", "tests/gpu/test_gpu_caller.py")
    assert "it takes 2 devices, there is 1" in said
