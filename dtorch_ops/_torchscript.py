"""All that touches ``torch.jit``; the rest of the package works where that is gone."""

from __future__ import annotations

import warnings

import torch

from . import _ops
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
        for name, function in _ops.replaced:
            register(function, name)
    except Exception:  # whatever the way in which TorchScript refuses, warnings as errors included
        return False
    return True


def fetch(input: torch.Tensor) -> torch.Tensor:
    """Fetch a tensor in a scripted function: shows that TorchScript knows the operators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript's own: that it is being retired
        unit = torch.jit.CompilationUnit(
            "def fetch(t: Tensor) -> Tensor:\n"
            "    return torch.jit.wait(torch.ops.dtorch.get_tensor_async(t, copy=True))\n"
        )
    return unit.fetch(input)  # type: ignore[no-any-return]


available = install()
