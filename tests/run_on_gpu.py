"""The accelerator's tests, or with ``--bench`` its benchmarks, on CUDA. ``make test-gpu``.

Run by a Python that has a CUDA build of torch, setuptools, cmake, ninja, pytest and pytest-timeout:
nothing is downloaded. The native library is built for it, in place. What else is given goes to
pytest, or to the benchmarks. Where there is no CUDA device it says so, and has not failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ENVIRONMENT = {
    "TEST_ACCELERATOR": "cuda",
    # As many hardware queues as there can be: streams that share one hold each other up.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Whether there is a device is asked without using one, which would be in the way of forks.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


def there_is_a_device() -> bool:
    try:
        import torch
    except ImportError:
        if not Path("/dev/nvidiactl").exists():
            return False
        sys.exit(f"{sys.executable} has no torch: make test-gpu PYTHON_GPU=one that has")
    return torch.cuda.is_available()


def main() -> None:
    """Build, and run."""
    if not there_is_a_device():
        print("no CUDA device: nothing was run")
        return
    environment = os.environ | ENVIRONMENT
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(build, cwd=ROOT, check=True)
    arguments = sys.argv[1:]
    if "--bench" in arguments:
        arguments.remove("--bench")
        what = ["-m", "benchmarks", "gpu", *arguments]
    else:
        shared = sorted(map(str, ROOT.glob("tests/test_accelerator*.py")))
        network = "tests/test_network.py::test_rpc_maps_of_devices_spare_the_host"
        files = ["tests/gpu", "tests/test_promise_device.py", network, *shared]
        what = ["-m", "pytest", *files, *arguments]
    command = [sys.executable, *what]
    sys.exit(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
