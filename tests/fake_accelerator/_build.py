"""Builds libfake_accelerator.so and libfake_sharing.so into build/fake_accelerator, when their
sources have changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
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
    ROOT / "csrc" / "dtorch" / "device" / "sharing.h",
    ROOT / "csrc" / "dtorch" / "promise" / "device_memory.h",
)


def _dtorch_library() -> Path:
    spec = importlib.util.find_spec("dtorch_ops")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "lib" / "libdtorch_ops.so"


def built() -> Path:
    """The folder of the libraries for this torch, built if they are not up to date.

    One process builds at a time.
    """
    folder = ROOT / "build" / "fake_accelerator" / f"torch{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    built = [folder / f"libfake_{name}.so" for name in ("accelerator", "sharing")]
    stamp = folder / "stamp"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fingerprint = _fingerprint()
        up_to_date = stamp.exists() and stamp.read_text() == fingerprint
        if not (up_to_date and all(library.exists() for library in built)):
            _build(folder)
            stamp.write_text(fingerprint)
    return folder


def _fingerprint() -> str:
    digest = hashlib.sha256(f"{torch.utils.cmake_prefix_path}\0{_dtorch_library()}".encode())
    for source in SOURCES:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _build(folder: Path) -> None:
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_MAKE_PROGRAM": _tool("ninja"),
        "DTORCH_LIBRARY": str(_dtorch_library()),
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
