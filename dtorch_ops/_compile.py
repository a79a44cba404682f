"""All that is private in what ``torch.compile`` and ``torch.export`` need to know of us."""

from __future__ import annotations

import torch
from torch._library.effects import EffectType

from . import _ops


def install() -> None:
    """Keep the operators in a graph: none is merged with another, moved past it, or dropped."""
    for operator in _ops.EFFECTS:
        torch.library._register_effectful_op(operator, EffectType.ORDERED)


install()
