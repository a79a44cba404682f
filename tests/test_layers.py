"""Dependence has one direction: the includes of csrc/ and the imports of dtorch_ops/."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from helpers import ROOT

import dtorch_ops

CSRC = ROOT / "csrc"
CORE = CSRC / "dtorch"
PACKAGE = Path(dtorch_ops.__file__).parent

# The folders of csrc/dtorch. Each includes itself and those before it.
FOLDERS = ("base", "sys", "shm", "future", "promise", "file", "network", "device", "ops")
TORCH_FREE = ("base", "sys", "shm")

# The modules of dtorch_ops. Each imports only those before it.
MODULES = (
    "_build_info",  # written by the build
    "_sources",
    "_library",
    "_C",  # native
    "_ops",
    "promise",
    "_compile",
    "functional",
    "_asyncio",
    "_concurrent",
    "errors",
    "future",
    "_tree",
    "convert",
    "devices",
    "groups",
    "adapters",
    "shared_memory",
    "profiler",
    "_logging",
    "pending",
    "_fake",
    "_vmap",
    "_torchscript",
    "network",
    "__init__",
    "__main__",
)


# ---- C++ ----------------------------------------------------------------------------------------


def sources(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".cpp"))


def includes(file: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', file.read_text(), re.MULTILINE)


def name_of(file: Path) -> str:
    return str(file.relative_to(CSRC))


CORE_SOURCES = sources(CORE)
core_sources = pytest.mark.parametrize("file", CORE_SOURCES, ids=name_of)


def folder_of(path: Path) -> str | None:
    """None for the umbrella header, which may include all."""
    parts = path.relative_to(CORE).parts
    return parts[0] if len(parts) > 1 else None


def test_every_folder_has_its_place():
    with_sources = {folder_of(f) for f in CORE_SOURCES} - {None}
    assert with_sources <= set(FOLDERS), "give the new folder a place in FOLDERS"


def test_the_readme_lists_the_folders_in_their_order():
    table = re.findall(r"^\| `(\w+)/` \|", (CSRC / "README.md").read_text(), re.MULTILINE)
    with_sources = {folder_of(f) for f in CORE_SOURCES} - {None}
    assert table == [folder for folder in FOLDERS if folder in with_sources]


@core_sources
def test_a_folder_includes_itself_and_those_before_it(file):
    folder = folder_of(file)
    allowed = FOLDERS if folder is None else FOLDERS[: FOLDERS.index(folder) + 1]
    for included in includes(file):
        if included.startswith("dtorch/") and included.count("/") > 1:
            assert included.split("/")[1] in allowed, included
        elif included.startswith("dtorch/"):
            pytest.fail(f"{included}: the umbrella header is for users")


@core_sources
def test_own_headers_are_found_from_the_include_root(file):
    """So that they read the same in the tree and installed."""
    for included in includes(file):
        if (file.parent / included).exists():
            pytest.fail(f"{included}: written from this folder, not from csrc/")
        if included.startswith("dtorch/"):
            assert (CSRC / included).exists(), included


@core_sources
def test_the_core_knows_no_python(file):
    python = re.compile(r"(Python\.h|pybind11/|python/|torch/extension\.h|torch/csrc/.*python)")
    assert [i for i in includes(file) if python.match(i)] == []
    text = re.sub(r"//[^\n]*", "", file.read_text())
    assert not re.search(r"\b(PyObject|PyGILState\w*|Py_\w+|THP\w+|pybind11::)\b", text)


@core_sources
def test_the_lowest_layers_know_no_torch(file):
    if folder_of(file) in TORCH_FREE:
        torch = [i for i in includes(file) if i.split("/")[0] in ("torch", "ATen", "c10", "caffe2")]
        assert torch == []


@core_sources
def test_only_ops_registers_operators(file):
    registering = [i for i in includes(file) if i in ("torch/library.h", "torch/custom_class.h")]
    assert not registering or folder_of(file) == "ops", registering


# Without it everything else works.
KNOW_RPC = tuple(f"dtorch/network/{name}" for name in ("agent.h", "agent.cpp", "rpc.cpp"))
TOUCH_TORCHSCRIPT = ("dtorch/ops/torchscript.cpp",)


@core_sources
def test_one_core_file_touches_torchscript(file):
    jit = [
        i for i in includes(file) if i.startswith(("torch/csrc/jit", "torch/script.h", "torch/jit"))
    ]
    assert not jit or name_of(file) in TOUCH_TORCHSCRIPT, jit


@core_sources
def test_few_core_files_know_rpc(file):
    known = [i for i in includes(file) if i.startswith("torch/csrc/distributed")]
    assert not known or name_of(file) in KNOW_RPC, known


@core_sources
def test_the_agent_is_behind_one_file(file):
    used = "dtorch/network/agent.h" in includes(file)
    assert not used or name_of(file) in ("dtorch/network/rpc.cpp", "dtorch/network/agent.cpp")


def test_no_two_headers_include_each_other():
    graph = {
        name_of(f): [i for i in includes(f) if i.startswith("dtorch/")]
        for f in CORE_SOURCES
        if f.suffix == ".h"
    }
    assert_acyclic(graph)


def test_every_source_file_is_built():
    listed = (CSRC / "CMakeLists.txt").read_text()
    missing = [name_of(f) for f in sources(CSRC) if f.suffix == ".cpp" and name_of(f) not in listed]
    assert missing == []


@pytest.mark.parametrize("file", [f for f in sources(CSRC) if f.suffix == ".h"], ids=name_of)
def test_every_header_is_guarded(file):
    assert "#pragma once" in file.read_text().splitlines()[:3]


def test_the_schemas_are_in_one_file():
    """Nothing else spells one out."""
    for file in CORE_SOURCES:
        if name_of(file) != "dtorch/ops/schemas.h":
            code = re.sub(r"//[^\n]*", "", file.read_text())
            assert not re.search(r'"[^"\n]*\) -> [^"\n]*"', code), name_of(file)


# ---- Python -------------------------------------------------------------------------------------


def modules() -> dict[str, ast.Module]:
    return {p.stem: ast.parse(p.read_text(), p.name) for p in sorted(PACKAGE.glob("*.py"))}


MODULE_TREES = modules()
each_module = pytest.mark.parametrize("module", MODULE_TREES)


def imported(module: str) -> list[str]:
    """The modules of ours that ``module`` imports, wherever in it."""
    found = []
    for node in ast.walk(MODULE_TREES[module]):
        if isinstance(node, ast.Import):
            found += ["__init__" for a in node.names if a.name.split(".")[0] == "dtorch_ops"]
        elif isinstance(node, ast.ImportFrom) and node.level == 1:
            found += [node.module] if node.module else [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] != "dtorch_ops", "imports of ours are relative"
    return found


def assert_acyclic(graph: dict[str, list[str]]) -> None:
    done: set[str] = set()

    def visit(node: str, path: tuple[str, ...]) -> None:
        assert node not in path, " -> ".join([*path, node])
        if node not in done:
            for following in graph.get(node, []):
                visit(following, (*path, node))
            done.add(node)

    for start in graph:
        visit(start, ())


def test_every_module_has_its_place():
    assert set(MODULE_TREES) <= set(MODULES), "give the new module a place in MODULES"


def test_the_modules_import_each_other_one_way():
    assert_acyclic({module: imported(module) for module in MODULE_TREES})


@each_module
def test_a_module_imports_those_before_it(module):
    assert set(imported(module)) <= set(MODULES[: MODULES.index(module)])


def attributes(module: str) -> set[str]:
    """The dotted names that the code of ``module`` uses; docstrings do not count."""
    return {ast.unparse(n) for n in ast.walk(MODULE_TREES[module]) if isinstance(n, ast.Attribute)}


def imported_names(module: str) -> set[str]:
    found = set()
    for node in ast.walk(MODULE_TREES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@each_module
def test_one_module_names_the_operators(module):
    used = {n for n in attributes(module) | imported_names(module) if n.startswith("torch.ops")}
    if module == "_library":
        used -= {"torch.ops", "torch.ops.load_library"}
    assert not used or module == "_ops", used


@each_module
def test_one_module_touches_torchscript(module):
    used = {n for n in attributes(module) | imported_names(module) if n.startswith("torch.jit")}
    assert not used or module == "_torchscript", used


@each_module
def test_every_module_says_what_it_is_for(module):
    assert ast.get_docstring(MODULE_TREES[module])
