"""The benchmarks run and say what they should. How fast anything is, is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_accelerator import _build
from helpers import ROOT

import dtorch_ops

FIGURES = {
    "latency.to_torch_async",
    "latency.operator",
    "latency.operator_at_hand",
    "latency.packet",
    "latency.promise",
    "latency.make_promise",
    "latency.chain",
    "latency.tree_list",
    "latency.tree_nested",
    "latency.blocked_thread_torch",
    "latency.blocked_thread_python",
    "await.resume",
    "await.many",
    "await.idle_cpu",
    "await.idle_threads",
    "memory.promise",
    "memory.look",
    "memory.block",
    "memory.cancel",
    "file.wait_4B",
    "file.wait_64KiB",
    "file.wait_1MiB",
    "file.torch_wait_4B",
    "file.torch_wait_64KiB",
    "file.await_4B",
    "file.await_64KiB",
    "file.first_use",
    "file.peer_pipe_4B",
    "file.peer_pipe_64KiB",
    "file.peer_pipe_1MiB",
    "file.peer_pipe_stream",
    "file.stream_python",
    "file.stream_whole",
    "file.token",
    "file.token_size",
    "file.outstanding_memory",
    "file.outstanding_threads",
    "file.outstanding_descriptors",
    "file.outstanding_last",
    "file.outstanding_idle",
}
NAMES = ("latency", "await", "memory", "file")
TARGETS = {
    "latency.to_torch_async": 0.5,
    "latency.operator": 1.0,
    "latency.packet": 1.3,
    "await.resume": 1.15,
    "await.many": 0.7,
    "await.idle_cpu": 1.0,
    "await.idle_threads": 1.0,
    "memory.promise": 1024,
    "memory.look": 1.0,
    "memory.block": 1.0,
    "memory.cancel": 1.0,
    "file.wait_4B": 1.5,
    "file.wait_64KiB": 1.5,
    "file.wait_1MiB": 1.15,
    "file.torch_wait_4B": 2.5,
    "file.torch_wait_64KiB": 2.5,
    "file.await_4B": 1.0,
    "file.await_64KiB": 1.0,
    "file.first_use": 0.6,
    "file.stream_python": 1 / 3,
    "file.token": 10,
    "file.token_size": 300,
    "file.outstanding_memory": 1536,
    "file.outstanding_threads": 1.0,
    "file.outstanding_descriptors": 1.0,
    "file.outstanding_last": 1.2,
    "file.outstanding_idle": 1.0,
}
if hasattr(dtorch_ops.TensorPromise, "empty"):
    LENT = {f"file.lent_{size}": 1.2 for size in ("4B", "64KiB", "1MiB")}
    FIGURES |= LENT.keys()
    TARGETS |= LENT


GPU_TARGETS = {
    "gpu.training_step": 1.0,
    "gpu.training_steps_per_second": None,
    "gpu.training_waits": 0.0,
    "gpu.caller_here": 15,
    "gpu.caller_operator": 15,
    "gpu.caller_to_host": 15,
    "gpu.ready_idle_sleeping": None,
    "gpu.ready_idle_spinning": None,
    "gpu.ready_1ms_sleeping": 1.2,
    "gpu.ready_1ms_spinning": 1.2,
    "gpu.to_host_1MiB": None,
    "gpu.to_host_64MiB": 1 / 0.95,
    "gpu.idle_cpu": 2.0,
}


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "benchmarks", *args],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        check=False,
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a quick run of all but gpu has printed, and the file with its figures."""
    file = tmp_path_factory.mktemp("quick") / "figures.json"
    done = _run(*NAMES, "--quick", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout, file


def test_every_figure_is_shown_with_its_baseline(quick: tuple[str, Path]) -> None:
    printed, file = quick
    result = json.loads(file.read_text())
    assert result.keys() == {"machine", "settings", "figures"}
    assert result["figures"].keys() == FIGURES
    for key, figure in result["figures"].items():
        assert figure["key"] == key
        assert figure["title"] in printed
        assert figure["baseline_title"] in printed
        assert figure["unit"]
        for name in ("subject", "baseline", "ratio"):
            spread = figure[name]
            if name == "ratio" and spread is None:
                continue  # the baseline is 0
            assert spread["p10"] <= spread["median"] <= spread["p90"], (key, name)
        target = figure["target"]
        assert (target and target["at_most"]) == TARGETS.get(key)
        assert isinstance(figure["met"], bool) == (key in TARGETS)


@pytest.mark.timeout(600)  # it may have to build the fake
def test_those_of_an_accelerator_run_on_the_fake_one(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    _build.built()
    done = _run("gpu", "--quick", "--device", "fake", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    figures = json.loads(file.read_text())["figures"]
    assert {key: f["target"] and f["target"]["at_most"] for key, f in figures.items()} == (
        GPU_TARGETS
    )
    for figure in figures.values():
        assert figure["title"] in done.stdout
    waits = figures["gpu.training_waits"]
    assert (waits["subject"]["median"], waits["baseline"]["median"]) == (0, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_an_accelerator_they_say_so_in_one_line() -> None:
    done = _run("gpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "== gpu: no CUDA device: nothing was measured"


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    done = _run("latenzy")
    assert done.returncode == 2
    assert "latenzy" in done.stderr and "latency, await, memory" in done.stderr


def test_the_latencies_between_processes_are_drawn(quick: tuple[str, Path], tmp_path: Path) -> None:
    _, file = quick
    picture = tmp_path / "latency.png"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.plot_file", "--json", file, "--out", picture],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
