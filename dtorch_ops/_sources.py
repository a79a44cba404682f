"""Whether a library that is installed in its own checkout was made from the C++ sources beside it.

A build into the checkout leaves a stamp beside the library: when the sources were read, and their
digest. CMake runs this file to write it, before it compiles: without the package, which is not
there yet. A wheel has no stamp.

A time alone would not do: a checkout, a copy, or a switch of branches and back makes files newer
and changes none. So the time only says whether to compare the digests, which takes milliseconds.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

STAMP = "sources.stamp"
_SUFFIXES = (".cpp", ".h", ".txt", ".in", ".cmake")


def _files(folder: str, with_folders: bool = False) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if with_folders:
                    yield entry
                yield from _files(entry.path, with_folders)
            elif entry.name.endswith(_SUFFIXES) and not entry.name.startswith("."):
                yield entry


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(entry.path for entry in _files(str(folder))):
        with open(path, "rb") as file:
            text = file.read()
        digest.update(f"{os.path.relpath(path, folder)} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def have_changed(folder: Path, stamp: Path) -> bool:
    """Whether the sources in ``folder`` are others than those that ``stamp`` was written for.

    False if there is no stamp, or no source: an import does not fail for want of either.
    """
    try:
        read_at, digest = stamp.read_text().split()
        # A folder is newer when a file has gone from it.
        entries = _files(str(folder), with_folders=True)
        newest = max((entry.stat().st_mtime_ns for entry in entries), default=0)
    except (OSError, ValueError):
        return False
    return newest > int(read_at) and _digest(folder) != digest


def write_stamp(folder: Path, stamp: Path) -> None:
    """Say in ``stamp`` what is in ``folder`` now, before anything is made of it."""
    read_at = time.time_ns()
    stamp.write_text(f"{read_at}\n{_digest(folder)}\n")


if __name__ == "__main__":
    write_stamp(Path(sys.argv[1]), Path(sys.argv[2]))
