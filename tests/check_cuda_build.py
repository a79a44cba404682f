"""Builds the native libraries against a CUDA build of torch, and loads them.

`make check-cuda-build`. Needs no GPU and no nvcc. Run by the Python that has that torch.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Build, check what is linked, and load."""
    if torch.version.cuda is None:
        sys.exit(f"expected a CUDA build of torch, got {torch.__version__}")
    tools = Path(sys.executable).parent
    cmake = shutil.which("cmake", path=f"{tools}:/usr/bin:/usr/local/bin")
    ninja = shutil.which("ninja", path=f"{tools}:/usr/bin:/usr/local/bin")
    if cmake is None or ninja is None:
        sys.exit("expected cmake and ninja: pip install cmake ninja")
    build = ROOT / "build" / f"cuda-check-torch{torch.__version__}"
    prefix = build / "installed"
    subprocess.check_call(
        [cmake, "-S", ROOT / "csrc", "-B", build, "-G", "Ninja", "-DDTORCH_BUILD_PYTHON=OFF"]
        + [f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        + [f"-DCMAKE_INSTALL_PREFIX={prefix}"]
    )
    subprocess.check_call([cmake, "--build", build])
    subprocess.check_call([cmake, "--install", build], stdout=subprocess.DEVNULL)
    core, cuda = (prefix / "lib" / f"lib{name}.so" for name in ("dtorch_ops", "dtorch_ops_cuda"))
    needed = subprocess.check_output(["readelf", "-d", core], text=True)
    linked = [line for line in needed.splitlines() if "NEEDED" in line and "cuda" in line.lower()]
    if linked:
        sys.exit(f"expected a core that links no CUDA library, got {linked}")
    ctypes.CDLL(str(core), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(cuda))  # every symbol is found, or this raises
    print(f"built and loaded with torch {torch.__version__}: {core.name}, {cuda.name}")


if __name__ == "__main__":
    main()
