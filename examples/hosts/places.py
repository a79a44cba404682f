"""Hosts for the demonstration, all on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COUNT = 3
PREFIX = "dtorch-cluster"


class Places(NamedTuple):
    description: str
    commands: list[list[str]]
    """What a command of each host begins with."""
    interface: str
    """Of every host, by which it reaches the others."""
    address: str
    """Of host 0."""
    port: int
    """Free there."""
    mode: str
    """Of promises, so that they go through the network."""
    cut: str
    """Shell command, on host 0: host number $HOST, whose worker is process $WORKER_PID, is lost."""


class NoNamespacesError(Exception):
    """They cannot be made here."""


def loopback(why: str) -> Places:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Places(
        description=f"{COUNT} groups of processes, on the loopback: {why}",
        commands=[[]] * COUNT,
        interface="lo",
        address="127.0.0.1",
        port=port,
        mode="network",  # auto would take shared memory
        cut="kill -STOP $WORKER_PID",  # as silent as a host whose cable is cut
    )


@contextlib.contextmanager
def namespaces() -> Iterator[Places]:
    """Namespaces of the network, one for each host and one for the switch that they hang on.

    Each host sees only its own processes, too, so that shared memory does not reach from one to
    another. Nothing of the machine's own network is touched.

    Raises:
        NoNamespacesError: says why not.
    """
    _check_rights()
    _remove_leftovers()
    run = f"{PREFIX}-{os.getpid()}"
    switch, *hosts = [f"{run}-{end}" for end in ("switch", *range(COUNT))]
    try:
        for name in (switch, *hosts):
            _ip("netns", "add", name)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(hosts):
            port = f"host{number}"
            _ip("-n", switch, *f"link add {port} type veth peer name eth0 netns {host}".split())
            _ip("-n", switch, *f"link set {port} master bridge up".split())
            _ip("-n", host, *f"address add {_address(number)}/24 dev eth0".split())
            for interface in ("lo", "eth0"):
                _ip("-n", host, "link", "set", interface, "up")
        alone = "unshare --pid --fork --kill-child --mount-proc".split()
        subprocess.run(["ip", "netns", "exec", hosts[0], *alone, "true"], **_QUIETLY)
        yield Places(
            description=f"{COUNT} network namespaces, joined by a bridge",
            commands=[["ip", "netns", "exec", host, *alone] for host in hosts],
            interface="eth0",
            address=_address(0),
            port=29500,
            mode="auto",
            cut=f"ip -n {switch} link set host$HOST down",
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or f"exit code {error.returncode}"
        raise NoNamespacesError(f"{' '.join(error.cmd)}: {said}") from None
    finally:
        for name in (switch, *hosts):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


_QUIETLY = {"check": True, "capture_output": True, "text": True}


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], **_QUIETLY)


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _check_rights() -> None:
    if os.geteuid() != 0:
        raise NoNamespacesError("network namespaces take root")
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            raise NoNamespacesError(f"network namespaces take the program {program!r}")


def _remove_leftovers() -> None:
    """Of runs that were killed."""
    for path in Path("/run/netns").glob(f"{PREFIX}-*-*"):
        if not Path("/proc", path.name.split("-")[2]).exists():
            subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, check=False)
