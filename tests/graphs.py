"""What the tests of compiled graphs share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

backends = pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])

#: For ``pytestmark``.
MARKS = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.timeout(300),
    # Inductor, when it is imported, of its own use of TorchScript.
    pytest.mark.filterwarnings("ignore:.torch.jit"),
    # Dynamo looks at this attribute of whatever lives across a graph break.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # And says so of every function of a native module that it meets.
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),
]


def operators(run: Callable[[], object]) -> list[str]:
    """The operators of ours that run, in order, each as often as it does. (Other steps of ours are
    not: the profiler shows them too.)
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    events = sorted(profile.events(), key=lambda e: e.time_range.start)
    ours = {
        schema.name for schema in torch._C._jit_get_all_schemas() if schema.name[:8] == "dtorch::"
    }
    return [e.name.removeprefix("dtorch::") for e in events if e.name in ours]
