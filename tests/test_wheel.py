"""The wheel: what is in it, and that it works in an environment that knows nothing of the checkout.

``make test-wheel`` runs all tests on one; here it is made of what the checkout has compiled.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from fnmatch import fnmatch
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import markdown
import pytest
import torch
from helpers import ROOT

import dtorch_ops

MINOR = ".".join(torch.__version__.split(".")[:2])
BUILT = ROOT / "build" / f"torch{MINOR}-{sys.implementation.cache_tag}"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (BUILT / "build.ninja").exists(), reason="not built here"),
]

# What any Linux has whose tag the wheel carries, what torch brings, and our own.
FOUND = (
    r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d|ld-linux.*"
    r"|lib(torch|c10)\w*\.so|libdtorch_ops\.so"
)


def checked(*command: object, **kwargs: object) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        **kwargs,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # An earlier build may have left what is no longer made: a header, CUDA's library.
    lib = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    left = BUILT / "package" / lib / "dtorch_ops" / "include" / "dtorch" / "left.h"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.touch()
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    checked(*pip, "--wheel-dir", folder, ROOT)
    [made] = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as held:
        held.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; torch and the rest are those of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    interpreter = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", interpreter, "install"]
    checked(*pip, "--no-deps", "--no-index", "--ignore-installed", wheel)
    return interpreter


# ---- What is in it ------------------------------------------------------------------------------


def test_the_wheel_names_the_torch_that_it_was_built_for(wheel, unpacked):
    version = f"{dtorch_ops.__version__.partition('+')[0]}+torch{MINOR}"
    assert wheel.name.startswith(f"dtorch_ops-{version}-cp")
    [metadata] = unpacked.glob("*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    assert f"Version: {version}" in lines
    assert [line for line in lines if line.startswith("Requires-Dist")] == [
        f"Requires-Dist: torch=={MINOR}.*"
    ]


def test_the_wheel_holds_all_that_is_needed_and_nothing_else(unpacked):
    package, source, csrc = unpacked / "dtorch_ops", ROOT / "dtorch_ops", ROOT / "csrc"
    held = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    needed = {path.name for pattern in ("*.py", "*.pyi") for path in source.glob(pattern)}
    needed |= {f"include/{path.relative_to(csrc)}" for path in csrc.glob("dtorch/**/*.h")}
    needed |= {"py.typed", "_build_info.py", "lib/libdtorch_ops.so"}
    needed |= {f"_C{EXTENSION_SUFFIXES[0]}", "share/cmake/dtorch_ops/dtorch_opsConfig.cmake"}
    if torch.version.cuda:
        needed.add("lib/libdtorch_ops_cuda.so")
    assert needed - held == set()
    rest = [name for name in held - needed if not fnmatch(name, "share/cmake/dtorch_ops/*.cmake")]
    assert rest == []
    assert {path.name.partition("-")[0] for path in unpacked.iterdir()} == {"dtorch_ops"}


def test_nothing_in_the_wheel_names_the_place_where_it_was_built(unpacked):
    places = {str(ROOT), str(Path(torch.__file__).parent)}
    for file in unpacked.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert [place for place in places if place.encode() in content] == [], file


def test_the_libraries_need_what_a_system_and_torch_have(unpacked):
    libraries = list(unpacked.rglob("*.so"))
    assert len(libraries) >= 2
    for library in libraries:
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", checked("readelf", "-d", library))
        assert [name for name in needed if not re.fullmatch(FOUND, name)] == [], library


# ---- An environment with it ---------------------------------------------------------------------


def test_the_package_works_where_it_was_installed(python, tmp_path):
    code = "import dtorch_ops; print(dtorch_ops.__file__)"
    installed = Path(checked(python, "-W", "error", "-c", code, cwd=tmp_path).strip())
    assert python.parent.parent in installed.parents
    checked(python, "-W", "error", "-m", "dtorch_ops", cwd=tmp_path)  # every check passes


def blocks(language: str) -> list[str]:
    found = markdown.blocks_of(ROOT / "docs" / "installing.md")
    return [block.code for block in found if block.language == language]


def test_the_program_of_the_documentation(python, tmp_path):
    [program] = blocks("python")
    said = checked(python, "-W", "error", "-c", program, cwd=tmp_path)
    assert said == f"{dtorch_ops.__version__}\n"


def test_the_cpp_project_of_the_documentation(python, tmp_path):
    [project], [program] = blocks("cmake"), blocks("cpp")
    (tmp_path / "CMakeLists.txt").write_text(project)
    (tmp_path / "fetch.cpp").write_text(program)
    commands = blocks("sh")[-1]
    assert "find_package" in project and "build/fetch" in commands
    # What is installed beside this Python, and the environment's before it.
    path = f"PATH={python.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    said = checked("env", path, "sh", "-ec", commands, cwd=tmp_path)
    assert said.splitlines()[-1] == "6"
    library = python.parent.parent / "lib"
    assert f"{library}/" in checked("ldd", tmp_path / "build" / "fetch")
