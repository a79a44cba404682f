"""Train on real handwritten digits and serve the networks, without ever blocking on a tensor.

The first example of dtorch_ops. Two files show the library:

* ``digits/training.py``: futures. The loss of a step is read when it is there, not waited for.
* ``digits/serving.py``: promises. A coroutine awaits what a worker thread, or TorchScript, sets.

The rest is what any training script has.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import torch
from digits.comparison import compare_readers
from digits.data import Digits, load_digits
from digits.network import DigitNetwork
from digits.options import Options, parse_options
from digits.plot import save_loss_plot
from digits.progress import Progress
from digits.serving import Answering, scripted, serve
from digits.training import FutureReader, Step, train
from torch import Tensor

REQUIRED_ACCURACY = 95.0


def train_network(
    name: str, digits: Digits, options: Options, seed: int
) -> tuple[DigitNetwork, list[Step]]:
    """A trained network, and what each step of its training reported."""
    network = DigitNetwork(seed).to(options.device)
    steps: list[Step] = []
    progress = Progress(name, options.epochs * digits.steps_per_epoch(options.batch_size))

    def on_step(step: Step) -> None:
        steps.append(step)
        progress.show(len(steps), f"loss {step.loss:.4f}  accuracy {step.accuracy:4.0%}")

    batches = digits.training_batches(options.epochs, options.batch_size, seed)
    train(network, batches, FutureReader(), on_step)
    return network.eval(), steps


def serve_test_images(networks: list[DigitNetwork], digits: Digits, clients: int) -> float:
    """Ask both networks for each test image, print how that went; the accuracy in percent."""
    first, second = (Answering(network) for network in networks)
    answers = asyncio.run(serve([first, scripted(second)], digits.test_images, clients))

    def accuracy(probabilities: Tensor) -> float:
        return 100 * (probabilities.argmax(1) == digits.test_labels).double().mean().item()

    alone = [accuracy(probabilities) for probabilities in answers.probabilities.unbind(1)]
    together = accuracy(answers.probabilities.mean(1))
    p50, p99 = np.percentile(answers.latencies_ms, [50, 99])
    print(f"serving:  {len(digits.test_images)} images, {clients} clients, 2 networks (1 scripted)")
    print(f"latency:  p50 {p50:.2f} ms, p99 {p99:.2f} ms until both networks have answered")
    print(f"test accuracy: {together:.2f} % (alone {alone[0]:.2f} % and {alone[1]:.2f} %)")
    return together


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # the images are so small that threads would only wait for each other

    digits = load_digits(options.seed).to(options.device)
    train_count, test_count = len(digits.train_images), len(digits.test_images)
    print(f"data:     {train_count} scans to train on, {test_count} to test", flush=True)
    print(f"device:   {options.device}", flush=True)
    networks, histories = [], {}
    for number in (1, 2):
        name = f"network {number}"
        network, histories[name] = train_network(name, digits, options, options.seed + number)
        networks.append(network)
    save_loss_plot(options.output, histories)
    print(f"loss:     plotted in {options.output}")

    accuracy = serve_test_images(networks, digits, options.clients)
    compare_readers(digits, options.batch_size, options.seed)
    if accuracy <= REQUIRED_ACCURACY:
        sys.exit(
            "train_digits.py: error: expected a test accuracy above "
            f"{REQUIRED_ACCURACY:.0f} %, got {accuracy:.2f} %: train for more --epochs"
        )


if __name__ == "__main__":
    main()
