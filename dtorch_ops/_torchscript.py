"""All that touches ``torch.jit``; the rest of the package works where that is gone."""

from __future__ import annotations

import torch

from .promise import TensorPromise, VoidPromise


def install() -> bool:
    """Make ``torch.futures.collect_all`` and ``wait_all`` compile in TorchScript.

    And have a module's promise taken for the native object that it is, not for a Python class.

    Returns:
        Whether TorchScript is there to install into.
    """
    try:
        from torch._jit_internal import FunctionModifiers
        from torch.jit import _builtins

        for promise in (TensorPromise, VoidPromise):
            promise._torchscript_modifier = FunctionModifiers.IGNORE  # type: ignore[union-attr]
        register = _builtins._register_builtin
        register(torch.futures.collect_all, "dtorch::collect_all")
        register(torch.futures.wait_all, "dtorch::wait_all")
    except Exception:  # whatever the way in which TorchScript refuses, warnings as errors included
        return False
    return True


available = install()
