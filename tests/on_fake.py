"""Tests of the plugin on the fake accelerator: what they share.

``@on_fake`` runs a test's body in a process of its own, where the fake is installed and everything
below is there by name. A body decides by events: it holds a stream, looks, lets the stream do one
task, and looks again.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import signal
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fake_accelerator as fake
import fresh
import torch
from fake_accelerator import _build
from futures import READ_ONLY, WAITS, awaited, blocked_in
from helpers import Worker
from torch import Tensor
from torch.futures import Future

import dtorch_ops

__all__ = [
    "LIMIT",
    "LIMIT_MS",
    "READ_ONLY",
    "READ_WAYS",
    "WAIT_WAYS",
    "Child",
    "Worker",
    "assert_pending",
    "blocked_in",
    "capture_refusals",
    "compiled",
    "current_stream",
    "error_of",
    "everything_held",
    "forked",
    "fulfilling",
    "new_streams",
    "on_fake",
    "our_threads",
    "pending",
    "pinned",
    "promise_refusals",
    "run_all",
    "streams_of",
    "until",
    "value_of",
]

#: After so many seconds a test that should long have gone on says that it hangs.
LIMIT = 10
LIMIT_MS = LIMIT * 1000

#: For scripts that import dtorch_ops themselves, at a time of their choice.
BARE_PRELUDE = """
from __future__ import annotations
import os, signal, sys, threading
sys.path.insert(0, "tests")
import torch
import fake_accelerator as fake
fake.install()
"""

_PRELUDE = (
    BARE_PRELUDE
    + """
import asyncio, gc, pickle, random, subprocess, time, warnings
import dtorch_ops
from on_fake import *
"""
)


def on_fake(
    *, timeout: float = 30, runs: int = 1, prelude: str = _PRELUDE
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the body of the test runs in a process of its own, with the fake installed.

    Of its module it sees nothing. Its arguments, which pytest's parametrize gives, must be
    literals. A hang, an exit code or any output on stderr fails the test, and so does an exit that
    takes too long.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: object) -> None:
            _build.built()  # now, rather than against the time limit
            lines, first = inspect.getsourcelines(test)
            start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
            # In its own line, so that a traceback shows it.
            body = "\n" * (first - 1 + start) + textwrap.dedent("".join(lines[start:]))
            file = inspect.getsourcefile(test)
            fresh.check(
                f"exec(compile({body!r}, {file!r}, 'exec'))\n{test.__name__}(**{arguments!r})\n",
                prelude=prelude,
                timeout=timeout,
                runs=runs,
            )

        return run

    return decorate


# ---- TorchScript --------------------------------------------------------------------------------
# Compiled by the tests that use them: TorchScript wants the source in a file.


def script_wait(f: Future[Tensor]) -> Tensor:
    return torch.jit.wait(f)


def script_wait_for(f: Future[Tensor], timeout_ms: int) -> Tensor:
    return torch.ops.dtorch.wait_for(f, timeout_ms)


def script_wait_all(fs: list[Future[Tensor]]) -> list[Tensor]:
    return torch.futures.wait_all(fs)


def script_is_ready(f: Future[Tensor]) -> bool:
    return torch.ops.dtorch.is_ready(f)


def script_fetch(x: Tensor) -> Tensor:
    return torch.jit.wait(torch.ops.dtorch.get_tensor_async(x))


def script_start(x: Tensor) -> Future[Tensor]:
    return torch.ops.dtorch.get_tensor_async(x)


def script_fetch_to(x: Tensor, device: str) -> Tensor:
    return torch.jit.wait(torch.ops.dtorch.get_tensor_async(x, device=torch.device(device)))


def script_fulfil(x: Tensor, promise: torch.classes.dtorch.TensorPromise) -> None:
    torch.ops.dtorch.get_tensor(x, promise)


def script_sync(device: str) -> None:
    torch.jit.wait(torch.ops.dtorch.sync([torch.device(device)]))


def script_sync_promise(promise: torch.classes.dtorch.VoidPromise) -> None:
    torch.ops.dtorch.sync(promise)


def compiled(name: str) -> Callable[..., Any]:
    """``script_<name>`` in TorchScript, which is being retired and says so at every turn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(globals()[f"script_{name}"])  # type: ignore[no-any-return]


# ---- Ways to get at a value ---------------------------------------------------------------------


def _in_then(future: Any) -> Any:
    read: list[Any] = []
    future.then(lambda f: read.append(f.value())).wait()
    return read[0]


