"""What a worker does: take jobs from its inbox, and fulfil their promises."""

from __future__ import annotations

import signal
from collections import deque
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn

import dtorch_ops


class Job(NamedTuple):
    images: slice
    """Which ones. Every worker has them all, so that a job is a short message."""
    answer: dtorch_ops.TensorPromise
    """Of the probability of each digit, by image."""
    stuck: dtorch_ops.VoidPromise | None = None
    """If given: hang in the middle of the job, and say so. For the demonstration."""


class Inbox(Protocol):
    def poll(self) -> bool:
        """Whether recv() returns, or raises, at once."""

    def recv(self) -> Any:
        """The next job; EOFError when there is none any more."""


def work(inbox: Inbox, network: nn.Module, images: Tensor, ready: dtorch_ops.VoidPromise) -> None:
    """Do the jobs of ``inbox`` in their order, until there is none any more."""
    # Ctrl-C reaches all processes of a terminal. The controller then closes the inbox.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # the workers are what runs in parallel
    try:
        with torch.inference_mode():
            network(images[:1])  # nobody shall wait for what torch sets up in a first call
            ready.set_value()
            _do_jobs(inbox, network, images)
    except EOFError:
        pass  # the controller has no more jobs, or is gone


def work_for_parent(
    inbox: Connection, network: nn.Module, images: Tensor, ready: dtorch_ops.VoidPromise
) -> None:
    """As work(), in a process that the controller has started."""
    try:
        work(inbox, network, images, ready)
    except dtorch_ops.DTorchError:
        controller = parent_process()
        if controller is None or controller.is_alive():
            raise


def _do_jobs(inbox: Inbox, network: nn.Module, images: Tensor) -> NoReturn:
    unpickled: deque[Job] = deque()
    while True:
        # This process is the producer of the promises that it has unpickled: these break with it.
        # One that still lies in the pipe has no producer, so leave none there.
        while not unpickled or inbox.poll():
            unpickled.append(inbox.recv())
        job = unpickled.popleft()
        if job.stuck is not None:
            job.stuck.set_value()
            while True:
                unpickled.append(inbox.recv())
        try:
            probabilities = network(images[job.images]).softmax(1)
        except Exception as error:
            job.answer.set_exception(error)  # whoever awaits it gets it, and the worker goes on
        else:
            job.answer.set_value(probabilities)
