"""What several test files share."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What every script that runs in a process of its own starts with.
PRELUDE = """
import asyncio, gc, os, signal, sys, threading, time
import torch
import dtorch_ops
"""


def run_python(
    code: str, *, timeout: float = 60, args: tuple[str, ...] = (), prelude: str = PRELUDE
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter; TimeoutExpired if it hangs.

    For what can hang, abort, or must see a process from its start. Warnings are errors in it.
    """
    script = prelude + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        check=False,
    )


def check_python(code: str, **kwargs: object) -> str:
    """Run ``code`` as :func:`run_python` does; it must exit with 0 and say nothing on stderr."""
    done = run_python(code, **kwargs)  # type: ignore[arg-type]
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == "", done.stderr
    return done.stdout


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """For what nothing tells of: that memory has come back, that a thread has ended."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it does not come true"
        time.sleep(0.002)


class Worker(threading.Thread):
    """A thread whose exception is raised by ``finish()``, which also bounds its life."""

    def __init__(self, target: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = target
        self.result: object = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error

    def finish(self, timeout: float = 30) -> object:
        self.join(timeout)
        assert not self.is_alive(), "the thread hangs"
        if self.error is not None:
            raise self.error
        return self.result
