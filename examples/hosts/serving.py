"""What runs on the hosts of workers: jobs come by RPC, and leave as promises that are fulfilled."""

from __future__ import annotations

import os
import queue
from typing import Any

from pool.worker import work

import dtorch_ops


class Inbox:
    """What was put into it, in that order. Thread-safe, as RPC calls in threads of its own."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, item: object) -> None:
        self._items.put(item)

    def close(self) -> None:
        self._items.put(None)

    def poll(self) -> bool:
        return not self._items.empty()

    def recv(self) -> Any:
        if (item := self._items.get()) is None:
            self._items.put(None)
            raise EOFError
        return item


# Of the process, since what RPC calls is a function of a module.
inbox = Inbox()


# ---- What the controller calls -------------------------------------------------------------------


def join(here: dtorch_ops.VoidPromise, mode: str) -> tuple[int, dtorch_ops.VoidPromise]:
    """The first call.

    Args:
        here: held as long as this process lives, and never fulfilled: when it breaks, the
            controller knows that this worker is lost.
        mode: of the promise that is returned.

    Returns:
        This process's id, and a promise that is the same for us: the controller holds it, and
        fulfils it when there are no more jobs.
    """
    no_more = dtorch_ops.VoidPromise(mode=mode)
    future = no_more.get_future()
    future.add_done_callback(lambda _: inbox.close())
    inbox.put((here, future))
    return os.getpid(), no_more


def put(item: object) -> None:
    # The promises in it are unpickled already: from now on they break if this process ends.
    inbox.put(item)


# --------------------------------------------------------------------------------------------------


def serve() -> None:
    """Do jobs until the controller has no more.

    Raises:
        BrokenPromiseError: the controller is lost.
    """
    here, no_more = inbox.recv()
    try:
        network, images, ready = inbox.recv()
        work(inbox, network, images, ready)
    except EOFError:
        pass
    no_more.get()
    del here
