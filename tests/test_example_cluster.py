"""The example of several hosts: processes on the loopback, and network namespaces where it can be.

Where namespaces cannot be made, since that takes root, their tests are skipped with the reason.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from example_programs import EXAMPLES, check_answers, check_refusal
from helpers import run_python
from network_group import free_port

LIMIT = 100


@pytest.fixture(autouse=True)
def _example_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture(params=["loopback", "namespaces"])
def hosts(request: pytest.FixtureRequest, _example_modules: None) -> str:
    from hosts.places import NoNamespacesError, namespaces

    if request.param == "namespaces":
        try:
            with namespaces():
                pass
        except NoNamespacesError as error:
            pytest.skip(str(error))
    return request.param


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """In the environment of all processes that the test starts, and of theirs."""
    mark = f"EXAMPLE_OF_TEST={uuid.uuid4()}"
    monkeypatch.setenv(*mark.split("="))
    return mark


def marked(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended
            if mark.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def check_all_end(mark: str) -> None:
    """The kernel kills them one after the other."""
    limit = time.monotonic() + 30
    while left := marked(mark):
        assert time.monotonic() < limit, f"still there: {left}"
        time.sleep(0.01)


def namespaces_of(pid: int) -> list[Path]:
    return list(Path("/run/netns").glob(f"dtorch-cluster-{pid}-*"))


def start(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", EXAMPLES / "cluster.py", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (environment or {}),
    )


def read_until(stream: IO[str] | None, beginning: str) -> None:
    assert stream is not None
    for line in stream:
        if line.startswith(beginning):
            return
    raise AssertionError(f"no line that begins with {beginning!r}")


# ---- The demonstration --------------------------------------------------------------------------


def test_all_batches_are_answered_although_a_host_is_lost(hosts: str, mark: str) -> None:
    with start(
        *("--hosts", hosts, "--epochs", "3", "--rounds", "8", "--batch-size", "20"),
        *("--outstanding", "24"),
    ) as example:
        stdout, stderr = example.communicate(timeout=LIMIT)
    assert example.returncode == 0, f"{stdout}\n{stderr}"
    said = [line for line in stderr.splitlines() if not line.startswith("training:")]
    assert said == []
    place = {"loopback": "3 groups of processes, on the", "namespaces": "3 network namespaces"}
    assert stdout.startswith(f"hosts:    {place[hosts]}")
    lost = re.search(r"^cut off:  (worker[12]), exit code 0$", stdout, re.MULTILINE)
    assert lost
    assert f"noticed:  {lost[1]} is lost: worker '{lost[1]}' has given no sign for 3 s" in stdout
    check_answers(stdout, "lost", rounds=8, batch_size=20, outstanding=24)

    check_all_end(mark)
    assert namespaces_of(example.pid) == []


@pytest.mark.parametrize(
    ("hosts", "number"),
    [
        ("loopback", signal.SIGINT),
        ("loopback", signal.SIGKILL),
        ("namespaces", signal.SIGTERM),
        ("namespaces", signal.SIGKILL),
    ],
    indirect=["hosts"],
)
def test_all_hosts_end_with_the_demonstration(
    hosts: str, mark: str, number: signal.Signals
) -> None:
    from hosts.places import namespaces

    with start("--hosts", hosts, "--epochs", "1000") as example:
        read_until(example.stdout, "workers:")
        assert len(marked(mark)) >= 7  # the demonstration, and on each host torchrun and its own
        assert bool(namespaces_of(example.pid)) == (hosts == "namespaces")
        example.send_signal(number)
        example.communicate(timeout=LIMIT)
    assert example.returncode == (143 if number == signal.SIGTERM else -number)
    check_all_end(mark)
    if number == signal.SIGKILL and hosts == "namespaces":
        with namespaces():  # the next run removes what it has left
            pass
    assert namespaces_of(example.pid) == []


def test_a_host_that_ends_too_early_ends_the_demonstration(mark: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "sys.exit('this is why') if os.environ['RANK'] == '1' else time.sleep(1000)"
    )
    script = """
        from hosts.demonstration import demonstrate
        from hosts.options import parse_options
        sys.exit(demonstrate(parse_options(["--hosts", "loopback"]), sys.argv[2:]))
    """
    prelude = "import sys; sys.path.insert(0, sys.argv[1])"
    done = run_python(script, args=(str(EXAMPLES), str(program)), prelude=prelude, timeout=LIMIT)
    assert done.returncode == 1
    told, said = done.stderr.split("---- host 1 says:\n")
    assert told == "cluster.py: error: host 1 has ended too early\n"
    assert said.startswith("this is why\n")
    check_all_end(mark)


def test_without_root_it_says_so_and_takes_the_loopback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hosts import demonstration

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with contextlib.ExitStack() as stack:
        places = demonstration._find_places(None, stack)
        assert places.description.endswith("on the loopback: network namespaces take root")
        with pytest.raises(SystemExit, match="namespaces take root"):
            demonstration._find_places("namespaces", stack)


def test_where_root_may_not_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container."""
    from hosts import demonstration

    for program in ("ip", "unshare"):
        refuses = tmp_path / program
        refuses.write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
        refuses.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with contextlib.ExitStack() as stack:
        places = demonstration._find_places(None, stack)
    assert re.search(r"loopback: ip netns add .*: Operation not permitted$", places.description)

    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with contextlib.ExitStack() as stack:
        places = demonstration._find_places(None, stack)
    assert places.description.endswith("network namespaces take the program 'ip'")


