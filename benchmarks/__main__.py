"""``python -m benchmarks``: see README.md beside this file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

import dtorch_ops

from . import (
    bench_await,
    bench_file,
    bench_gpu,
    bench_latency,
    bench_memory,
    bench_network,
    bench_scale,
)
from .common import Figure, NothingToMeasure, Settings, table

BENCHMARKS = {
    "latency": bench_latency.run,
    "await": bench_await.run,
    "memory": bench_memory.run,
    "file": bench_file.run,
    "network": bench_network.run,
    "scale": bench_scale.run,
    "gpu": bench_gpu.run,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--rounds", type=int, help="how often each is measured (default 15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--quick", action="store_true", help="show only that everything works")
    parser.add_argument(
        "--device", metavar="NAME", help="of gpu: cuda, cuda:1, or the tests' fake, to try it out"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds: expected at least 1")
    return arguments


def _machine(names: list[str]) -> dict[str, Any]:
    gpu = "gpu" in names and torch.cuda.is_available()
    return {
        **({"gpu": torch.cuda.get_device_name()} if gpu else {}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "dtorch_ops": dtorch_ops.__version__,
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],  # by others, since this comes before the first measurement
    }


def _as_json(figure: Figure) -> dict[str, Any]:
    return {**dataclasses.asdict(figure), "met": figure.met}


def main() -> None:
    arguments = _arguments()
    rounds = arguments.rounds or (2 if arguments.quick else 15)
    settings = Settings(rounds, arguments.quick, arguments.device)
    names = arguments.names or list(BENCHMARKS)
    machine = _machine(names)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print("median (p10..p90) of the rounds; the ratio is taken within each round")
    if settings.quick:
        print("--quick: the figures mean nothing")
    figures: list[Figure] = []
    for name in names:
        try:
            new = BENCHMARKS[name](settings)
        except NothingToMeasure as reason:
            print(f"\n== {name}: {reason}", flush=True)
            continue
        print(f"\n== {name}\n\n{table(new)}", flush=True)
        figures += new
    if arguments.json:
        result = {
            "machine": machine,
            "settings": dataclasses.asdict(settings),
            "figures": {figure.key: _as_json(figure) for figure in figures},
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
