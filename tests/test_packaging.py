"""What a stranger gets: import, versions, public names, types, what the native files need."""

from __future__ import annotations

import doctest
import importlib
import importlib.metadata
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import fresh
import pytest
import torch
from helpers import ROOT, check_python

import dtorch_ops
from dtorch_ops import _sources

PACKAGE = Path(dtorch_ops.__file__).parent
LIBRARY = PACKAGE / "lib" / "libdtorch_ops.so"
MODULE = Path(dtorch_ops._C.__file__)


# ---- Import -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["", "import torch\n"], ids=["alone", "after torch"])
def test_import_says_nothing_and_warns_of_nothing(first):
    out = check_python(
        first + "import dtorch_ops; print(dtorch_ops.__version__, end='')", prelude=""
    )
    assert out == dtorch_ops.__version__


def test_the_schemas_of_a_fresh_interpreter():
    out = check_python(
        """
        for name in "get_tensor_async", "sync", "get_future":
            for schema in torch._C._jit_get_schemas_for_operator(f"dtorch::{name}"):
                print(*(r.type for r in schema.returns), sep=", ")
        """
    )
    assert sorted(out.splitlines()) == [
        "",  # sync takes a promise, and returns nothing
        "",
        "Future[NoneType]",
        "Future[NoneType]",
        "Future[Tensor]",
        "Future[Tensor]",
    ]


def test_import_starts_nothing():
    """No thread, no accelerator, nothing distributed."""
    fresh.check(
        """
        import os, torch
        threads = os.listdir("/proc/self/task")
        import dtorch_ops
        assert os.listdir("/proc/self/task") == threads
        assert not torch.distributed.is_initialized()
        assert not torch.cuda.is_initialized()
        """,
        prelude="",
    )


@pytest.mark.parametrize(
    "error",
    [
        *("ImportError", "AttributeError", "RuntimeError", "NotImplementedError"),
        *("TypeError", "DeprecationWarning", "FutureWarning"),
    ],
)
def test_without_torchscript_the_rest_works(error):
    """Torch's own operators go through the same function, and are let through."""
    fresh.check(
        f"""
        import threading
        import torch

        original = torch.jit._builtins._register_builtin

        def refuse(function, name):
            if function in (torch.futures.collect_all, torch.futures.wait_all):
                raise {error}("torch.jit is gone")
            original(function, name)

        torch.jit._builtins._register_builtin = refuse
        import dtorch_ops

        assert not dtorch_ops._torchscript.available
        t = torch.ones(2, requires_grad=True)
        assert dtorch_ops.to_torch(t) is t
        assert torch.ops.dtorch.get_tensor_async(t, copy=True).wait().tolist() == [1, 1]
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        threading.Thread(target=promise.set_value, args=(t,)).start()
        assert future.get() is t
        assert len(dtorch_ops.wait_all([dtorch_ops.to_torch_async(t)] * 2)) == 2
        assert torch.ops.dtorch.wait_for(dtorch_ops.sync_future(), 1000) is None
        """,
        prelude="",
    )


def test_import_adds_what_is_documented_and_nothing_else():
    """The methods of torch.Tensor, and ``__await__`` where there was none."""
    fresh.check(
        """
        import torch
        before = {t: set(vars(t)) for t in (torch.Tensor, torch._C.Future, torch.futures.Future)}
        names = set(vars(torch)) | set(vars(torch.futures))
        import dtorch_ops
        added = {t: set(vars(t)) - before[t] for t in before}
        assert added == {
            torch.Tensor: {"to_torch", "to_torch_async"},
            torch._C.Future: {"__await__"},
            torch.futures.Future: set(),
        }, added
        assert set(vars(torch)) | set(vars(torch.futures)) == names
        """,
        prelude="",
    )


def test_an_existing_await_is_left_alone():
    fresh.check(
        """
        import torch
        def mine(self):
            yield
        torch._C.Future.__await__ = mine
        import dtorch_ops
        assert torch._C.Future.__await__ is mine
        """,
        prelude="",
    )


def test_modules_can_be_reloaded():
    fresh.check(
        """
        import importlib
        importlib.reload(dtorch_ops)
        assert dtorch_ops.to_torch(torch.ones(1)).item() == 1
        """
    )


