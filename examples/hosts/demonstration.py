"""Starts the example on hosts that are made for it: one torchrun for each."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from . import watched
from .options import Options
from .places import NoNamespacesError, Places, loopback, namespaces


def demonstrate(options: Options, command: list[str]) -> int:
    """Run ``command``, a Python program and its arguments, on all hosts.

    Returns:
        The controller's exit code.
    """
    signal.signal(signal.SIGTERM, _exit)
    with contextlib.ExitStack() as stack:
        places = _find_places(options.hosts, stack)
        print(f"hosts:    {places.description}", flush=True)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = []
        for number in range(len(places.commands)):
            hosts.append(_Host(number, places, command, directory))
            stack.callback(hosts[-1].kill)
        return _wait(hosts)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)  # so that all is cleaned up


def _find_places(wanted: str | None, stack: contextlib.ExitStack) -> Places:
    if wanted == "loopback":
        return loopback("as wanted")
    try:
        return stack.enter_context(namespaces())
    except NoNamespacesError as error:
        if wanted == "namespaces":
            sys.exit(f"cluster.py: error: {error}")
        return loopback(str(error))


def _wait(hosts: list[_Host]) -> int:
    """Until the controller has ended; or if a host has that is not the one that is to be lost."""
    controller, *workers = hosts
    while True:
        ended = [host for host in hosts if host.agent.poll() is not None and not host.is_lost()]
        code = controller.exit_code()
        if ended or code is not None:
            break
        time.sleep(0.05)
    if code is None:
        code = 1
        print(f"cluster.py: error: host {ended[0].number} has ended too early", file=sys.stderr)
    if code:
        for host in workers:
            print(f"---- host {host.number} says:\n{host.said()}", file=sys.stderr)
    return code


class _Host:
    """A torchrun with one process."""

    def __init__(self, number: int, places: Places, command: list[str], directory: Path) -> None:
        self.number = number
        self._exit_code = directory / f"{number}.exit_code"
        self._stderr = directory / f"{number}.stderr"
        self._lost = directory / f"{number}.lost"
        # Only what the controller says is for all to read, if all goes well: a host that is cut off
        # complains of that.
        stderr = None if number == 0 else self._stderr.open("w")
        lost = f"{shlex.quote(str(directory))}/$HOST.lost"
        cut = f"HOST=${{WORKER#worker}}; touch {lost}; {places.cut}"
        self.agent = subprocess.Popen(
            [
                *places.commands[number],
                *(sys.executable, "-m", "torch.distributed.run"),
                *(f"--nnodes={len(places.commands)}", f"--node-rank={number}"),
                *(f"--master-addr={places.address}", f"--master-port={places.port}"),
                *("--monitor-interval=0.1", "--no-python"),
                *(sys.executable, watched.__file__, str(self._exit_code)),
                *(sys.executable, *command, f"--mode={places.mode}"),
                f"--cut={cut}",
            ],
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            env={
                # TensorPipe warns of every connection that ends, in many lines.
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                **os.environ,
                "TP_SOCKET_IFNAME": places.interface,
                "GLOO_SOCKET_IFNAME": places.interface,
            },
            preexec_fn=watched.end_with_parent,
            # Ctrl-C is for the demonstration, which then ends all.
            start_new_session=True,
        )
        if stderr is not None:
            stderr.close()

    def exit_code(self) -> int | None:
        """Of its process; None as long as it runs."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(self._exit_code.read_text())
        return None

    def is_lost(self) -> bool:
        """Whether it is the one that is cut off."""
        return self._lost.exists()

    def said(self) -> str:
        return self._stderr.read_text()

    def kill(self) -> None:
        """The kernel then kills what it has started."""
        self.agent.kill()
        self.agent.wait()
