"""The handwritten digits that scikit-learn ships: 1797 real scans of 8 x 8 pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BRIGHTEST = 16


class Digits(NamedTuple):
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def steps_per_epoch(self, batch_size: int) -> int:
        return -(-len(self.train_images) // batch_size)

    def to(self, device: torch.device) -> Digits:
        return Digits(*(tensor.to(device) for tensor in self))

    def training_batches(
        self, epochs: int, batch_size: int, seed: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels, in another order in each epoch."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = torch.randperm(len(self.train_images), generator=generator)
            # Moved once, since a device waits for what it is sent from plain memory.
            for chosen in order.to(self.train_images.device).split(batch_size):
                yield self.train_images[chosen], self.train_labels[chosen]


def load_digits(seed: int) -> Digits:
    """A quarter is for testing, with equal shares of each digit; ``seed`` chooses which."""
    # Here, since it takes a second, and worker processes import the example that started them.
    import sklearn.datasets
    from sklearn.model_selection import train_test_split

    scans = sklearn.datasets.load_digits()
    train_images, test_images, train_labels, test_labels = train_test_split(
        torch.from_numpy(scans.images).float().unsqueeze(1) / BRIGHTEST,
        torch.from_numpy(scans.target),
        test_size=0.25,
        stratify=scans.target,
        random_state=seed,
    )
    return Digits(train_images, train_labels, test_images, test_labels)
