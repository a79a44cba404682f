"""The only file that names ``torch.ops``: each operator, bound once."""

from __future__ import annotations

from typing import Any

import torch

from . import _C
from . import _library as _library  # loads the operators

get_tensor_async = torch.ops.dtorch.get_tensor_async.default
get_tensors_async = torch.ops.dtorch.get_tensors_async.default
get_start = torch.ops.dtorch.get_start.default
get_wait = torch.ops.dtorch.get_wait.default
sync = torch.ops.dtorch.sync.default

get_tensor = torch.ops.dtorch.get_tensor.default
get_tensor_copy = torch.ops.dtorch.get_tensor.copy
sync_promise = torch.ops.dtorch.sync.promise
#: Those that fulfil a promise.
FULFIL = (
    get_tensor,
    get_tensor_copy,
    sync_promise,
    torch.ops.dtorch.sync.devices_promise,
)
GET_FUTURE = (torch.ops.dtorch.get_future.default, torch.ops.dtorch.get_future.void)

#: Those that a graph may hold, and must keep as they stand.
EFFECTS = (get_start, get_wait, *FULFIL)

_CHECKED = (
    "collect_all",
    "collect_any",
    "get_future",
    "get_tensor",
    "is_ready",
    "sync",
    "wait_all",
    "wait_for",
)


def _parameters(schema: torch._C.FunctionSchema) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema.arguments]


def _common(overloads: list[list[tuple[str, str]]]) -> list[tuple[str, str]]:
    """What is known of each parameter before the overload is chosen."""
    common = []
    longest = max(overloads, key=lambda overload: len(overload))
    for i, (name, type) in enumerate(longest):
        types = {overload[i][1] for overload in overloads if i < len(overload)}
        if len(types) > 1:
            type = "promise" if all("Promise" in t for t in types) else "any"
        common.append((name, type))
    return common


def install() -> list[tuple[str, Any]]:
    """Put ours in front of what a call of the operators from Python runs.

    Returns:
        The qualified names of those that have another function now, and the function.
    """
    # torch's own, or a faster one for the usual call. Both go through the dispatcher, so that
    # modes, subclasses, autograd, tracing and the profiler see the operator.
    get_tensor_async._op = _C.fast_operator(get_tensor_async._op)
    replaced = []
    for name in _CHECKED:
        packet = getattr(torch.ops.dtorch, name)
        signatures = []
        for overload in (getattr(packet, o) for o in packet.overloads()):
            signatures.append(_parameters(overload._schema))
            overload._op = _C.checked_operator(overload._op, name, signatures[-1])
        packet._op = _C.checked_operator(packet._op, name, _common(signatures))
        replaced.append((f"dtorch::{name}", packet._op))
    return replaced


replaced = install()
