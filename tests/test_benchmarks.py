"""The benchmarks run and say what they should. How fast anything is, is not tested."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import _build
from helpers import ROOT

import dtorch_ops
from benchmarks import tcp

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


SIZES = ("4B", "1MiB")
NETWORK = {
    *(
        f"network.latency_{size}_{baseline}"
        for size in SIZES
        for baseline in ("result", "callee", "waiter", "gloo")
    ),
    "network.call",
    *(f"network.part_{part}" for part in ("look", "unpickle", "within")),
    "network.stream_one_rpc_sync",
    "network.stream_one_rpc_async",
    "network.stream_threads_rpc_async",
    *(f"network.cpu_{what}" for what in ("promise", "hold", "look")),
    "network.idle_nothing",
    "network.idle_default",
}
SCALE = {
    f"scale.{what}_{workers}"
    for workers in (1, 2)
    for what in (
        *("rate", "cpu", "main", "busiest", "bytes", "rpc_rate", "rpc_cpu", "start", "idle"),
        *(
            f"{whose}_{what}"
            for whose in ("rpc", "basic", "our")
            for what in ("memory", "descriptors")
        ),
        *("rpc_threads", "our_threads", "watch_cpu", "watch_bytes", "watch_segments"),
    )
}
NETWORK_TARGETS = {
    "network.latency_4B_result": 1.1,
    "network.latency_4B_callee": 1.1,
    "network.idle_nothing": 1.0,
    "network.idle_default": 1.0,
    **{f"scale.{what}_{workers}": 1.25 for what in ("cpu", "bytes") for workers in (1, 2)},
    **{f"scale.our_{what}_{workers}": 1.0 for what in ("threads",) for workers in (1, 2)},
}


def _run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "benchmarks", *args],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        check=False,
        env=os.environ | environment,
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
    check(result["figures"], FIGURES, TARGETS, printed)


def check(figures: dict[str, Any], keys: set[str], targets: dict[str, float], printed: str) -> None:
    assert figures.keys() == keys
    for key, figure in figures.items():
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
        assert (target and target["at_most"]) == targets.get(key)
        assert isinstance(figure["met"], bool) == (key in targets)


def test_those_of_the_network_and_of_many_workers_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    # Torch's own warnings: of names that it cannot look up, of connections that are closed.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = _run("network", "scale", "--quick", "--json", str(file), **quiet)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    figures = json.loads(file.read_text())["figures"]
    check(figures, NETWORK | SCALE, NETWORK_TARGETS, done.stdout)
    for workers in (1, 2):
        assert figures[f"scale.our_threads_{workers}"]["ratio"]["median"] == 1
    one, two = (figures[f"scale.our_descriptors_{n}"]["subject"]["median"] for n in (1, 2))
    assert two - one <= 6  # a connection to each worker, one from it, and what torch keeps of them


def test_what_goes_through_tcp_is_counted() -> None:
    """As the kernel does it: from where in its struct is our business."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with client, accepted:
            before = tcp.traffic()
            client.sendall(bytes(1000))
            assert len(accepted.recv(1000, socket.MSG_WAITALL)) == 1000
            accepted.sendall(bytes(10))
            assert len(client.recv(10, socket.MSG_WAITALL)) == 10  # it has acknowledged the rest
            done = tcp.traffic().since(before)
    assert done.bytes >= 2000 + 10
    assert done.segments >= 4


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
