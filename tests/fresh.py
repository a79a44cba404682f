"""Scripts in processes of their own, many and quickly.

Importing torch takes seconds. A server that has imported torch, and nothing of ours, forks for
every script: the child sees dtorch_ops from its import to its exit, as a new interpreter would, in
a few hundredths of a second. For what can hang, abort, or must be done twenty times over.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass

from helpers import PRELUDE, ROOT

_SERVER = """
import asyncio, gc, json, os, signal, sys, threading, time
import torch

# Torch's objects are left alone at a child's exit: copying the pages of them all takes longer than
# everything else.
gc.collect()
gc.freeze()

def start(code):
    out, err = os.memfd_create("out"), os.memfd_create("err")
    pid = os.fork()
    if pid:
        return pid, out, err
    os.setsid()
    for new, old in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(new, old)
        os.close(new)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return None

def outcome(pid, out, err, limit):
    exit_code = None
    while exit_code is None and time.monotonic() < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            exit_code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.002)
    if exit_code is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    texts = []
    for fd in (out, err):
        texts.append(os.pread(fd, 1 << 20, 0).decode())
        os.close(fd)
    return [exit_code, *texts]

def serve():
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    while line := sys.stdin.readline():
        request = json.loads(line)
        outcomes = []
        for first in range(0, request["runs"], 2):
            limit = time.monotonic() + request["seconds"]
            children = []
            for _ in range(first, min(first + 2, request["runs"])):
                child = start(request["code"])
                if child is None:
                    return request["code"]
                children.append(child)
            outcomes += [outcome(*child, limit) for child in children]
            if None in (o[0] for o in outcomes):
                break  # the rest would only hang as well
        print(json.dumps(outcomes), flush=True)

code = serve()
if code is not None:
    exec(compile(code, "<script>", "exec"))
"""


_PROFILER_SAYS = "USDT:"  # when it starts and stops, at any level of its log


@dataclass
class Outcome:
    """How a script ended. ``exit_code`` is None if it hung, negative for a signal."""

    exit_code: int | None
    stdout: str
    stderr: str


class _Server:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            # A pool of some library's own threads would be missing behind a fork.
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        atexit.register(self.stop)

    def stop(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def run(self, code: str, runs: int, seconds: float) -> list[Outcome]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            request = {"code": code, "runs": runs, "seconds": seconds}
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        assert answer, "the server of fresh processes has died"
        return [Outcome(*outcome) for outcome in json.loads(answer)]


_server: _Server | None = None


def run(code: str, *, runs: int = 1, timeout: float = 30, prelude: str = PRELUDE) -> list[Outcome]:
    """Run ``code`` ``runs`` times, each at most ``timeout`` seconds and in a process of its own."""
    global _server
    if _server is None:
        _server = _Server()
    return _server.run(prelude + textwrap.dedent(code), runs, timeout)


def check(code: str, *, runs: int = 1, timeout: float = 30, prelude: str = PRELUDE) -> str:
    """Run ``code`` as :func:`run` does; each must exit with 0 and say nothing on stderr.

    Returns:
        What the last one printed.
    """
    outcomes = run(code, runs=runs, timeout=timeout, prelude=prelude)
    for number, outcome in enumerate(outcomes, 1):
        assert outcome.exit_code is not None, (
            f"run {number} hangs\n{outcome.stdout}\n{outcome.stderr}"
        )
        assert outcome.exit_code == 0, (
            f"run {number}: exit {outcome.exit_code}\n{outcome.stdout}\n{outcome.stderr[-3000:]}"
        )
        said = [line for line in outcome.stderr.splitlines() if not line.startswith(_PROFILER_SAYS)]
        assert not said, f"run {number}: {outcome.stderr}"
    return outcomes[-1].stdout
