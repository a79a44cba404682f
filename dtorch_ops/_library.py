"""Finds, checks and loads the native library."""

from __future__ import annotations

import sysconfig
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from . import _sources

_NOT_BUILT = (
    "dtorch_ops: {what} is missing: the package was not built for this Python. In a checkout run "
    "'make build', or 'pip install --no-build-isolation -e .' with the torch that is to be used."
)
try:
    from . import _build_info
except ImportError:
    raise ImportError(_NOT_BUILT.format(what="_build_info.py")) from None

_HERE = Path(__file__).resolve().parent

#: For ``CMAKE_PREFIX_PATH``: where ``find_package(dtorch_ops)`` of a C++ project looks.
cmake_prefix_path = str(_HERE / "share" / "cmake")


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _check_environment() -> None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise ImportError(
            "dtorch_ops: expected a Python with the global interpreter lock, got a free-threaded "
            "build, which this version does not support: use the ordinary build of Python."
        )
    built_for, found = _build_info.TORCH_VERSION, torch.__version__
    if _minor(built_for) != _minor(found):
        raise ImportError(
            f"dtorch_ops was built for torch {built_for}, but torch {found} is installed, and "
            "futures are not part of torch's stable ABI. Install torch "
            f"{_minor(built_for)}.*, or build dtorch_ops again with this torch: "
            "in its checkout, pip install --no-build-isolation --force-reinstall --no-deps ."
        )


def _is_loaded() -> bool:
    # A second registration of the namespace, from a copy of the library, would end the process.
    return bool(torch._C._dispatch_has_kernel("dtorch::get_tensor_async"))


def load() -> None:
    """Load the operators. Raises ImportError, which says what to do, before it can go wrong."""
    _check_environment()
    library = _HERE / "lib" / "libdtorch_ops.so"
    sources = _HERE.parent / "csrc"
    if _sources.have_changed(sources, library.with_name(_sources.STAMP)):
        warnings.warn(
            f"dtorch_ops: the C++ sources in {sources} are not those that {library} was built "
            "from. Build it again: 'make build', or 'pip install --no-build-isolation -e .' in the "
            "checkout.",
            stacklevel=4,  # the line that imports dtorch_ops
        )
    if _is_loaded():
        with open("/proc/self/maps") as maps:
            loaded = {line.split(maxsplit=5)[-1].strip() for line in maps}
        if str(library) not in loaded:
            raise ImportError(
                "dtorch_ops: the operators of the namespace 'dtorch' are loaded already, from "
                f"another file than {library}: import the package from one place only."
            )
        return
    if not library.exists():
        raise ImportError(_NOT_BUILT.format(what=library))
    if not any((_HERE / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        raise ImportError(_NOT_BUILT.format(what=f"_C{EXTENSION_SUFFIXES[0]}"))
    torch.ops.load_library(library)  # type: ignore[no-untyped-call]


load()
