"""The second example that ``make demo`` runs: worker processes, one of which is killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from example_programs import EXAMPLES, check_answers, check_refusal
from torch import Tensor, nn

LIMIT = 100


@pytest.fixture(autouse=True)
def _example_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def run_example(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / "worker_pool.py", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


# ---- The program --------------------------------------------------------------------------------


def test_all_batches_are_answered_although_a_worker_is_killed() -> None:
    before = set(os.listdir("/dev/shm"))
    done = run_example(
        "--epochs", "3", "--rounds", "8", "--batch-size", "20", "--outstanding", "24"
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert set(os.listdir("/dev/shm")) <= before

    check_answers(done.stdout, "killed", rounds=8, batch_size=20, outstanding=24)


WRONG_ARGUMENTS = {
    "no epochs": ("--epochs", "0"),
    "no rounds": ("--rounds", "0"),
    "no images in a batch": ("--batch-size", "0"),
    "nothing outstanding": ("--outstanding", "0"),
    "too much outstanding": ("--outstanding", "129"),
    "negative seed": ("--seed=-1",),
    "no integer": ("--rounds", "2.5"),
    "no value": ("--rounds",),
    "unknown option": ("--round", "3"),
    "unknown word": ("fast",),
    "line breaks": ("a\nb",),
}


@pytest.mark.parametrize("arguments", WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS.keys())
def test_wrong_arguments_are_told_in_one_line(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    from pool.options import parse_options

    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    check_refusal(ended.value.code, *capsys.readouterr())


def test_wrong_arguments_end_the_program() -> None:
    done = run_example("--rounds", "-1")
    check_refusal(done.returncode, done.stdout, done.stderr)
    assert "--rounds: expected an integer from 1 to 1000, got '-1'" in done.stderr


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    from pool.options import Options, parse_options

    with pytest.raises(SystemExit) as ended:
        parse_options(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for name in Options._fields:
        assert f"--{name.replace('_', '-')} N" in said


# ---- The pool -----------------------------------------------------------------------------------


class Pair(nn.Module):
    """Stands in for a network."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([images, -images], dim=1)


class RefusesMany(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        if len(images) > 1:
            raise ValueError("expected one image", len(images))
        return images.unsqueeze(1)


class EndsItsProcess(nn.Module):
    """As soon as it is unpickled there."""

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return os._exit, (3,)


class RaisesAtOnce(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        raise ValueError("no network")


IMAGES = torch.arange(100.0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LIMIT))


def stop(pid: int) -> None:
    """Returns when the process has stopped, and takes nothing from its inbox any more."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def test_jobs_that_a_killed_worker_never_read_are_given_to_another() -> None:
    from pool.pool import LostJob, open_pool

    async def main() -> None:
        async with open_pool(2, Pair(), IMAGES) as pool:
            first, second = pool.workers
            stop(first.process.pid)
            asking = []
            for index in range(8):
                asking.append(asyncio.create_task(pool.predict(slice(index, index + 2))))
                await asyncio.sleep(0)  # the task runs until it awaits its answer
            unread = first.load
            assert unread >= 1  # the other one may have answered, and been given, all the rest
            first.process.kill()
            answers = await asyncio.gather(*asking)
            assert pool.lost == [LostJob(first.name, was_read=False)] * unread
            assert (first.load, second.load) == (0, 0)
        for index, answer in enumerate(answers):
            assert torch.equal(answer, Pair()(IMAGES[index : index + 2]).softmax(1))

    run(main())


def test_without_a_worker_left_there_is_an_error() -> None:
    from pool.pool import LostJob, WorkersEndedError, open_pool

    async def main() -> None:
        async with open_pool(1, Pair(), IMAGES) as pool:
            with pytest.raises(WorkersEndedError):
                await pool.predict(slice(0, 2), kill=True)
            assert pool.lost == [LostJob("worker 1", was_read=True)]
            with pytest.raises(WorkersEndedError):
                await pool.predict(slice(0, 2))
            assert len(pool.lost) == 1

    run(main())


def test_what_the_network_raises_reaches_who_asks_and_the_worker_goes_on() -> None:
    from pool.pool import open_pool

    async def main() -> None:
        async with open_pool(1, RefusesMany(), IMAGES) as pool:
            for _ in range(2):
                with pytest.raises(ValueError, match="expected one image") as raised:
                    await pool.predict(slice(0, 3))
                assert raised.value.args == ("expected one image", 3)
            assert (await pool.predict(slice(0, 1))).tolist() == [[1.0]]
            assert pool.lost == []

    run(main())


@pytest.mark.parametrize(
    "network", [EndsItsProcess(), RaisesAtOnce()], ids=["not unpickled", "unpickled"]
)
def test_a_worker_that_ends_before_it_is_ready_is_an_error(network: nn.Module) -> None:
    """Whether it has unpickled the promise to be so, or not."""
    from pool.pool import WorkersEndedError, open_pool

    async def main() -> None:
        with pytest.raises(WorkersEndedError, match="before it was ready"):
            async with open_pool(2, network, IMAGES):
                raise AssertionError("the pool has opened")

    run(main())
    assert multiprocessing.active_children() == []


# ---- The end of the controller ------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_workers_end_with_their_controller(number: signal.Signals) -> None:
    """SIGINT goes to the workers as well, as from a terminal."""
    with subprocess.Popen(
        [sys.executable, EXAMPLES / "worker_pool.py", "--epochs", "1", "--rounds", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as example:
        assert example.stdout is not None
        while not example.stdout.readline().startswith("asking:"):
            assert example.poll() is None
        if number == signal.SIGINT:
            os.killpg(example.pid, number)
        else:
            example.send_signal(number)
        # Workers hold the other ends of these pipes, too.
        stdout, stderr = example.communicate(timeout=LIMIT)
    assert example.returncode == -number
    assert stdout == ""
    assert "Process worker" not in stderr  # as the traceback of one would begin
    if number == signal.SIGKILL:
        assert [line for line in stderr.splitlines() if not line.startswith("training:")] == []
