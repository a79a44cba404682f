"""A small convolutional network for images of 8 x 8 pixels."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DigitNetwork(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)  # the initial weights
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)
