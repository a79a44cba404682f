"""Tests of the plugin on an accelerator: what they share.

``@on_accelerator()`` runs a test's body in a process of its own, where all of :data:`__all__` is
there by name. A body decides by events: it holds a stream, looks, lets it go on, and looks again.
It names devices by ``DEVICE`` and ``DEVICES``, and steers them by the names of ``accelerators/``:
so it runs on the fake accelerator, which is the default, and with ``TEST_ACCELERATOR=cuda`` on
CUDA. ``@on_fake`` and ``@on_cuda`` are for what only one of them can show, and say what that is.
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
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import accelerators
import fresh
import torch
from accelerators import (
    DEVICE,
    DEVICES,
    all_streams,
    assert_queue,
    capturing,
    do_work,
    drain,
    has_context,
    held,
    hold,
    is_initialized,
    is_untouched,
    keep_busy,
    limit_memory,
    live_blocks,
    nobody_synchronises,
    reach_event,
    release,
    run_all,
    until_waiting,
)
from futures import READ_ONLY, WAITS, awaited, blocked_in
from helpers import Worker, until
from torch import Tensor
from torch.futures import Future

import dtorch_ops

__all__ = [
    "BARE_PRELUDE",
    "CAPTURES",
    "COUNTS",
    "CPU_TIME",
    "DELAYS",
    "DEPTH",
    "DEVICE",
    "DEVICES",
    "FAULTS",
    "LIMIT",
    "LIMIT_MS",
    "MANY_STREAMS",
    "MEMORY",
    "PRELUDE",
    "READ_ONLY",
    "READ_WAYS",
    "WAIT_WAYS",
    "Child",
    "Worker",
    "all_streams",
    "assert_pending",
    "assert_queue",
    "blocked_in",
    "capture_refusals",
    "capturing",
    "compiled",
    "current_stream",
    "do_work",
    "drain",
    "error_of",
    "everything_held",
    "forked",
    "fulfilling",
    "has_context",
    "held",
    "hold",
    "is_initialized",
    "is_untouched",
    "keep_busy",
    "limit_memory",
    "live_blocks",
    "new_streams",
    "nobody_synchronises",
    "on_accelerator",
    "on_cuda",
    "on_fake",
    "our_threads",
    "pending",
    "pinned",
    "promise_refusals",
    "reach_event",
    "release",
    "run_all",
    "until",
    "until_waiting",
    "value_of",
]

#: After so many seconds a test that should long have gone on says that it hangs.
LIMIT = 10
LIMIT_MS = LIMIT * 1000

#: What the fake can do, and CUDA cannot: why a test is ``@on_fake``.
DELAYS = "events fire late, or never"
FAULTS = "the device fails when told to"
COUNTS = "calls of the driver are counted"
MEMORY = "pinned memory is counted, or there is none"
CAPTURES = "a default stream is captured; CUDA's captures are in gpu/"
#: Streams share the hardware's queues, so that a stuck one may hold up another.
MANY_STREAMS = "streams are stuck beside more than CUDA has queues for"
#: A call then blocks, until the stream goes on.
DEPTH = "more is queued behind a stuck stream than CUDA may take; see gpu/test_gpu_caller.py"
CPU_TIME = "it counts how often threads are woken; CUDA's is in gpu/"

#: For scripts that import dtorch_ops themselves, at a time of their choice.
BARE_PRELUDE = """
from __future__ import annotations
import os, signal, sys, threading
sys.path.insert(0, "tests")
import torch
import accelerators
from accelerators import *
install()
"""

PRELUDE = (
    BARE_PRELUDE
    + """
import asyncio, collections, gc, pickle, queue, random, subprocess, time, warnings
import dtorch_ops
from on_accelerator import *
if accelerators.NAME == "fake":
    import fake_accelerator as fake