def _after_callback(future: Any) -> Any:
    called, read = threading.Event(), []
    future.add_done_callback(lambda f: (read.append(f.value()), called.set()))
    assert called.wait(LIMIT)
    return read[0]


def _in_loop(coroutine: Any) -> Any:
    # Not asyncio.run: Python 3.11's looks at the repr of the task, which reads the tensor.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


async def _as_completed(future: Any) -> Any:
    async for done in dtorch_ops.as_completed([future]):
        return done.value()


async def _gathered(future: Any) -> Any:
    return (await asyncio.gather(future))[0]


#: Every way to wait for the value of a pending future and to have it. They read nothing of it.
WAIT_WAYS: dict[str, Callable[[Any], Any]] = {
    **WAITS,
    "await": lambda f: _in_loop(awaited(f)),
    "wait without a limit": lambda f: f.wait(),
    "then": _in_then,
    "callback": _after_callback,
    "await in gather": lambda f: _in_loop(_gathered(f)),
    "async as_completed": lambda f: _in_loop(_as_completed(f)),
    "collect_all": lambda f: dtorch_ops.collect_all([f]).get()[0].value(),
    "wait_all operator": lambda f: torch.ops.dtorch.wait_all([f])[0],
    "collect_all operator": lambda f: torch.ops.dtorch.collect_all([f]).wait()[0].wait(),
    "collect_any operator": lambda f: torch.ops.dtorch.collect_any([f]).wait(),
    "torch wait_all": lambda f: torch.futures.wait_all([f])[0],
    "torch collect_all": lambda f: torch.futures.collect_all([f]).wait()[0].wait(),
    "new handle": lambda f: dtorch_ops.Future(f).get(),
    "script wait": lambda f: compiled("wait")(f),
    "script wait_for": lambda f: compiled("wait_for")(f, 60_000),
    "script wait_all": lambda f: compiled("wait_all")([f])[0],
}

#: Every way to read a complete future, again and again.
READ_WAYS: dict[str, Callable[[Any], Any]] = {
    **READ_ONLY,
    "script wait": lambda f: compiled("wait")(f),
}


def value_of(future: Any) -> Any:
    """Its value or error, within the limit of a test; consumes nothing."""
    return dtorch_ops.Future(future).wait(LIMIT_MS)


def assert_pending(*futures: Any) -> None:
    """No way of looking at them that does not block shows a value."""
    for future in futures:
        handle = future if hasattr(future, "is_ready") else dtorch_ops.Future(future)
        called: list[object] = []
        future.add_done_callback(called.append)
        assert not handle.is_ready() and not handle.done() and not future.done()
        assert not torch.ops.dtorch.is_ready(future)
        for look in (
            lambda handle=handle: handle.wait(0),
            lambda future=future: torch.ops.dtorch.wait_for(future, 0),
            lambda future=future: dtorch_ops.wait_all([future], 0),
            lambda future=future: next(dtorch_ops.as_completed([future], 0)),
        ):
            assert isinstance(error_of(look), TimeoutError)
        assert isinstance(error_of(handle.value), dtorch_ops.DTorchError)
        assert called == []


def error_of(call: Callable[[], object]) -> BaseException:
    """The error that the call raises."""
    try:
        result = call()
    except Exception as error:
        return error
    raise AssertionError(f"expected an error, got {result!r}")


# ---- Streams ------------------------------------------------------------------------------------


def current_stream(device: str | torch.device = "fake:0") -> torch.Stream:
    return torch.accelerator.current_stream(device)


def new_streams(count: int, device: str = "fake:0") -> list[torch.Stream]:
    return [torch.Stream(device) for _ in range(count)]


_POOL = range(1, 65)  # ids of a device's pool, from which internal streams may come


def streams_of(*devices: int) -> list[torch.Stream]:
    """Every stream of the devices that may ever be used but the default ones."""
    kind = torch.Stream("fake:0").device_type
    named = [name.removeprefix("fake:").split("/") for name in fake.streams_in_use()]
    ids = {(device, number) for device in devices for number in _POOL}
    ids |= {(int(d), int(n)) for d, n in named if int(d) in devices and int(n) != 0}
    return [
        torch.Stream(stream_id=number, device_index=device, device_type=kind)
        for device, number in sorted(ids)
    ]


@contextmanager
def everything_held(*devices: int) -> Iterator[list[torch.Stream]]:
    """Every stream of the devices is held; gives those that are no device's default one.

    A test of copies cannot know on which streams they run.
    """
    others = streams_of(*devices)
    defaults = [f"fake:{device}" for device in devices]
    with fake.held(*defaults, *others):
        yield others


