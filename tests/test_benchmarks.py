"""The benchmarks run and say what they should. How fast anything is, is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from helpers import ROOT

FIGURES = {
    "latency.to_torch_async",
    "latency.operator",
    "latency.operator_at_hand",
    "latency.packet",
    "latency.promise",
    "latency.make_promise",
    "latency.chain",
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
}
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


def test_every_figure_is_shown_with_its_baseline(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = _run("--quick", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads(file.read_text())
    assert result.keys() == {"machine", "settings", "figures"}
    assert result["figures"].keys() == FIGURES
    for key, figure in result["figures"].items():
        assert figure["key"] == key
        assert figure["title"] in done.stdout
        assert figure["baseline_title"] in done.stdout
        assert figure["unit"]
        for name in ("subject", "baseline", "ratio"):
            spread = figure[name]
            if name == "ratio" and spread is None:
                continue  # the baseline is 0
            assert spread["p10"] <= spread["median"] <= spread["p90"], (key, name)
        target = figure["target"]
        assert (target and target["at_most"]) == TARGETS.get(key)
        assert isinstance(figure["met"], bool) == (key in TARGETS)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    done = _run("latenzy")
    assert done.returncode == 2
    assert "latenzy" in done.stderr and "latency, await, memory" in done.stderr
