"""The third example: a trace, and a picture of it, that show how fetching and computing overlap."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def _example_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def run_example(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / "profile_fetch.py", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_writes_a_trace_and_a_picture_that_show_the_overlap(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "fetch.png"
    done = run_example("--steps", "4", "--megabytes", "4", "--output", picture)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert picture.read_bytes().startswith(b"\x89PNG")

    loops = re.findall(r"^(.*): +4 batches of 4 MB in (\d+) ms, (\d+) ms", done.stdout, re.M)
    assert [name for name, _, _ in loops] == ["one after the other", "side by side"]
    assert int(loops[0][2]) == 0 < int(loops[1][2])

    events = json.loads(picture.with_suffix(".json").read_text())["traceEvents"]
    writes = [e for e in events if e.get("name") == "dtorch::shm.write"]
    arrows = [e for e in events if e.get("ph") == "s" and e["cat"] == "dtorch"]
    assert len({e["pid"] for e in writes}) == 1
    assert len(arrows) >= 8
    assert {(e["tid"], e["ts"]) for e in arrows} <= {(e["tid"], e["ts"]) for e in writes}


WRONG_ARGUMENTS = {
    "one step": ("--steps", "1"),
    "no integer": ("--megabytes", "2.5"),
    "too much": ("--megabytes", "1025"),
    "unknown format": ("--output", "fetch.txt"),
    "unknown option": ("--step", "3"),
}


@pytest.mark.parametrize("arguments", WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS.keys())
def test_wrong_arguments_are_told_in_one_line(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    from profiling.options import parse_options

    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r".*: error: .* \(see --help\)\n", shown.err)


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    from profiling.options import parse_options

    with pytest.raises(SystemExit) as ended:
        parse_options(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--steps", "--megabytes", "--output"):
        assert option in shown
