"""A worker that is a process on this machine."""

from __future__ import annotations

import contextlib
from multiprocessing.context import SpawnContext

from torch import Tensor, nn

from .contact import Contact
from .worker import Job, work_for_parent

PATIENCE_S = 10


class WorkerProcess(Contact):
    """Starts the process, with an inbox of its own."""

    def __init__(self, name: str, network: nn.Module, images: Tensor) -> None:
        super().__init__(name)
        context = SpawnContext()
        inbox, self._outbox = context.Pipe(duplex=False)
        # Daemonic: ended with the controller, whatever way that takes out of this program.
        self.process = context.Process(
            target=work_for_parent,
            args=(inbox, network, images, self._ready),
            name=name,
            daemon=True,
        )
        self.process.start()
        inbox.close()  # the process has the only one, and ours is the only other end
        self._loop.add_reader(self.process.sentinel, self._ended)

    def is_alive(self) -> bool:
        # The loop may not have been told yet, when the library has been, and the reverse.
        return super().is_alive() and self.process.is_alive()

    def close(self) -> None:
        """End the process. Blocks until it has ended."""
        self._loop.remove_reader(self.process.sentinel)
        self._outbox.close()
        self.process.join(PATIENCE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()

    def _send(self, job: Job) -> None:
        # A process that has just ended takes nothing. Its promises are cancelled soon.
        with contextlib.suppress(BrokenPipeError):
            self._outbox.send(job)

    async def _end(self) -> None:
        self.process.kill()

    def _ended(self) -> None:
        self._loop.remove_reader(self.process.sentinel)
        super()._ended()
