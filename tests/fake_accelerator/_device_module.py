"""What torch looks up as ``torch.fake``."""

from __future__ import annotations

import types

import torch


def make(devices: int, in_bad_fork: object, is_initialized: object) -> types.ModuleType:
    """The module to give to ``torch._register_device_module``."""
    module = types.ModuleType("torch.fake", __doc__)

    def get_rng_state(device: object = "fake") -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    functions = {
        "device_count": lambda: devices,
        "is_available": lambda: True,
        "is_initialized": is_initialized,
        "init": lambda: None,  # its first use does that
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "current_stream": torch.accelerator.current_stream,
        "synchronize": torch.accelerator.synchronize,
        # Random numbers are the CPU's: torch asks for these, and warns without.
        "_is_in_bad_fork": in_bad_fork,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": get_rng_state,
        "set_rng_state": lambda state, device="fake": None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
