"""Tests that run in a process of their own: the fake, once installed, stays for the process."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable

import fresh

from . import _build

_Test = Callable[[], None]

#: What the bodies see; dtorch_ops is not among it.
PRELUDE = """
from __future__ import annotations
import os, signal, sys, threading, traceback
sys.path.insert(0, "tests")
import torch
import fake_accelerator as fake
from helpers import Worker
fake.install()
"""


def isolated(
    *shared: Callable[..., object], prelude: str = "", timeout: float = 20, runs: int = 1
) -> Callable[[_Test], _Test]:
    """A decorator: run the body of a test in a process of its own, where the fake is installed.

    It takes the source of the test, which has no arguments, and of the ``shared`` functions, so
    they see what :data:`PRELUDE` and ``prelude`` import and nothing else of their module. The
    process is forked from a server that has imported torch (fresh.py); a hang, an exit code or any
    output on stderr fails the test.
    """

    def decorate(test: _Test) -> _Test:
        @functools.wraps(test)
        def run() -> None:
            _build.built()  # now, rather than against the time limit
            code = "\n".join(_source(function) for function in (*shared, test))
            fresh.check(
                f"{code}\n{test.__name__}()\n",
                prelude=PRELUDE + textwrap.dedent(prelude),
                timeout=timeout,
                runs=runs,
            )

        return run

    return decorate


def _source(function: Callable[..., object]) -> str:
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("def "))
    return "\n".join(lines[start:]) + "\n"
