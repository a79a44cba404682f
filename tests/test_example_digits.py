"""The example that ``make demo`` runs."""

from __future__ import annotations

import asyncio
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from example_programs import EXAMPLES, check_refusal


@pytest.fixture(autouse=True)
def _example_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def run_example(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / "train_digits.py", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def accuracy_in(stdout: str) -> float:
    found = re.search(r"^test accuracy: ([\d.]+) %", stdout, re.MULTILINE)
    assert found, f"no accuracy in\n{stdout}"
    return float(found[1])


def test_trains_serves_and_plots(tmp_path: Path) -> None:
    plot = tmp_path / "new" / "loss.png"
    done = run_example("--epochs", "3", "--clients", "20", "--device", "cpu", "--output", plot)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert 95 < accuracy_in(done.stdout) <= 100
    assert plot.read_bytes().startswith(b"\x89PNG")

    assert "device:   cpu\n" in done.stdout
    assert re.search(r"p50 [\d.]+ ms, p99 [\d.]+ ms", done.stdout)
    assert re.search(r"\d+ steps/s with \.item\(\), \d+ with futures: ratio \d", done.stdout)
    percents = re.findall(r"^network 1: +(\d+)%", done.stderr, re.MULTILINE)
    assert [int(percent) // 10 for percent in percents] == list(range(1, 11))
    assert "\r" not in done.stderr


def test_too_low_an_accuracy_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_digits

    two_steps = ["--epochs", "1", "--batch-size", "1024", "--device", "cpu"]
    two_steps += ["--output", str(tmp_path / "loss.svg")]
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *two_steps])
    monkeypatch.setattr(train_digits, "compare_readers", lambda *_: None)  # takes its time
    threads = torch.get_num_threads()
    try:
        with pytest.raises(SystemExit) as ended:
            train_digits.main()
    finally:
        torch.set_num_threads(threads)
    assert re.fullmatch(  # a text, which makes the exit code 1
        r".*: error: expected a test accuracy above 95 %, got \d.*: train for more --epochs",
        str(ended.value.code),
    )
    assert accuracy_in(capsys.readouterr().out) <= 95


WRONG_ARGUMENTS = {
    "negative epochs": ("--epochs", "-1"),
    "no epochs": ("--epochs", "0"),
    "epochs without end": ("--epochs", "1" * 5000),
    "no integer": ("--batch-size", "2.5"),
    "no images in a batch": ("--batch-size", "0"),
    "no clients": ("--clients", "0"),
    "too many clients": ("--clients", "257"),
    "negative seed": ("--seed=-1",),
    "no value": ("--seed",),
    "no device": ("--device", "tpu"),
    "a device that is not there": ("--device", "cuda:99"),
    "no index": ("--device", "cpu:"),
    "unknown option": ("--epoch", "3"),
    "unknown word": ("fast",),
    "line breaks": ("a\nb",),
    "unknown format": ("--output", "loss.txt"),
    "no file name": ("--output", ""),
    "directory": ("--output", "directory.png"),
    "below a file": ("--output", "file/loss.png"),
}


@pytest.mark.parametrize("arguments", WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS.keys())
def test_wrong_arguments_are_told_in_one_line(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from digits.options import parse_options

    monkeypatch.chdir(tmp_path)
    Path("directory.png").mkdir()
    Path("file").touch()
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    check_refusal(ended.value.code, *capsys.readouterr())


def test_wrong_arguments_end_the_program() -> None:
    done = run_example("--epochs", "-1")
    check_refusal(done.returncode, done.stdout, done.stderr)
    assert "--epochs: expected an integer from 1 to 1000, got '-1'" in done.stderr


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    from digits.options import parse_options

    with pytest.raises(SystemExit) as ended:
        parse_options(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for option in ("--epochs", "--batch-size", "--clients", "--seed", "--output"):
        assert option in shown.out


def test_checking_the_output_leaves_what_is_there(tmp_path: Path) -> None:
    from digits.options import parse_options

    earlier = tmp_path / "loss.png"
    earlier.write_bytes(b"earlier")
    assert parse_options(["--output", str(earlier)]).output == earlier
    assert earlier.read_bytes() == b"earlier"

    parse_options(["--output", str(tmp_path / "new.png")])
    assert not (tmp_path / "new.png").exists()


def test_futures_and_items_report_the_same_steps() -> None:
    from digits.data import load_digits
    from digits.network import DigitNetwork
    from digits.training import FutureReader, ItemReader, Step, train

    digits = load_digits(seed=0)
    histories: list[list[Step]] = []
    for reader in (ItemReader(), FutureReader()):
        steps: list[Step] = []
        train(DigitNetwork(0), digits.training_batches(1, 512, 0), reader, steps.append)
        histories.append(steps)
    assert len(histories[0]) == digits.steps_per_epoch(512) == 3
    assert histories[0] == [pytest.approx(step) for step in histories[1]]


def test_what_a_network_raises_reaches_the_client() -> None:
    from digits.network import DigitNetwork
    from digits.serving import Answering, scripted, serve

    images = torch.rand(2, 1, 7, 7)  # not 8 x 8
    network = DigitNetwork(0).eval()
    for answering in (Answering(network), scripted(Answering(network))):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            asyncio.run(serve([answering], images, clients=2))


def test_progress_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from digits.progress import Progress

    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress("it", 2)
    progress.show(1, "first ")
    progress.show(2, "second")
    assert terminal.getvalue() == (
        "\rit [############............]  50%  first \rit [########################] 100%  second\n"
    )
