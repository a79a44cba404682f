from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """No test depends on the random numbers or the grad mode that another one left."""
    torch.manual_seed(0)
    yield
    assert torch.is_grad_enabled()
