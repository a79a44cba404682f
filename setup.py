"""Builds the native targets with CMake; everything else is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
RELEASE = "0.1.0.dev0"
# A source archive is for any torch, what is built from it for one.
FROM_SOURCE = "sdist" in sys.argv


def tool(name: str) -> str:
    """A build tool, preferably from the environment that is built in."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if found is None:
        sys.exit(f"dtorch_ops: {name} was not found. Install it: pip install {name}")
    return found


def torch_minor() -> str:
    """The release of torch to build for: what is built works with no other."""
    try:
        import torch
    except ImportError:
        sys.exit(
            "dtorch_ops: torch is not installed in this environment. Install the torch that "
            "the plugin is to be used with, then: pip install --no-build-isolation ."
        )
    return ".".join(torch.__version__.split(".")[:2])


def version() -> str:
    """The release; of what is built, with the torch that it was built for."""
    return RELEASE if FROM_SOURCE else f"{RELEASE}+torch{torch_minor()}"


def requirements() -> list[str]:
    return ["torch>=2.11,<2.15" if FROM_SOURCE else f"torch=={torch_minor()}.*"]


def build_dir() -> Path:
    """A folder for each torch and Python, so that builds for several do not disturb each other."""
    tag = "source" if FROM_SOURCE else f"torch{torch_minor()}-{sys.implementation.cache_tag}"
    return ROOT / "build" / tag


def folders() -> dict[str, dict[str, str]]:
    """Where setuptools puts its own: in the checkout, metadata would hide what is installed."""
    folder = build_dir() / "package"
    folder.mkdir(parents=True, exist_ok=True)
    return {"build": {"build_base": str(folder)}, "egg_info": {"egg_base": str(folder)}}


class CMakeBuild(build_ext):
    """Runs CMake and installs lib/, include/, share/ and the module into the package."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.asked_in_place = bool(self.inplace)  # which run() of setuptools forgets meanwhile

    def build_extension(self, ext: Extension) -> None:
        folder = build_dir()
        import torch

        in_place = self.editable_mode or self.asked_in_place
        package = ROOT / "dtorch_ops" if in_place else Path(self.get_ext_fullpath(ext.name)).parent
        options = {
            "CMAKE_BUILD_TYPE": os.environ.get("CMAKE_BUILD_TYPE", "Release"),
            "CMAKE_MAKE_PROGRAM": tool("ninja"),
            "CMAKE_PREFIX_PATH": torch.utils.cmake_prefix_path,
            "Python_EXECUTABLE": sys.executable,
        }
        cmake = tool("cmake")
        configure = [cmake, "-S", str(ROOT / "csrc"), "-B", str(folder), "-G", "Ninja"]
        subprocess.check_call(configure + [f"-D{name}={value}" for name, value in options.items()])
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        subprocess.check_call([cmake, "--build", str(folder), "-j", jobs])
        for installed in "lib", "include", "share":  # nothing of an earlier build stays
            shutil.rmtree(package / installed, ignore_errors=True)
        subprocess.check_call([cmake, "--install", str(folder), "--prefix", str(package.resolve())])
        (package / "_build_info.py").write_text(
            '"""Written by the build."""\n\n'
            f"VERSION = {version()!r}\n"
            f"TORCH_VERSION = {torch.__version__!r}\n"
            f"BUILD_TYPE = {options['CMAKE_BUILD_TYPE']!r}\n"
            f"CUDA_VERSION = {torch.version.cuda!r}\n"
        )

    def copy_extensions_to_source(self) -> None:
        """Nothing to copy: in place, CMake has installed into the source tree itself."""


setup(
    version=version(),
    install_requires=requirements(),
    ext_modules=[Extension("dtorch_ops._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    options=folders(),
)