# ---- Hosts as they are --------------------------------------------------------------------------


@contextlib.contextmanager
def two_hosts(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """The controller, and one worker, with the environment that torchrun gives them."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # without TensorPipe's warnings
    arguments += ("--lost-after", "60")  # a connection that is closed shows at once
    with contextlib.ExitStack() as stack:
        both = []
        for rank in range(2):
            both.append(start(*arguments, environment=common | {"RANK": str(rank)}))
            stack.callback(both[-1].communicate)
            stack.callback(both[-1].kill)
        yield both[0], both[1]


@pytest.mark.parametrize("mode", ["auto", "network"])
def test_without_a_loss_all_end_well(mode: str) -> None:
    with two_hosts(
        *("--mode", mode, "--epochs", "3", "--rounds", "4", "--batch-size", "20"),
        *("--outstanding", "24"),
    ) as (controller, worker):
        stdout, stderr = controller.communicate(timeout=LIMIT)
        assert controller.returncode == 0, stderr
        assert worker.communicate(timeout=LIMIT) == ("", "")
        assert worker.returncode == 0
    check_answers(stdout, "", rounds=4, batch_size=20, outstanding=24)


def test_a_worker_ends_when_its_controller_is_lost() -> None:
    with two_hosts("--mode", "network", "--epochs", "1000") as (controller, worker):
        read_until(controller.stdout, "workers:")
        controller.kill()
        stdout, stderr = worker.communicate(timeout=LIMIT)
        assert (worker.returncode, stdout) == (1, "")
    assert re.fullmatch(
        r"cluster.py: error: .*the connection to worker 'controller' is lost.*\n", stderr
    )


def test_a_controller_without_a_worker_left_says_so() -> None:
    with two_hosts("--mode", "network", "--epochs", "1", "--rounds", "1000") as both:
        controller, worker = both
        read_until(controller.stdout, "asking:")
        worker.kill()
        stdout, stderr = controller.communicate(timeout=LIMIT)
        assert controller.returncode == 1
    # Whichever the controller is told first: that the connection is closed, or a job undelivered.
    assert stdout.startswith("noticed:  worker1 is lost: ")
    assert stderr.endswith("error: expected a worker that is alive, but all have ended\n")


# ---- The command line ---------------------------------------------------------------------------

WRONG_ARGUMENTS = {
    "no time": ("--lost-after", "0"),
    "no such mode": ("--mode", "file"),
    "no such hosts": ("--hosts", "clouds"),
    "no rounds": ("--rounds", "0"),
    "unknown option": ("--lost", "3"),
}


@pytest.mark.parametrize("arguments", WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS.keys())
def test_wrong_arguments_are_told_in_one_line(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    from hosts.options import parse_options

    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    check_refusal(ended.value.code, *capsys.readouterr())


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    from hosts.options import Options, parse_options

    with pytest.raises(SystemExit) as ended:
        parse_options(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for name in {*Options._fields, "rounds"} - {"job"}:
        assert f"--{name.replace('_', '-')} " in said
