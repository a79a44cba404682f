"""All that touches ``torch.jit``; the rest of the package works where that is gone."""

from __future__ import annotations

import torch


def install() -> bool:
    """Make ``torch.futures.collect_all`` and ``wait_all`` compile in TorchScript.

    Returns:
        Whether TorchScript is there to install into.
    """
    try:
        from torch.jit import _builtins

        register = _builtins._register_builtin
        register(torch.futures.collect_all, "dtorch::collect_all")
        register(torch.futures.wait_all, "dtorch::wait_all")
    except (ImportError, AttributeError, RuntimeError):
        return False
    return True


available = install()
