"""Builds the C++ parts of the benchmarks, each when it is first used."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
#: Where the libraries are kept. Git ignores it.
BUILD = FOLDER.parent / "build" / "benchmarks"


def load(source: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The library made of one source file of this folder, by ``$CXX`` (default g++)."""
    return ctypes.CDLL(str(build(source, flags)))


def build(source: str, flags: Sequence[str] = ()) -> Path:
    """The path of that library; it is built again when its source or the command changes."""
    path = FOLDER / source
    command = [os.environ.get("CXX", "g++"), "-O2", "-std=c++20", "-shared", "-fPIC"]
    command += [str(path), *flags]  # libraries come after what needs them
    key = hashlib.sha256(path.read_bytes() + "\0".join(command).encode()).hexdigest()[:16]
    library = BUILD / f"{path.stem}-{key}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(unfinished)], check=True)
        unfinished.replace(library)
    return library
