"""The job that workers do, in every example that has some: predict digits, again and again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from digits.data import Digits, load_digits
from digits.network import DigitNetwork
from digits.progress import Progress
from digits.training import FutureReader, Step, train
from torch import Tensor

from .asking import Answers
from .options import Options

TRAINING_BATCH = 32
REQUIRED_ACCURACY = 95.0


class Work(NamedTuple):
    network: DigitNetwork
    """Trained."""
    images: Tensor
    labels: Tensor
    batches: list[slice]
    """Of the images: each of them once."""


def prepare(options: Options) -> Work:
    """Load the images, train the network, and say so."""
    digits = load_digits(options.seed)
    images = digits.test_images
    print(f"data:     {len(digits.train_images)} scans to train on, {len(images)} to test")
    network = _train_network(digits, options)
    starts = range(0, len(images), options.batch_size)
    batches = [slice(start, start + options.batch_size) for start in starts]
    return Work(network, images, digits.test_labels, batches)


def _train_network(digits: Digits, options: Options) -> DigitNetwork:
    network = DigitNetwork(options.seed)
    steps: list[Step] = []
    progress = Progress("training", options.epochs * digits.steps_per_epoch(TRAINING_BATCH))

    def on_step(step: Step) -> None:
        steps.append(step)
        progress.show(len(steps), f"loss {step.loss:.4f}  accuracy {step.accuracy:4.0%}")

    batches = digits.training_batches(options.epochs, TRAINING_BATCH, options.seed)
    train(network, batches, FutureReader(), on_step)
    return network.eval()


def check(answers: Answers, work: Work) -> None:
    """Compare with what this process predicts; ends the program if that, or the accuracy, fails."""
    with torch.inference_mode():
        here = torch.cat([work.network(work.images[batch]).argmax(1) for batch in work.batches])

    def accuracy(predicted: Tensor) -> float:
        return 100 * (predicted == work.labels).double().mean().item()

    by_workers = answers.digits.view(-1, len(here))
    print(f"test accuracy: {accuracy(by_workers):.2f} %, without workers {accuracy(here):.2f} %")
    if not torch.equal(by_workers, here.expand_as(by_workers)):
        fail("expected the workers to predict what this process does")
    if accuracy(here) <= REQUIRED_ACCURACY:
        fail(
            f"expected a test accuracy above {REQUIRED_ACCURACY:.0f} %, got {accuracy(here):.2f} "
            "%: train for more --epochs"
        )


def fail(why: object) -> NoReturn:
    """End the program with one line."""
    sys.exit(f"{Path(sys.argv[0]).name}: error: {why}")
