"""The tests, on what ``make wheel`` has left in dist/. ``make test-wheel``.

Run by the Python that the wheel was made with, and told which torch to install. In a temporary
folder: a new environment with it, the wheel, and what the tests need; and what the source archive
holds, except for the package, so that it is the installed one that is tested. What else is given
goes to pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path

DIST = Path(__file__).resolve().parent.parent / "dist"
TOOLS = ("setuptools>=77", "cmake>=3.20", "ninja")


def made(pattern: str) -> Path:
    found = list(DIST.glob(pattern))
    if len(found) != 1:
        sys.exit(f"expected one {pattern} in {DIST}, got {len(found)}: rm -r dist, make wheel")
    return found[0]


def main() -> None:
    """Install, and run."""
    torch, *arguments = sys.argv[1:]
    minor = ".".join(version("torch").split(".")[:2])
    wheel = made(f"*+torch{minor}-cp{sys.version_info.major}{sys.version_info.minor}-*.whl")
    archive = made("*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="dtorch-wheel-") as place:
        with tarfile.open(archive) as held:
            held.extractall(place)
        [sources] = Path(place).iterdir()
        shutil.rmtree(sources / "dtorch_ops")
        python = Path(place, "venv", "bin", "python")
        venv.create(python.parent.parent, with_pip=True)
        needed = [f"-r{sources / 'requirements' / name}.txt" for name in ("test", "lint")]
        install = [python, "-m", "pip", "install", "--quiet", torch, wheel, *TOOLS, *needed]
        subprocess.run(install, check=True)
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            [python, "-m", "pytest", *arguments], cwd=sources, env=environment, check=False
        )
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
