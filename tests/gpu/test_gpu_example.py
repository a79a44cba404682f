"""examples/train_digits.py on an accelerator, from the data to what clients are answered."""

from __future__ import annotations

import sys

import pytest
import torch
from on_accelerator import *  # noqa: F403

pytestmark = pytest.mark.timeout(600)  # the first one may have to build the fake


@on_accelerator(timeout=60)
def test_it_takes_the_accelerator_that_there_is():
    import contextlib
    import io
    import tempfile

    sys.path.insert(0, "examples")
    import digits.comparison
    import train_digits

    image, kernel = torch.ones(1, 1, 3, 3, device=DEVICE), torch.ones(1, 1, 1, 1, device=DEVICE)
    try:
        torch.nn.functional.conv2d(image, kernel)
    except NotImplementedError:  # by the fake, for which another network does, a worse one

        class Network(torch.nn.Module):
            def __init__(self, seed: int) -> None:
                super().__init__()
                torch.manual_seed(seed)
                self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 10)

            def forward(self, images: torch.Tensor) -> torch.Tensor:
                return self.last(self.first(images.flatten(1)).relu())

        train_digits.DigitNetwork = digits.comparison.DigitNetwork = Network
        train_digits.REQUIRED_ACCURACY = 75.0
        digits.comparison.ROUNDS, digits.comparison.STEPS = 2, 5
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["train_digits.py", "--epochs", "5", "--output", f"{folder}/loss.png"]
        printed, progress = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(progress):
            train_digits.main()  # exits if its answers are not accurate enough
    assert f"device:   {DEVICE}\n" in printed.getvalue(), printed.getvalue()
    assert "network 2: 100%" in progress.getvalue()
