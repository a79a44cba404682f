"""``python -m dtorch_ops``: what a bug report needs, and whether each backend works here."""

from __future__ import annotations

import asyncio
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

import torch

import dtorch_ops

from . import _build_info, _torchscript


def _check_operator() -> None:
    source = torch.arange(6.0).reshape(2, 3)
    snapshot = dtorch_ops.to_torch_async(source, copy=True)
    source.zero_()
    if snapshot.get().sum().item() != 15.0:
        raise AssertionError("the snapshot does not hold the value of the call")
    dtorch_ops.sync(timeout_ms=5000)


def _check_memory() -> None:
    promise = dtorch_ops.TensorPromise()
    future = promise.get_future()
    value = torch.arange(4.0)
    thread = threading.Thread(target=promise.set_value, args=(value,))
    thread.start()
    received = future.wait(5000)
    thread.join()
    if not torch.equal(received, value):
        raise AssertionError(f"sent {value}, received {received}")


def _check_await() -> None:
    async def fetch() -> torch.Tensor:
        promise = dtorch_ops.TensorPromise()
        threading.Thread(target=promise.set_value, args=(torch.ones(2),)).start()
        return await asyncio.wait_for(promise.get_future(), 5)

    if asyncio.run(fetch()).sum().item() != 2.0:
        raise AssertionError("awaited another value than was set")


def _check_torchscript() -> None:
    if not _torchscript.available:
        raise NotImplementedError("this torch has no TorchScript")
    if _torchscript.fetch(torch.ones(2)).sum().item() != 2.0:
        raise AssertionError("a scripted function fetched another value than was passed")


def _check_file() -> None:
    promise = dtorch_ops.TensorPromise(mode="file")
    future = promise.get_future()
    code = (
        "import sys, torch, dtorch_ops\n"
        "dtorch_ops.TensorPromise.from_token(sys.argv[1]).set_value(torch.arange(4.0))\n"
    )
    producer = subprocess.run(
        [sys.executable, "-c", code, promise.token()], capture_output=True, text=True, timeout=60
    )
    if producer.returncode != 0:
        raise RuntimeError(producer.stderr.strip().splitlines()[-1])
    if future.wait(5000).sum().item() != 6.0:
        raise AssertionError("received another value than was sent")


_NETWORK = """
import sys, torch, dtorch_ops
from torch.distributed import rpc

def work(promise):
    promise.set_value(torch.arange(4.0))

rank, meeting = int(sys.argv[1]), sys.argv[2]
dtorch_ops.network.init(rank=rank, world_size=2, init_method="file://" + meeting, interface="lo")
if rank == 0:
    promise = dtorch_ops.TensorPromise(mode="network")
    future = promise.get_future()
    rpc.rpc_sync("worker1", work, (promise,))
    assert future.wait(5000).sum().item() == 6.0, "received another value than was sent"
dtorch_ops.network.shutdown()
"""


def _check_network() -> None:
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", _NETWORK, str(rank), f"{folder}/meeting"],
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            for worker in workers:
                said = worker.communicate(timeout=60)[1]
                if worker.returncode != 0:
                    raise RuntimeError(said.strip().splitlines()[-1])
        finally:
            for worker in workers:
                worker.kill()


def _check_accelerator() -> None:
    accelerator = torch.accelerator.current_accelerator()
    fetched = dtorch_ops.to_torch_async(torch.ones(2, device=accelerator), device="cpu").wait(60000)
    if fetched.sum().item() != 2.0:
        raise AssertionError("fetched another value than was computed")
    dtorch_ops.sync(timeout_ms=60000)


_CHECKS: dict[str, Callable[[], None]] = {
    "operators": _check_operator,
    "memory backend": _check_memory,
    "file backend": _check_file,
    "network backend": _check_network,
    "await": _check_await,
    "TorchScript": _check_torchscript,
}


def _devices() -> str:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or torch.accelerator.device_count() == 0:
        return "cpu"
    return f"cpu, {torch.accelerator.device_count()} x {accelerator.type}"


def main() -> int:
    """Print the report; 1 if a check fails."""
    info = _build_info
    facts = {
        "dtorch_ops": dtorch_ops.__version__,
        "built for": f"torch {info.TORCH_VERSION}, {info.BUILD_TYPE}, CUDA {info.CUDA_VERSION}",
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
        "Python": sys.version.replace("\n", " "),
        "system": platform.platform(),
        "devices": _devices(),
    }
    for name, fact in facts.items():
        print(f"{name:16} {fact}")
    print()
    failed = False
    try:
        "✓✗".encode(sys.stdout.encoding or "ascii")
        yes, no = "✓", "✗"
    except UnicodeEncodeError:
        yes, no = "ok", "NO"
    checks, skipped = dict(_CHECKS), {}
    if torch.accelerator.is_available():
        checks["accelerator"] = _check_accelerator
    else:
        skipped["accelerator"] = "none here"
    for name, check in checks.items():
        try:
            check()
        except Exception as error:
            failed = True
            print(f"{no} {name:16} {type(error).__name__}: {error}")
        else:
            print(f"{yes} {name:16} works")
    for name, reason in skipped.items():
        print(f"- {name:16} {reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
