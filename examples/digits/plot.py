"""The plot of the loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from .training import Step


def save_loss_plot(path: Path, histories: dict[str, list[Step]]) -> None:
    """Draw the loss of each network by step, with its mean over a twentieth of the training."""
    figure = Figure(figsize=(7, 4), layout="constrained")  # not pyplot: needs no display
    axes = figure.subplots()
    for index, (name, steps) in enumerate(histories.items()):
        loss = np.array([step.loss for step in steps])
        width = max(1, len(loss) // 20)
        mean = np.convolve(loss, np.ones(width) / width, mode="valid")
        axes.plot(loss, color=f"C{index}", alpha=0.25, linewidth=0.8)
        axes.plot(np.arange(width - 1, len(loss)), mean, color=f"C{index}", label=name)
    axes.set(xlabel="training step", ylabel="loss", yscale="log", title="Handwritten digits")
    axes.legend()
    figure.savefig(path, dpi=150)