def run_all(stream: fake.StreamLike) -> None:
    """Let a held stream do what it can: until it is empty, or waits for another stream."""
    while fake.step(stream) is not None:
        pass


def pinned(*size: int, value: float = 0.0) -> Tensor:
    return torch.empty(*size, pin_memory=True).fill_(value)


# ---- The process --------------------------------------------------------------------------------


def our_threads() -> list[int]:
    """The native threads of the library that live now."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue  # it has just ended
        if name == "dtorch_ops":
            found.append(int(task.name))
    return found


def until(condition: Callable[[], object], seconds: float = LIMIT) -> None:
    """For what nothing tells of: that memory has come back, that a thread has ended."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it does not come true"
        time.sleep(0.002)


class Child:
    """A forked child that runs a function of a connection to its parent."""

    def __init__(self, function: Callable[[Connection], None], leave: Callable[[int], Any]) -> None:
        self.link, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's own, of any fork beside threads
            self.pid = os.fork()
        if self.pid == 0:
            self.link.close()
            signal.alarm(LIMIT)
            code = 1
            try:
                function(theirs)
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            leave(code)
        theirs.close()

    def say(self, data: object = None) -> None:
        self.link.send(data)

    def hear(self) -> Any:
        assert self.link.poll(LIMIT), "the child says nothing"
        return self.link.recv()

    def end(self, expected: int = 0) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert code == expected, f"the child ended with {code}"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.end(-signal.SIGKILL)


def forked(function: Callable[[Connection], None], leave: Callable[[int], Any] = os._exit) -> Child:
    """Run ``function(link)`` in a child, which must end within the limit."""
    return Child(function, leave)


# ---- Promises -----------------------------------------------------------------------------------


def pending(mode: str = "auto", cls: Any = dtorch_ops.TensorPromise) -> tuple[Any, Any]:
    """A promise and its future."""
    promise = cls(mode)
    return promise, promise.get_future()


def fulfilling(how: str) -> Callable[[Tensor, Any], object]:
    """A way to fulfil a promise with a tensor: "operator", "set_value" or "script"."""
    if how == "script":
        return compiled("fulfil")
    if how == "operator":
        return torch.ops.dtorch.get_tensor  # type: ignore[no-any-return]
    return lambda tensor, promise: promise.set_value(tensor)


# ---- Capture ------------------------------------------------------------------------------------


def capture_refusals(device: str = "fake:0") -> dict[str, Callable[[], object]]:
    """Every call that a graph capture on the current stream of ``device`` forbids."""
    tensor = torch.ones(3, device=device)
    host = torch.ones(3)
    ops = torch.ops.dtorch
    return {
        "to_torch_async": lambda: dtorch_ops.to_torch_async(tensor),
        "method": lambda: tensor.to_torch_async(),  # type: ignore[attr-defined]
        "to_torch": lambda: dtorch_ops.to_torch(tensor),
        "copy": lambda: dtorch_ops.to_torch_async(tensor, copy=True),
        "to the CPU": lambda: dtorch_ops.to_torch_async(tensor, device="cpu"),
        "to another": lambda: dtorch_ops.to_torch_async(tensor, device="fake:3"),
        "from the CPU": lambda: dtorch_ops.to_torch_async(host, device=device),
        "operator": lambda: ops.get_tensor_async(tensor),
        "sync_future": lambda: dtorch_ops.sync_future(device),
        "sync_future of all": lambda: dtorch_ops.sync_future(),
        "sync": lambda: dtorch_ops.sync([device]),
        "sync operator": lambda: ops.sync([torch.device(device)]),
    }


def promise_refusals(device: str = "fake:0") -> dict[str, tuple[Any, Callable[[Any], object]]]:
    """The same of those that fulfil a promise: one, and the call with it."""
    tensor = torch.ones(3, device=device)
    ops = torch.ops.dtorch
    return {
        "get_tensor": (dtorch_ops.TensorPromise(), lambda p: ops.get_tensor(tensor, p)),
        "set_value": (dtorch_ops.TensorPromise(), lambda p: p.set_value(tensor)),
        "sync": (dtorch_ops.VoidPromise(), lambda p: ops.sync(p)),
        "sync of devices": (dtorch_ops.VoidPromise(), lambda p: ops.sync([tensor.device], p)),
    }