# ---- Refusing to import -------------------------------------------------------------------------


@pytest.fixture
def copy_of_package(tmp_path: Path) -> Path:
    """Another place from which the package can be imported."""
    shutil.copytree(PACKAGE, tmp_path / "dtorch_ops", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "dtorch_ops"


def import_from(place: Path) -> str:
    """A prelude: imports come from ``place``, and nothing from an editable installation."""
    return f"""
import sys
import tarfile
import torch
sys.meta_path[:] = [f for f in sys.meta_path if "Editable" not in repr(f)]
sys.path.insert(0, {str(place)!r})

def error_of_import():
    try:
        import dtorch_ops
    except ImportError as error:
        return str(error)
    sys.exit("imported: " + dtorch_ops.__file__)

def mapped_files():
    with open("/proc/self/maps") as maps:
        return {{line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}}
"""


def record_version(package: Path, version: str) -> None:
    info = package / "_build_info.py"
    text = re.sub(r"TORCH_VERSION = .*", f"TORCH_VERSION = {version!r}", info.read_text())
    info.write_text(text)


@pytest.mark.parametrize("built_for", ["2.9.1", "2.99.0+cu126", "3.0.0.dev20270101+cpu"])
def test_another_torch_than_the_one_built_for(copy_of_package, built_for):
    record_version(copy_of_package, built_for)
    out = fresh.check(
        """
        message = error_of_import()
        assert not [f for f in mapped_files() if "/dtorch_ops/" in f], "opened before the check"
        assert "dtorch" not in str(torch._C._dispatch_get_all_op_names())
        print(message)
        """,
        prelude=import_from(copy_of_package.parent),
    )
    assert built_for in out and torch.__version__ in out
    assert "Install torch " + ".".join(built_for.split(".")[:2]) in out
    assert "pip install --no-build-isolation" in out
    assert len(out.strip().splitlines()) == 1


def test_another_patch_release_of_the_same_minor_is_taken(copy_of_package):
    minor = ".".join(torch.__version__.split(".")[:2])
    record_version(copy_of_package, f"{minor}.99+cu999")
    fresh.check(
        "import dtorch_ops; assert dtorch_ops.to_torch(torch.ones(1)).item() == 1",
        prelude=import_from(copy_of_package.parent),
    )


@pytest.mark.parametrize(
    "missing",
    [
        ["lib"],
        ["lib/libdtorch_ops.so"],
        ["_C.*.so"],
        ["_build_info.py"],
        ["lib", "_C.*.so", "_build_info.py"],
    ],
    ids=["folder", "library", "module", "build info", "not built at all"],
)
def test_what_is_missing_is_said_with_what_to_do(copy_of_package, missing):
    for pattern in missing:
        for path in copy_of_package.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    out = fresh.check("print(error_of_import())", prelude=import_from(copy_of_package.parent))
    assert "make build" in out and "pip install --no-build-isolation" in out


# Where the copy comes from is no part of the check: one path may end with another.
@pytest.mark.parametrize("nested", [False, True], ids=["elsewhere", "under the same path"])
def test_a_second_copy_of_the_package(copy_of_package, nested):
    place = copy_of_package.parent
    if nested:
        place = copy_of_package.parent / "root" / str(PACKAGE.parent).lstrip("/")
        place.mkdir(parents=True)
        shutil.move(copy_of_package, place)
    out = fresh.check(
        f"""
        import dtorch_ops
        assert dtorch_ops.__file__.startswith({str(place)!r})
        for name in [m for m in sys.modules if m.split(".")[0] == "dtorch_ops"]:
            del sys.modules[name]
        sys.path[0] = {str(PACKAGE.parent)!r}
        print(error_of_import())
        """,
        prelude=import_from(place),
    )
    assert "another file" in out and str(LIBRARY) in out


def test_a_copy_of_the_library_was_opened_before(copy_of_package):
    out = fresh.check(
        f"""
        torch.ops.load_library({str(copy_of_package / "lib" / LIBRARY.name)!r})
        print(error_of_import())
        """,
        prelude=import_from(PACKAGE.parent),
    )
    assert "another file" in out


def test_the_library_itself_was_opened_before():
    fresh.check(
        f"""
        torch.ops.load_library({str(LIBRARY)!r})
        assert torch.ops.dtorch.get_tensor_async(torch.ones(1)).wait().item() == 1
        import dtorch_ops
        assert dtorch_ops.to_torch(torch.ones(1)).item() == 1
        """,
        prelude=import_from(PACKAGE.parent),
    )


def test_operators_of_the_same_namespace_by_somebody_else():
    fresh.check(
        """
        library = torch.library.Library("dtorch", "FRAGMENT")
        library.define("of_somebody_else(Tensor x) -> Tensor")
        import dtorch_ops
        assert dtorch_ops.to_torch(torch.ones(1)).item() == 1
        """,
        prelude=import_from(PACKAGE.parent),
    )


def test_free_threaded_python_is_refused_by_name():
    out = fresh.check(
        """
        import sysconfig
        original = sysconfig.get_config_var
        sysconfig.get_config_var = lambda n: 1 if n == "Py_GIL_DISABLED" else original(n)
        print(error_of_import())
        assert not [f for f in mapped_files() if "/dtorch_ops/" in f], "opened before the check"
        """,
        prelude=import_from(PACKAGE.parent),
    )
    assert "free-threaded" in out


def test_an_import_that_failed_can_be_tried_again(copy_of_package):
    library = copy_of_package / "lib" / LIBRARY.name
    library.rename(library.with_suffix(".away"))
    fresh.check(
        f"""
        import os
        assert "missing" in error_of_import()
        os.rename({str(library.with_suffix(".away"))!r}, {str(library)!r})
        import dtorch_ops
        assert dtorch_ops.to_torch(torch.ones(1)).item() == 1
        """,
        prelude=import_from(copy_of_package.parent),
    )


# ---- Native files -------------------------------------------------------------------------------


def tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def dynamic(file: Path, tag: str) -> list[str]:
    return re.findall(rf"\({tag}\).*\[(.*)\]", tool("readelf", "-d", str(file)))


def test_the_library_needs_no_python():
    undefined = tool("nm", "-D", "--undefined-only", str(LIBRARY)).split()
    assert "U" in undefined
    assert [s for s in undefined if re.match(r"_?Py[A-Z_]|THP|_Z.*8pybind11", s)] == []
    needed = dynamic(LIBRARY, "NEEDED")
    assert {"libtorch_cpu.so", "libc10.so"} <= set(needed)
    assert [n for n in needed if "python" in n] == []


def test_the_library_opens_with_all_symbols_bound():
    fresh.check(
        f"""
        import ctypes, os
        import torch
        ctypes.CDLL({str(LIBRARY)!r}, mode=os.RTLD_NOW)
        """,
        prelude="",
    )


@pytest.mark.parametrize("file", [LIBRARY, MODULE], ids=["library", "module"])
def test_libraries_are_found_relative_to_the_package(file):
    paths = [p for entry in dynamic(file, "(?:RUNPATH|RPATH)") for p in entry.split(":")]
    assert paths and all(p.startswith("$ORIGIN") for p in paths), paths


def test_the_module_does_not_bind_to_one_interpreter():
    assert [n for n in dynamic(MODULE, "NEEDED") if n.startswith("libpython")] == []


# ---- Public names -------------------------------------------------------------------------------

CONTRACT = {
    *("to_torch", "to_torch_async", "sync", "sync_future"),
    *("TensorPromise", "VoidPromise", "Future", "TensorFuture", "VoidFuture"),
    *("collect_all", "collect_any", "wait_all", "as_completed"),
    *("DTorchError", "BrokenPromiseError", "PromiseAlreadySatisfiedError"),
    *("FutureAlreadyRetrievedError", "RemoteError"),
    "cmake_prefix_path",
}


def test_all_lists_every_public_name():
    public = {
        name
        for name, value in vars(dtorch_ops).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert set(dtorch_ops.__all__) == public
    assert public >= CONTRACT


def test_all_is_sorted():
    assert dtorch_ops.__all__ == sorted(dtorch_ops.__all__)
    assert len(set(dtorch_ops.__all__)) == len(dtorch_ops.__all__)


@pytest.mark.parametrize("name", sorted(CONTRACT))
def test_a_public_object_says_where_it_is_found(name):
    value = getattr(dtorch_ops, name)
    if not isinstance(value, str):
        module = importlib.import_module(value.__module__)
        assert getattr(module, name) is value
        assert name in module.__all__


def public_callables() -> Iterator[tuple[str, object]]:
    """The public functions and classes, and the public methods of the latter."""
    for name in dtorch_ops.__all__:
        value = getattr(dtorch_ops, name)
        if isinstance(value, str):
            continue
        yield name, value
        if inspect.isclass(value) and not issubclass(value, BaseException):
            for member in dir(value):
                if not member.startswith("_") and callable(getattr(value, member)):
                    yield f"{name}.{member}", getattr(value, member)


CALLABLES = dict(public_callables())


@pytest.mark.parametrize("name", CALLABLES)
def test_every_public_name_has_a_docstring(name):
    assert (inspect.getdoc(CALLABLES[name]) or "").strip()


METHODS = {
    "TensorFuture": ("get", "wait", "value", "is_ready", "valid", "then", "add_done_callback"),
    "VoidFuture": ("get", "wait", "value", "is_ready", "valid", "then", "add_done_callback"),
    "TensorPromise": ("get_future", "set_value", "set_exception", "cancel"),
    "VoidPromise": ("get_future", "set_value", "set_exception", "cancel"),
}


@pytest.mark.parametrize("name", [f"{c}.{m}" for c, ms in METHODS.items() for m in ms])
def test_a_native_method_has_a_signature(name):
    """So that help() and editors show it."""
    signature = inspect.signature(CALLABLES[name])
    assert "self" in signature.parameters
    if name.endswith(".wait"):
        assert signature.parameters["timeout_ms"].default is None


def test_the_promises_show_their_arguments():
    for promise in (dtorch_ops.TensorPromise, dtorch_ops.VoidPromise):
        assert "mode" in inspect.signature(promise).parameters


def test_the_errors():
    error = dtorch_ops.DTorchError
    assert issubclass(error, RuntimeError)
    for name in CONTRACT:
        if name.endswith("Error"):
            assert issubclass(getattr(dtorch_ops, name), error)
    remote = dtorch_ops.RemoteError("pkg.Odd", "the message", "the traceback")
    assert (remote.type_name, remote.message) == ("pkg.Odd", "the message")
    assert "the traceback" in str(remote)


def test_the_classes():
    for future in (dtorch_ops.TensorFuture, dtorch_ops.VoidFuture):
        assert issubclass(future, torch._C.Future)
    for promise in (dtorch_ops.TensorPromise, dtorch_ops.VoidPromise):
        assert issubclass(promise, torch.ScriptObject)


def test_the_version():
    assert dtorch_ops.__version__ == importlib.metadata.version("dtorch_ops")
    release, _, label = dtorch_ops.__version__.partition("+")
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", release)
    assert label == "torch" + ".".join(torch.__version__.split(".")[:2])
    [requirement] = importlib.metadata.requires("dtorch_ops")
    assert requirement == f"torch=={label.removeprefix('torch')}.*"


def test_the_cmake_files_are_where_the_package_says():
    found = Path(dtorch_ops.cmake_prefix_path) / "dtorch_ops" / "dtorch_opsConfig.cmake"
    assert found.is_file()
    for file in found.parent.glob("*.cmake"):
        assert str(ROOT) not in file.read_text(), f"{file.name} cannot be moved"


def test_the_headers_are_installed():
    installed = {p.relative_to(PACKAGE / "include") for p in PACKAGE.rglob("include/**/*.h")}
    umbrella = PACKAGE / "include" / "dtorch" / "dtorch.h"
    pending = [umbrella]
    seen = set()
    while pending:  # whatever the public header includes
        header = pending.pop()
        seen.add(header)
        for name in re.findall(r'#include "(dtorch/[^"]+)"', header.read_text()):
            assert Path(name) in installed
            if PACKAGE / "include" / name not in seen:
                pending.append(PACKAGE / "include" / name)


# ---- Examples in docstrings ---------------------------------------------------------------------


def modules() -> list[str]:
    names = [m.name for m in pkgutil.iter_modules([str(PACKAGE)]) if m.name != "__main__"]
    return ["dtorch_ops", *(f"dtorch_ops.{name}" for name in names)]


def docstrings() -> dict[str, str]:
    """Every docstring of the package, those of native methods included, by name."""
    found: dict[str, str] = {}
    for module_name in modules():
        module = importlib.import_module(module_name)
        found[module_name] = module.__doc__ or ""
        for name, value in vars(module).items():
            if not str(getattr(value, "__module__", "")).startswith("dtorch_ops"):
                continue
            qualified = f"{value.__module__}.{name}"
            found[qualified] = getattr(value, "__doc__", None) or ""
            if inspect.isclass(value):
                for member, attribute in vars(value).items():
                    doc = getattr(attribute, "__doc__", None)
                    if isinstance(doc, str):
                        found[f"{qualified}.{member}"] = doc
    return found


DOCSTRINGS = docstrings()
PARSER = doctest.DocTestParser()
EXAMPLES = {n: d for n, d in DOCSTRINGS.items() if ">>>" in d}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_a_docstring_run(name):
    test = PARSER.get_doctest(
        inspect.cleandoc(EXAMPLES[name]),
        {"torch": torch, "dtorch_ops": dtorch_ops},
        name,
        None,
        None,
    )
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    assert runner.run(test, out=said.append).failed == 0, "".join(said)


@pytest.mark.parametrize(
    "name",
    ["Future", "TensorPromise", "VoidPromise", "Future.get", "Future.wait", "Future.then"]
    + [n for n in CALLABLES if n[0].islower()],
)
def test_the_main_names_have_an_example(name):
    assert ">>>" in (inspect.getdoc(CALLABLES[name]) or "")


# ---- Types --------------------------------------------------------------------------------------

USER_PROGRAM = """
import asyncio
import concurrent.futures

import torch
import torch.distributed
from torch import Tensor

import dtorch_ops

t = torch.ones(2)
future = dtorch_ops.to_torch_async(t, device="cpu", copy=True)
reveal_type(future)  # dtorch_ops.future.TensorFuture
reveal_type(future.get())  # torch._tensor.Tensor
reveal_type(future.wait(5000))  # torch._tensor.Tensor
reveal_type(future.wait())  # torch._tensor.Tensor
reveal_type(future.value())  # torch._tensor.Tensor
reveal_type(future.is_ready())  # bool
reveal_type(future.valid())  # bool
reveal_type(future.done())  # bool
reveal_type(future.then(lambda f: 1).wait())  # int
reveal_type(dtorch_ops.to_torch(t, device=torch.device("cpu")))  # torch._tensor.Tensor
future.add_done_callback(print)

promise = dtorch_ops.TensorPromise(mode="memory")
reveal_type(promise.get_future())  # dtorch_ops.future.TensorFuture
promise.set_value(t)
promise.set_exception(ValueError("no"))
reveal_type(promise.cancel())  # bool
void = dtorch_ops.VoidPromise()
void.set_value()
reveal_type(void.get_future())  # dtorch_ops.future.VoidFuture

dtorch_ops.sync(torch.device("cpu"), timeout_ms=10)
dtorch_ops.sync(["cpu", torch.device("meta")])
reveal_type(dtorch_ops.sync_future(devices=None))  # dtorch_ops.future.VoidFuture

futures = [future, promise.get_future()]
reveal_type(dtorch_ops.wait_all(futures, timeout_ms=1.5))  # list[torch._tensor.Tensor]
reveal_type(dtorch_ops.collect_any(futures).get())  # torch._tensor.Tensor
bare: "torch._C.Future[Tensor]" = future
reveal_type(dtorch_ops.Future(bare).get())  # torch._tensor.Tensor
reveal_type(dtorch_ops.wait_all([bare]))  # list[torch._tensor.Tensor]

work: "concurrent.futures.Future[Tensor]" = concurrent.futures.Future()
reveal_type(dtorch_ops.from_future(work))  # dtorch_ops.future.TensorFuture
reveal_type(dtorch_ops.from_future(future))  # dtorch_ops.future.TensorFuture
reveal_type(dtorch_ops.from_future(void.get_future()))  # dtorch_ops.future.VoidFuture
reveal_type(dtorch_ops.from_future(bare))  # dtorch_ops.future.TensorFuture
reveal_type(dtorch_ops.from_future(work, dtorch_ops.VoidFuture))  # dtorch_ops.future.VoidFuture
reveal_type(dtorch_ops.from_future(work, kind=dtorch_ops.Future).get())  # Any
collective = torch.distributed.Work()
reveal_type(dtorch_ops.from_future(collective))  # dtorch_ops.future.VoidFuture
reveal_type(dtorch_ops.from_future(collective, dtorch_ops.TensorFuture).get())  # torch._tensor.Tensor
reveal_type(future.as_concurrent().result(timeout=1))  # torch._tensor.Tensor
reveal_type(void.get_future().as_concurrent())  # concurrent.futures._base.Future[None]


async def main() -> Tensor:
    reveal_type(await future)  # torch._tensor.Tensor
    reveal_type(await asyncio.wait_for(future, 3))  # torch._tensor.Tensor
    reveal_type(await asyncio.gather(future, future))  # tuple[torch._tensor.Tensor, torch._tensor.Tensor]
    return await dtorch_ops.collect_any(futures)


future.get(3)  # error: call-arg
future.wait("soon")  # error: arg-type
promise.set_value(3)  # error: arg-type
void.set_value(t)  # error: call-arg
dtorch_ops.to_torch_async([t], "cpu")  # error: call-overload
dtorch_ops.to_torch(t, "cpu")  # error: call-overload
dtorch_ops.wait_all([t])  # error: arg-type
dtorch_ops.from_future(3)  # error: call-overload
"""  # noqa: E501

# As the docstrings use them: the very objects that were passed come back.
MEMBERS_PROGRAM = """
import torch

import dtorch_ops

futures = [dtorch_ops.to_torch_async(torch.ones(2))]
for f in dtorch_ops.as_completed(futures, timeout_ms=10):
    reveal_type(f.get())  # torch._tensor.Tensor
for g in dtorch_ops.collect_all(futures).get():
    reveal_type(g.get())  # torch._tensor.Tensor


async def main() -> None:
    async for f in dtorch_ops.as_completed(futures):
        reveal_type(f.get())  # torch._tensor.Tensor
"""


@pytest.mark.timeout(300)  # mypy reads all of torch the first time
@pytest.mark.parametrize("program", [USER_PROGRAM, MEMBERS_PROGRAM], ids=["user", "members"])
def test_types_of_a_user_program(tmp_path, program):
    pytest.importorskip("mypy", reason="installed by 'make lint'")
    file = tmp_path / "user_program.py"
    file.write_text(program)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found: dict[int, list[str]] = {}
    for line in done.stdout.splitlines():
        if match := re.fullmatch(r'.*program\.py:(\d+): note: Revealed type is "(.*)"', line):
            found.setdefault(int(match[1]), []).append(match[2])
        elif match := re.fullmatch(r".*program\.py:(\d+): error: .*\[([\w-]+)\]", line):
            found.setdefault(int(match[1]), []).append(f"error: {match[2]}")
    expected = {
        number: [comment.strip()]
        for number, line in enumerate(program.splitlines(), 1)
        for _, separator, comment in [line.partition("  # ")]
        if separator
    }
    assert found == expected, done.stdout + done.stderr


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "_C.pyi").is_file()


def test_the_stub_of_the_native_module_is_complete():
    stub = (PACKAGE / "_C.pyi").read_text()
    for name, value in vars(dtorch_ops._C).items():
        if name.startswith("_"):
            continue
        assert re.search(rf"^(class|def) {name}\b", stub, re.MULTILINE), name
        if inspect.isclass(value):
            body = re.search(rf"^class {name}\b.*\n((?: .*\n|\n)*)", stub, re.MULTILINE)[1]
            methods = [
                m for m in vars(value) if not m.startswith("__") and callable(getattr(value, m))
            ]
            missing = [
                m for m in methods if f"def {m}(" not in body and not m.startswith("_pybind11")
            ]
            assert missing == [], name


# ---- The repository -----------------------------------------------------------------------------


def test_no_file_speaks_of_the_place_where_it_was_written():
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout: nothing says which files belong to the project")
    places = "|".join(("work", "opt", "root", "home"))
    pattern = rf"(^|[^.[:alnum:]_}}-])/({places})/"
    done = subprocess.run(
        [git, "grep", "-nIE", pattern, "--", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout == ""


def test_the_source_archive_holds_all_but_what_is_for_git_and_ci(tmp_path):
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout: nothing says which files belong to the project")
    listed = subprocess.run(
        [git, "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    tracked = [name for name in listed if not name.startswith(".")]
    for name in tracked:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run(
        [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('dist')"],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    [archive] = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as members:
        held = {name.partition("/")[2] for name in members.getnames()}
    assert set(tracked) - held == set()


# ---- Building -----------------------------------------------------------------------------------

# Stands for Python: says what it was called for, and makes what a virtual environment has.
_FAKE_PYTHON = """#!/bin/sh
echo "$@" >> {log}
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
"""


class Checkout:
    """The files that the Makefile looks at, in a place where nothing is ever really built."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = folder / "log"
        self._python = folder / "python"
        self._python.write_text(_FAKE_PYTHON.format(log=self._log))
        self._python.chmod(0o755)
        for name in ("Makefile", "setup.py", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        for name in ("csrc", "requirements"):
            shutil.copytree(ROOT / name, folder / name)
        for name in ("tests", "benchmarks", "examples", "dtorch_ops"):
            (folder / name).mkdir()
            (folder / name / "any.py").touch()

    def make(self, *arguments: str) -> list[str]:
        """What the commands of ``make`` were that call Python."""
        self._log.write_text("")
        command = ["make", f"PYTHON={self._python}", *arguments]
        # Not what an outer make has in mind.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, check=True)
        return self._log.read_text().splitlines()

    def edit(self, name: str) -> None:
        """Make the file newer than all that was made of it."""
        newest = max(p.stat().st_mtime_ns for p in self.folder.rglob("*"))
        os.utime(self.folder / name, ns=(newest + 1_000_000,) * 2)


def builds(commands: list[str]) -> bool:
    return any("pip install" in command and "--editable ." in command for command in commands)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_builds_again_what_has_changed_and_nothing_else(tmp_path):
    checkout = Checkout(tmp_path)
    first = checkout.make("test-only", "ARGS=-k schema")
    assert builds(first) and first[-1] == "-m pytest -k schema"
    assert checkout.make("test-only", "ARGS=-k schema") == ["-m pytest -k schema"]
    assert checkout.make("build") == []
    for name in ("tests/any.py", "dtorch_ops/any.py", "csrc/README.md", "Makefile"):
        checkout.edit(name)
        assert checkout.make("test-only") == ["-m pytest"], name
    for name in ("csrc/dtorch/dtorch.h", "csrc/python/module.cpp", "csrc/CMakeLists.txt"):
        checkout.edit(name)
        assert builds(checkout.make("test-only")), f"an edit of {name} is not seen"
        assert checkout.make("build") == [], name


def test_without_torch_the_build_says_in_one_line_what_to_do(tmp_path):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "dtorch_ops").mkdir()
    code = (
        "import runpy, sys\n"
        "sys.modules['torch'] = None\n"
        "sys.argv = ['setup.py', 'bdist_wheel']\n"
        "runpy.run_path('setup.py', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "torch is not installed" in line and "--no-build-isolation" in line


def test_the_sources_are_compiled_as_the_headers_of_torch_ask_for():
    minor = ".".join(torch.__version__.split(".")[:2])
    found = list(ROOT.glob(f"build/torch{minor}-{sys.implementation.cache_tag}/compile_c*.json"))
    if not found:
        pytest.skip("not built here")
    commands = json.loads(found[0].read_text())
    assert commands
    for each in commands:
        standards = re.findall(r"-std=(\S+)", each["command"])
        assert standards and standards[-1] in ("c++20", "gnu++20"), each["command"]


# ---- A library older than its sources -----------------------------------------------------------

SOURCES = ("a.cpp", "folder/b.h", "CMakeLists.txt", "cmake/c.cmake", "cmake/d.in")


@pytest.fixture
def built(tmp_path: Path) -> tuple[Path, Path]:
    """A folder of sources, and a stamp that was written when they were read."""
    folder, stamp = tmp_path / "csrc", tmp_path / _sources.STAMP
    for name in SOURCES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    _sources.write_stamp(folder, stamp)
    return folder, stamp


def make_newer(*files: Path) -> None:
    """As a clock that goes on would; a file system's clock has ticks."""
    for file in files:
        os.utime(file, ns=(time.time_ns() + 1_000_000_000,) * 2)


def test_sources_as_they_were_have_not_changed(built):
    folder, stamp = built
    assert not _sources.have_changed(folder, stamp)
    make_newer(*(folder / name for name in SOURCES))
    assert not _sources.have_changed(folder, stamp), "another checkout of the same"


@pytest.mark.parametrize("name", [*SOURCES, "folder/new.cpp"])
def test_another_source_is_a_change(built, name):
    folder, stamp = built
    (folder / name).write_text("something else")
    make_newer(folder / name)
    assert _sources.have_changed(folder, stamp)
    _sources.write_stamp(folder, stamp)
    assert not _sources.have_changed(folder, stamp)


def test_a_source_that_has_gone_is_a_change(built):
    folder, stamp = built
    (folder / "folder" / "b.h").unlink()
    make_newer(folder / "folder")
    assert _sources.have_changed(folder, stamp)


def test_what_moves_from_one_file_to_the_next_is_a_change(built):
    folder, stamp = built
    both = folder / "CMakeLists.txt", folder / "a.cpp"  # one after the other
    texts = [file.read_text() for file in both]
    both[0].write_text(texts[0] + texts[1])
    both[1].write_text("")
    make_newer(*both)
    assert _sources.have_changed(folder, stamp)


def test_notes_and_backups_are_no_sources(built):
    folder, stamp = built
    for name in ("README.md", ".a.cpp.swp", ".#a.cpp", "a.cpp~", "a.orig"):
        (folder / name).write_text("something else")
        make_newer(folder / name)
    assert not _sources.have_changed(folder, stamp)


def test_without_a_stamp_or_sources_nothing_has_changed(built):
    folder, stamp = built
    make_newer(folder / "a.cpp")
    assert not _sources.have_changed(folder, stamp.with_name("none"))
    assert not _sources.have_changed(folder.with_name("none"), stamp)
    stamp.write_text("")
    assert not _sources.have_changed(folder, stamp)


def test_the_import_asks_for_a_build_when_the_sources_have_changed(copy_of_package):
    """As in an editable installation: the sources lie beside the package."""
    csrc, source = copy_of_package.parent / "csrc", copy_of_package.parent / "csrc" / "a.cpp"
    csrc.mkdir()
    source.write_text("as it was")
    _sources.write_stamp(csrc, copy_of_package / "lib" / _sources.STAMP)
    prelude = import_from(copy_of_package.parent)
    make_newer(source)
    fresh.check("import dtorch_ops", prelude=prelude)
    source.write_text("and as it is")
    make_newer(source)
    out = fresh.check(
        """
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import dtorch_ops
        assert dtorch_ops.to_torch(torch.ones(1)).item() == 1
        [warning] = caught
        assert warning.filename == "<script>", "not the line that imports"
        print(warning.message)
        """,
        prelude=prelude,
    )
    assert str(csrc) in out and str(copy_of_package / "lib" / LIBRARY.name) in out
    assert "make build" in out and "pip install --no-build-isolation -e ." in out


def test_a_library_in_its_checkout_says_what_it_was_built_from():
    stamp = LIBRARY.with_name(_sources.STAMP)
    assert stamp.exists() == (PACKAGE == ROOT / "dtorch_ops")


# ---- The report ---------------------------------------------------------------------------------


def report(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "dtorch_ops"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_report_says_what_a_bug_report_needs():
    done = report(PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    for fact in (dtorch_ops.__version__, torch.__version__, sys.version.split()[0], "cpu"):
        assert fact in done.stdout
    built = dtorch_ops._build_info
    assert f"torch {built.TORCH_VERSION}, {built.BUILD_TYPE}, CUDA" in done.stdout
    for part in ("operators", "memory", "await", "TorchScript", "file", "network"):
        [line] = [text for text in done.stdout.splitlines() if part in text]
        assert line[0] == "✓" or len(line.split(maxsplit=2)[2]) > 10, "a tick or the reason"


def test_the_report_in_a_terminal_without_ticks():
    done = report(PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert torch.__version__ in done.stdout
