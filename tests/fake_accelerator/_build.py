"""Builds libfake_accelerator.so into build/fake_accelerator, when its sources have changed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SOURCES = (
    HERE / "CMakeLists.txt",
    ROOT / "csrc" / "cmake" / "TorchLibraries.cmake",
    *sorted((HERE / "csrc").iterdir()),
)


def built() -> Path:
    """The library for this torch, built if it is not up to date. One process builds at a time."""
    folder = ROOT / "build" / "fake_accelerator" / f"torch{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    built, stamp = folder / "libfake_accelerator.so", folder / "stamp"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fingerprint = _fingerprint()
        if not (built.exists() and stamp.exists() and stamp.read_text() == fingerprint):
            _build(folder)
            stamp.write_text(fingerprint)
    return built


def _fingerprint() -> str:
    digest = hashlib.sha256(torch.utils.cmake_prefix_path.encode())
    for source in SOURCES:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _build(folder: Path) -> None:
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": _tool("ninja"),
        "CMAKE_PREFIX_PATH": torch.utils.cmake_prefix_path,
    }
    if ccache := shutil.which("ccache"):
        options["CMAKE_CXX_COMPILER_LAUNCHER"] = ccache
    given = [f"-D{name}={value}" for name, value in options.items()]
    _run(_tool("cmake"), "-S", str(HERE), "-B", str(folder), "-G", "Ninja", *given)
    _run(_tool("cmake"), "--build", str(folder), "--parallel", "2")


def _tool(name: str) -> str:
    beside_python = Path(sys.executable).parent
    found = shutil.which(name, path=f"{beside_python}{os.pathsep}{os.environ['PATH']}")
    if not found:
        raise RuntimeError(f"the fake accelerator is built with {name}, which was not found")
    return found


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"building the fake accelerator failed: {' '.join(command)}\n{done.stdout}{done.stderr}"
        )
