"""Who can reach the shared memory, and what a container or a limit makes of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from forked import check
from helpers import PRELUDE, ROOT

as_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="only root may become another user, or make namespaces with 'unshare'",
)


def run_in(namespace: str, code: str) -> None:
    """Run ``code`` behind the shell words ``namespace``; it must exit with 0."""
    script = PRELUDE + textwrap.dedent(code)
    command = ["sh", "-c", namespace + ' exec "$@"', "sh", sys.executable, "-c", script]
    done = subprocess.run(
        ["unshare", "--mount", *command], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


@as_root
def test_another_user_cannot_open_the_memory() -> None:
    check(
        """
        promise, future = pending()
        token = promise.token()
        def child(link):
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            error = error_of(lambda: dtorch_ops.TensorPromise.from_token(token))
            assert type(error) is dtorch_ops.DTorchError, repr(error)
            assert "ermission denied" in str(error), error
        forked(child).end()
        promise.set_value(torch.ones(1))
        value_of(future)
        """
    )


@as_root
def test_an_owner_that_is_not_dumpable_is_named() -> None:
    """As one is on a hardened system: not even its own user may look at its descriptors."""
    check(
        """
        import ctypes
        def become_nobody():
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        def owner(link):
            become_nobody()
            assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE
            promise, future = pending()
            say(link, promise.token().encode())
            hear(link)
            promise.set_value(torch.ones(1))  # goes on
            value_of(future)
        def producer(link):
            become_nobody()
            error = error_of(lambda: dtorch_ops.TensorPromise.from_token(hear(link).decode()))
            assert type(error) is dtorch_ops.DTorchError, repr(error)
            assert "not dumpable" in str(error), error
        owner, producer = forked(owner), forked(producer)
        producer.say(owner.hear())
        producer.end()
        owner.say()
        owner.end()
        """
    )


@pytest.fixture
def report_without_proc() -> str:
    """What ``python -m dtorch_ops`` says of the file backend where /proc shows other processes."""
    done = subprocess.run(
        ["unshare", "--pid", "--fork", sys.executable, "-m", "dtorch_ops"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 1
    [line] = [line for line in done.stdout.splitlines() if "file backend" in line]
    return line


@as_root
def test_the_report_shows_that_the_memory_cannot_be_reached(report_without_proc: str) -> None:
    assert report_without_proc.startswith("NO ") and "cannot be reached" in report_without_proc


@as_root
def test_the_report_says_why(report_without_proc: str) -> None:
    assert "has ended" not in report_without_proc, "it lives"


def test_a_peer_cannot_shrink_the_memory() -> None:
    check(
        """
        promise, future = pending()
        promise.token()
        owner = os.getpid()
        def child(link):
            folder = f"/proc/{owner}/fd"
            paths = [f"{folder}/{fd}" for fd in os.listdir(folder)]
            ours = [p for p in paths if "memfd:dtorch_ops" in os.readlink(p)]
            assert len(ours) == 1, ours
            memory = os.open(ours[0], os.O_RDWR)
            size = os.fstat(memory).st_size
            for other in (0, size // 2, size + 4096):
                assert isinstance(error_of(lambda: os.ftruncate(memory, other)), PermissionError)
            promise.set_value(torch.full((100_000,), 3.0))
        forked(child).end()
        assert value_of(future).sum().item() == 300_000
        """
    )


@as_root
def test_a_small_dev_shm_is_no_limit() -> None:
    run_in(
        "mount -t tmpfs -o size=1m tmpfs /dev/shm &&",
        """
        torch.set_num_threads(1)
        assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_bsize == 1 << 20
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        if os.fork() == 0:
            promise.set_value(torch.ones(16 << 20, dtype=torch.uint8))
            os._exit(0)
        assert future.wait(20000).sum().item() == 16 << 20
        os.wait()
        """,
    )


@as_root
def test_another_pid_namespace_is_named() -> None:
    """A pid means another process there; the owner goes on."""
    run_in(
        "",
        """
        import subprocess
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        code = '''
        import sys, dtorch_ops
        try:
            dtorch_ops.TensorPromise.from_token(sys.argv[1])
        except dtorch_ops.DTorchError as error:
            assert "PID namespace" in str(error), error
            print("refused")
        '''
        import textwrap
        inner = [sys.executable, "-c", textwrap.dedent(code), promise.token()]
        done = subprocess.run(
            ["unshare", "--pid", "--fork", "--mount-proc", *inner],
            capture_output=True, text=True, timeout=40,
        )
        assert done.stdout == "refused\\n", done.stderr
        promise.set_value(torch.ones(1))
        future.wait(5000)
        """,
    )


def test_a_limit_of_file_sizes_is_named() -> None:
    """Growing the memory beyond it would end the process with a signal."""
    check(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        promise, future = pending()
        error = error_of(promise.token)
        assert type(error) is dtorch_ops.DTorchError and "ulimit -f" in str(error), repr(error)
        assert promise.is_pending()
        promise.set_value(torch.ones(1))
        value_of(future)
        """
    )


def test_values_outlive_more_workers_than_there_are_lanes() -> None:
    """One after the other, each of them gone, and every value kept."""
    check(
        """
        kept = []
        for number in range(530):
            promise, future = pending()
            pid = os.fork()
            if pid == 0:
                promise.set_value(torch.full((25_000,), float(number)))
                os._exit(0)
            kept.append(value_of(future))
            os.waitpid(pid, 0)
        assert all(t[0] == i and t[-1] == i for i, t in enumerate(kept))
        del kept, promise, future
        """,
        timeout=100,
    )