"""
)


def on_accelerator(
    *,
    devices: int = 1,
    timeout: float = 30,
    runs: int = 1,
    prelude: str = PRELUDE,
    only: tuple[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the body of the test runs in a process of its own, on the accelerator.

    Of its module it sees nothing. Its arguments, which pytest's parametrize gives, must be
    literals. A hang, an exit code or any output on stderr fails the test, and so does an exit that
    takes too long.

    Args:
        devices: how many of them it uses. Arguments that are ``"here"`` or ``"there"`` become the
            first device, or another one, which takes two.
        timeout: in seconds, on the fake.
        runs: so often it runs.
        prelude: what is run before the body.
        only: the one accelerator that can show it, and why.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: object) -> None:
            import pytest  # here: the processes of the tests do without

            if only and only[0] != accelerators.NAME:
                pytest.skip(f"{only[0]} alone can show it: {only[1]}")
            if (there := accelerators.device_count()) == 0:
                pytest.skip(f"there is no device {accelerators.DEVICE}")
            if (needed := max(devices, 1 + ("there" in arguments.values()))) > there:
                pytest.skip(f"it takes {needed} devices, there is {there}")
            here = {"here": DEVICES[0], "there": DEVICES[-1]}
            arguments = {name: here.get(str(value), value) for name, value in arguments.items()}
            accelerators.prepare()  # now, rather than against the time limit
            lines, first = inspect.getsourcelines(test)
            start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
            # In its own line, so that a traceback shows it.
            body = "\n" * (first - 1 + start) + textwrap.dedent("".join(lines[start:]))
            file = inspect.getsourcefile(test)
            fresh.check(
                f"exec(compile({body!r}, {file!r}, 'exec'))\n{test.__name__}(**{arguments!r})\n",
                prelude=prelude,
                timeout=timeout * accelerators.PATIENCE,
                runs=runs,
            )

        return run

    return decorate


def on_fake(why: str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same, of what only the fake can show. ``fake_accelerator`` is there, as ``fake``."""
    return on_accelerator(only=("fake", why), **options)


def on_cuda(why: str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same, of what only CUDA can show."""
    return on_accelerator(only=("cuda", why), **options)


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


def script_fetch_all(xs: list[Tensor], device: str) -> list[Tensor]:
    return torch.jit.wait(torch.ops.dtorch.get_tensors_async(xs, device=torch.device(device)))


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


def current_stream(device: str | torch.device = DEVICES[0]) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def new_streams(count: int, device: str = DEVICES[0]) -> list[torch.Stream]:
    return [torch.Stream(device) for _ in range(count)]


@contextmanager
def everything_held(*indices: int) -> Iterator[list[torch.Stream]]:
    """Every stream of those of the devices that there are; gives those that are no default ones.

    A test of copies cannot know on which streams they run.
    """
    indices = tuple(index for index in indices if index < len(DEVICES))
    others = all_streams(*indices)
    defaults = [DEVICES[index] for index in indices]
    with held(*defaults, *others):
        yield others


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


def capture_refusals(device: str = DEVICES[0]) -> dict[str, Callable[[], object]]:
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
        "to another": lambda: dtorch_ops.to_torch_async(tensor, device=DEVICES[-1]),
        "from the CPU": lambda: dtorch_ops.to_torch_async(host, device=device),
        "operator": lambda: ops.get_tensor_async(tensor),
        "tree": lambda: dtorch_ops.to_torch_async([host, tensor]),
        "tree to the CPU": lambda: dtorch_ops.to_torch_async([host, tensor], device="cpu"),
        "tree from the CPU": lambda: dtorch_ops.to_torch_async([host], device=device),
        "sync_future": lambda: dtorch_ops.sync_future(device),
        "sync_future of all": lambda: dtorch_ops.sync_future(),
        "sync": lambda: dtorch_ops.sync([device]),
        "sync operator": lambda: ops.sync([torch.device(device)]),
    }


def promise_refusals(device: str = DEVICES[0]) -> dict[str, tuple[Any, Callable[[Any], object]]]:
    """The same of those that fulfil a promise: one, and the call with it."""
    tensor = torch.ones(3, device=device)
    ops = torch.ops.dtorch
    return {
        "get_tensor": (dtorch_ops.TensorPromise(), lambda p: ops.get_tensor(tensor, p)),
        "set_value": (dtorch_ops.TensorPromise(), lambda p: p.set_value(tensor)),
        "sync": (dtorch_ops.VoidPromise(), lambda p: ops.sync(p)),
        "sync of devices": (dtorch_ops.VoidPromise(), lambda p: ops.sync([tensor.device], p)),
    }
