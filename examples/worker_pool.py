"""Two worker processes predict digits for a controller that awaits them, and one is killed.

The second example of dtorch_ops. Promises travel to other processes, and tensors come back through
shared memory. Three files show it:

* ``pool/worker.py``: what a worker does with the promises that it is sent.
* ``pool/process.py``: how the controller learns what a dead worker had, and had not, unpickled.
* ``pool/pool.py``: how the jobs of a dead worker get to another one.
"""

from __future__ import annotations

import asyncio
import sys
import time

import torch
from digits.data import Digits, load_digits
from digits.network import DigitNetwork
from digits.progress import Progress
from digits.training import FutureReader, Step, train
from pool.asking import Answers, ask, report
from pool.options import Options, parse_options
from pool.pool import WorkersEndedError, open_pool
from torch import Tensor

WORKERS = 2
TRAINING_BATCH = 32
REQUIRED_ACCURACY = 95.0


def train_network(digits: Digits, options: Options) -> DigitNetwork:
    network = DigitNetwork(options.seed)
    steps: list[Step] = []
    progress = Progress("training", options.epochs * digits.steps_per_epoch(TRAINING_BATCH))

    def on_step(step: Step) -> None:
        steps.append(step)
        progress.show(len(steps), f"loss {step.loss:.4f}  accuracy {step.accuracy:4.0%}")

    batches = digits.training_batches(options.epochs, TRAINING_BATCH, options.seed)
    train(network, batches, FutureReader(), on_step)
    return network.eval()


async def ask_workers(
    network: DigitNetwork, images: Tensor, batches: list[slice], outstanding: int
) -> Answers:
    start = time.perf_counter()
    async with open_pool(WORKERS, network, images) as pool:
        print(f"workers:  {WORKERS} processes, ready after {time.perf_counter() - start:.1f} s")
        print(f"asking:   {len(batches)} batches, {outstanding} outstanding", flush=True)
        return await ask(pool, batches, outstanding)


def predict_here(network: DigitNetwork, images: Tensor, batches: list[slice]) -> Tensor:
    """The digits that the network predicts in this process."""
    with torch.inference_mode():
        return torch.cat([network(images[batch]).argmax(1) for batch in batches])


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # the images are so small that threads would only wait for each other

    digits = load_digits(options.seed)
    images, labels = digits.test_images, digits.test_labels
    print(f"data:     {len(digits.train_images)} scans to train on, {len(images)} to test")
    network = train_network(digits, options)

    starts = range(0, len(images), options.batch_size)
    batches = [slice(start, start + options.batch_size) for start in starts]
    try:
        answers = asyncio.run(
            ask_workers(network, images, batches * options.rounds, options.outstanding)
        )
    except WorkersEndedError as error:
        sys.exit(f"worker_pool.py: error: {error}")
    report(answers)

    def accuracy(predicted: Tensor) -> float:
        return 100 * (predicted == labels).double().mean().item()

    by_workers = answers.digits.view(options.rounds, -1)
    here = predict_here(network, images, batches)
    print(f"test accuracy: {accuracy(by_workers):.2f} %, without workers {accuracy(here):.2f} %")
    if not torch.equal(by_workers, here.expand_as(by_workers)):
        sys.exit("worker_pool.py: error: expected the workers to predict what this process does")
    if accuracy(here) <= REQUIRED_ACCURACY:
        sys.exit(
            "worker_pool.py: error: expected a test accuracy above "
            f"{REQUIRED_ACCURACY:.0f} %, got {accuracy(here):.2f} %: train for more --epochs"
        )


if __name__ == "__main__":
    main()
