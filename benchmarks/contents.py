"""What the benchmarks between processes send, and how they tell that it arrived whole."""

from __future__ import annotations

import torch

from .common import expect


class Contents:
    """A tensor of each size, the same one each time, so that its memory is warm."""

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}

    def tensor(self, size: int, number: int) -> torch.Tensor:
        """``size`` bytes, different for each of 251 numbers."""
        if size not in self._tensors:
            pattern = torch.arange(251, dtype=torch.uint8)
            self._tensors[size] = pattern.repeat(size // 251 + 1)[:size].clone()
        tensor = self._tensors[size]
        tensor[:: max(1, size // 61)] = number % 251
        return tensor

    def check(self, got: torch.Tensor, number: int, where: str) -> None:
        """All of it is compared."""
        right = torch.equal(got, self.tensor(got.numel(), number))
        expect(right, f"{got.numel()} bytes from {where}, number {number}")


def batch(count: int, size: int) -> list[torch.Tensor]:
    """A tensor of its own for each number, for when writing the number would take too long."""
    contents = Contents()
    return [contents.tensor(size, number).clone() for number in range(count)]
