"""The programs of tests/cpp/shm, which test the shared memory without torch."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from helpers import ROOT

# What takes longer hangs. Nothing is decided by it otherwise.
LIMIT_S = 20


@functools.cache
def program(name: str) -> Path:
    """Build it if that was not done yet."""
    built = subprocess.run(
        ["make", "-s", "-C", str(ROOT / "tests" / "cpp" / "shm"), name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return ROOT / "build" / "shm" / "plain" / name


class Peer:
    """A consumer or a producer process: `peer.cpp`."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._process = subprocess.Popen(
            [program("peer"), role], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._process.stdin and self._process.stdout
        self._to, self._from = self._process.stdin, self._process.stdout
        self._read = b""
        self._aside: list[str] = []  # lines that nobody has asked for yet

    @property
    def pid(self) -> int:
        return self._process.pid

    # ---- Talking to it --------------------------------------------------------------------------

    def tell(self, command: str) -> None:
        self._to.write(command.encode() + b"\n")

    def _line(self) -> str:
        """The next one; empty once it has ended."""
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._from], [], [], LIMIT_S)
            assert ready, f"the {self.role} hangs; it has said {self._aside}"
            some = os.read(self._from.fileno(), 65536)
            if not some:
                return ""
            self._read += some
        line, self._read = self._read.split(b"\n", 1)
        return line.decode()

    def hear(self, *starts: str) -> str:
        """The next line that starts with one of these; what comes before it is kept."""
        for line in self._aside:
            if line.startswith(starts):
                self._aside.remove(line)
                return line
        while line := self._line():
            if line.startswith(starts):
                return line
            assert not line.startswith("error"), line
            self._aside.append(line)
        raise AssertionError(f"the {self.role} has ended ({self._process.wait(LIMIT_S)})")

    def ask(self, command: str, *starts: str) -> str:
        self.tell(command)
        return self.hear(*starts)

    def numbers(self, command: str) -> dict[str, int]:
        words = self.ask(command, "stats").split()[1:]
        return {name: int(value) for name, value in (word.split("=") for word in words)}

    # ---- Its life -------------------------------------------------------------------------------

    def arm(self, how: str, point: str, count: int = 1) -> None:
        self.ask(f"at {how} {count} {point}", "ready")

    def until_caught(self) -> str:
        """What has become of the last command: "stopped", "killed", or its answer."""
        while True:
            line = self._line()
            if line == "":
                assert self._process.wait(LIMIT_S) == -signal.SIGKILL
                return "killed"
            if line == "stopping":
                self.until_stopped()
                return "stopped"
            assert not line.startswith("error"), line
            if not line.startswith(("waiting", "late", "value", "broken", "torn")):
                return line
            self._aside.append(line)

    def until_stopped(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.until_stopped()

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(LIMIT_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        self._to.close()
        self._from.close()


@contextlib.contextmanager
def peers(*roles: str) -> Iterator[list[Peer]]:
    with contextlib.ExitStack() as stack:
        made = []
        for role in roles:
            made.append(Peer(role))
            stack.callback(made[-1].close)
        yield made
