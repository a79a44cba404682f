"""A worker on another host, as the controller sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os

from pool.contact import Contact
from pool.worker import Job
from torch import Tensor, nn
from torch.distributed import rpc

import dtorch_ops

from . import serving


class RemoteWorker(Contact):
    """Sends jobs by RPC. RPC's futures can be awaited, as all of torch's can."""

    def __init__(self, name: str, mode: str, cut: str | None) -> None:
        super().__init__(name, mode)
        self._cut = cut
        self._here = dtorch_ops.VoidPromise(mode=mode)

    @classmethod
    async def reach(cls, name: str, mode: str, cut: str | None) -> RemoteWorker:
        """The worker that RPC calls ``name``.

        Args:
            name: of RPC's.
            mode: of all promises.
            cut: command by which the worker can be ended.
        """
        self = cls(name, mode, cut)
        self._pid, self._no_more = await rpc.rpc_async(name, serving.join, (self._here, mode))
        self._watch = asyncio.create_task(self._watch_over())
        return self

    def give(self, network: nn.Module, images: Tensor) -> None:
        """Send what the jobs take. ready() waits until the worker has it."""
        self._put((network, images, self._ready))

    async def close(self) -> None:
        """Tell the worker that there are no more jobs."""
        self._watch.cancel()
        if self.is_alive():
            # In a thread: this waits for the worker's answer, or until the worker is lost.
            with contextlib.suppress(dtorch_ops.BrokenPromiseError):
                await asyncio.to_thread(self._no_more.set_value)

    def _send(self, job: Job) -> None:
        self._put(job)

    def _put(self, item: object) -> None:
        rpc.rpc_async(self.name, serving.put, (item,)).add_done_callback(self._on_delivered)

    def _on_delivered(self, delivered: rpc.Future) -> None:
        try:
            delivered.value()
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits anything
                self._loop.call_soon_threadsafe(self._is_lost, error)

    async def _watch_over(self) -> None:
        try:
            await self._here.get_future()
        except dtorch_ops.BrokenPromiseError as error:
            self._is_lost(error)

    def _is_lost(self, why: Exception) -> None:
        if self.is_alive():
            print(f"noticed:  {self.name} is lost: {str(why).splitlines()[0]}", flush=True)
            self._ended()

    async def _end(self) -> None:
        assert self._cut is not None
        environment = os.environ | {"WORKER": self.name, "WORKER_PID": str(self._pid)}
        shell = await asyncio.create_subprocess_shell(self._cut, env=environment)
        print(f"cut off:  {self.name}, exit code {await shell.wait()}", flush=True)
