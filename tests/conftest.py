from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

# A job in the background of a shell is started with Ctrl-C ignored, and what it starts is, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """No test depends on the random numbers or the grad mode that another one left."""
    torch.manual_seed(0)
    yield
    assert torch.is_grad_enabled()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
