"""What a fetch from an accelerator costs, beside what one would write by hand."""

from __future__ import annotations

from . import gpu_bandwidth, gpu_idle, gpu_latency, gpu_training_loop
from .common import Figure, Settings
from .gpu_device import accelerator


def run(settings: Settings) -> list[Figure]:
    here = accelerator(settings)
    return [
        *gpu_training_loop.run(settings, here),
        *gpu_latency.run(settings, here),
        *gpu_bandwidth.run(settings, here),
        *gpu_idle.run(settings, here),
    ]
