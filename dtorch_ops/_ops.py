"""The only file that names ``torch.ops``: each operator, bound once."""

from __future__ import annotations

import torch

from . import _C
from . import _library as _library  # loads the operators

get_tensor_async = torch.ops.dtorch.get_tensor_async.default
sync = torch.ops.dtorch.sync.default

# What the overload calls: torch's own, or a faster one for the usual call. Both go through the
# dispatcher, so that modes, subclasses, autograd, tracing and the profiler see the operator.
if hasattr(get_tensor_async, "_op"):
    get_tensor_async._op = _C.fast_operator(get_tensor_async._op)
