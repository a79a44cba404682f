"""The only file that names ``torch.ops``: each operator, bound once."""

from __future__ import annotations

import torch

from . import _library as _library  # loads the operators

get_tensor_async = torch.ops.dtorch.get_tensor_async.default
sync = torch.ops.dtorch.sync.default
