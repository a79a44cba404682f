"""What producers do with a promise that they were given, wherever they run."""

from __future__ import annotations

import builtins
import concurrent.futures
import ctypes
import logging
import os
import pickle
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import tensor_cases
import torch

import dtorch_ops

Promise = dtorch_ops.TensorPromise


# ---- Values -------------------------------------------------------------------------------------


def set_full(promise: Promise, value: float, size: tuple[int, ...] = (3,)) -> None:
    promise.set_value(torch.full(size, value))


def set_tensor(promise: Promise, value: torch.Tensor) -> None:
    promise.set_value(value)


def set_many(promises: list[Promise], first: float = 0.0) -> None:
    for index, promise in enumerate(promises):
        promise.set_value(torch.tensor(first + index))


def set_twice(promise: Any) -> str:
    """What the second says."""
    values = () if isinstance(promise, dtorch_ops.VoidPromise) else (torch.ones(1),)
    promise.set_value(*values)
    assert not promise.is_pending()
    try:
        promise.set_value(*values)
    except dtorch_ops.PromiseAlreadySatisfiedError:
        pass
    try:
        promise.set_exception(KeyError("late"))
    except dtorch_ops.DTorchError as error:
        return type(error).__name__
    return "none"


def set_through_operator(promise: Promise) -> None:
    torch.ops.dtorch.get_tensor(torch.arange(4.0), promise)


def set_in_a_script(promise: Promise, value: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(_fulfil)
    scripted(torch.full((2,), value), promise)


def _fulfil(x: torch.Tensor, promise: torch.classes.dtorch.TensorPromise) -> None:
    torch.ops.dtorch.get_tensor(x + 1, promise)


def lend_in_a_script(promise: Promise) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(_lend_and_fulfil)
    scripted(promise)


def _lend_and_fulfil(promise: torch.classes.dtorch.TensorPromise) -> None:
    t = promise.empty([1000], torch.float64)
    t.fill_(2.0)
    promise.set_value(t)


def set_void(promise: dtorch_ops.VoidPromise) -> None:
    promise.set_value()


def sync_void(promise: dtorch_ops.VoidPromise) -> None:
    torch.ops.dtorch.sync(promise)


def error_of_set(promise: Promise) -> str:
    """The type and text of the error that setting it raises; "none" if it does not."""
    try:
        promise.set_value(torch.zeros(1))
    except dtorch_ops.DTorchError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def set_on_accelerator(
    promises: list[Promise], first: float, size: int, strided: bool = False
) -> None:
    """Each with a value that the device is still computing, of the accelerator that tests run on.

    Not forked: this process has its own. ``strided``: every second element of a larger tensor.
    """
    import accelerators

    accelerators.install()
    for index, promise in enumerate(promises):
        tensor = torch.zeros(2 * size, device=accelerators.DEVICES[-1])
        tensor = tensor[1::2] if strided else tensor[:size]
        accelerators.keep_busy(5)
        promise.set_value(tensor.fill_(first + index))
        tensor.fill_(-1)  # later, and not seen
        del tensor


def set_on_a_stuck_stream(promise: Promise, ready: str | None = None) -> None:
    """Stays until it is killed. Opens the named pipe ``ready`` when it has reserved the promise."""
    import accelerators

    accelerators.install()
    tensor = torch.zeros(3, device=accelerators.DEVICE)
    accelerators.hold(accelerators.DEVICE)
    promise.set_value(tensor.add_(1))
    if ready is not None:
        with open(ready, "w"):
            pass
    threading.Event().wait()


# ---- Ends without a value -----------------------------------------------------------------------


def drop(promise: Any) -> None:
    assert promise.is_pending()


def raise_with(promise: Any) -> None:
    assert promise.is_pending()
    raise KeyError("of the producer")


def leave(promise: Any) -> None:
    assert promise.is_pending()
    os._exit(0)


def kill_itself(promise: Any) -> None:
    assert promise.is_pending()
    os.kill(os.getpid(), signal.SIGKILL)


# ---- Errors -------------------------------------------------------------------------------------


class TwoArguments(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.first = first


def _local_class() -> BaseException:
    class Local(Exception):
        pass

    return Local("of a function")


def _with_a_lock() -> BaseException:
    error = ValueError("holds a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    return error


def _lock_in_args() -> BaseException:
    return ValueError("in args", threading.Lock())


def _group() -> BaseException:
    return ExceptionGroup("group", [KeyError("first"), OSError(2, "second")])  # noqa: F821


#: Exceptions that are made where they are set.
ERRORS: dict[str, Callable[[], BaseException]] = {
    "key": lambda: KeyError("k", 3),
    "value": lambda: ValueError("v"),
    "os": lambda: FileNotFoundError(2, "no such file", "name"),
    "timeout": lambda: TimeoutError("of the producer"),
    "unicode": lambda: ValueError("\N{SNOWMAN} \x00 \udc80 end"),
    "no message": lambda: RuntimeError(),
    "torch": lambda: torch.OutOfMemoryError("too large"),
    "ours": lambda: dtorch_ops.BrokenPromiseError("further on"),
    "two arguments": lambda: TwoArguments(1, 2),
    "local": _local_class,
    "unknown": lambda: type("OnlyHere", (Exception,), {"__module__": "only_here"})("u"),
    "with a lock": _with_a_lock,
    "lock in args": _lock_in_args,
    "large": lambda: ValueError("x" * 10_000_000),
    "stop": lambda: StopIteration(3),
    "exit": lambda: SystemExit(4),
    "interrupt": lambda: KeyboardInterrupt(),
    "cancelled": lambda: concurrent.futures.CancelledError(),
    "group": _group,
}


#: What the constructor of a builtin exception wants, where a text and a number will not do.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("SyntaxError", "IndentationError", "TabError"), ("a text",)),
    "UnicodeEncodeError": ("ascii", "\u00e9", 0, 1, "not ascii"),
    "UnicodeTranslateError": ("\u00e9", 0, 1, "not here"),
    "BaseExceptionGroup": ("group", [KeyboardInterrupt("k")]),
    "ExceptionGroup": ("group", [ValueError("v", 1), OSError(2, "o")]),
}


def builtin_errors() -> dict[str, BaseException]:
    """One of each exception type that Python has built in."""
    types = [
        each
        for each in vars(builtins).values()
        if isinstance(each, type) and issubclass(each, BaseException)
    ]
    types.remove(UnicodeDecodeError)  # of bytes: below
    return {t.__name__: t(*_ARGUMENTS.get(t.__name__, ("a text", 7))) for t in types}


def nested_errors() -> dict[str, BaseException]:
    """Builtin ones whose arguments are Python's own values, and more than texts and numbers."""
    location = ("file.py", 3, 7, "a b\n", 3, 8)
    return {
        "tuple": KeyError((1, "two")),
        "tuple in a list": ValueError([(1, 2)]),
        "bytes": KeyError(b"\xff"),
        "complex": ValueError(1j),
        "UnicodeDecodeError": UnicodeDecodeError("utf-8", b"\xff\x00", 0, 1, "invalid"),
        "SyntaxError": SyntaxError("wrong", location),
    }


_TORCH_ERRORS = {
    torch: "AcceleratorError FatalError OutOfMemoryError",
    torch.linalg: "LinAlgError",
    torch.jit: "Error",
    torch.distributed: "DistBackendError DistError DistNetworkError DistStoreError",
}


def torch_errors() -> dict[str, BaseException]:
    """One of each that torch raises, where this torch has it."""
    types = [
        getattr(place, name)
        for place, names in _TORCH_ERRORS.items()
        for name in names.split()
        if hasattr(place, name)
    ]
    return {f"{t.__module__}.{t.__qualname__}": t("a text") for t in types}


ERROR_GROUPS = {"builtin": builtin_errors, "nested": nested_errors, "torch": torch_errors}


def set_errors(promises: dict[str, Any], group: str) -> None:
    errors = ERROR_GROUPS[group]()
    for name, promise in promises.items():
        promise.set_exception(errors[name])


def set_error(promise: Any, kind: str) -> None:
    try:
        raise ERRORS[kind]()
    except BaseException as error:
        promise.set_exception(error)


# ---- Held from one call to the next -------------------------------------------------------------

_held: list[Any] = []


def hold(*promises: Any) -> None:
    _held.extend(promises)


def release() -> None:
    _held.clear()


def set_held() -> str:
    """Which error ended it."""
    try:
        for index, promise in enumerate(_held):
            promise.set_value(torch.tensor(float(index)))
    except dtorch_ops.DTorchError as error:
        return type(error).__name__
    return "none"


def error_of_setting_held() -> str:
    return error_of_set(_held[0])


def dump_held() -> bytes:
    return pickle.dumps(_held[0])


def load_and_set(data: bytes, value: float) -> None:
    pickle.loads(data).set_value(torch.tensor(value))


# ---- Kinds of tensors ---------------------------------------------------------------------------


def set_case(promise: Promise, name: str) -> None:
    promise.set_value(tensor_cases.cases()[name])


def error_of_unsendable(promise: Promise, kind: str) -> str:
    """What the refusal said. The owner is told the same, so the promise is used up."""
    said = "none"
    try:
        promise.set_value(tensor_cases.unsendable(kind))
    except TypeError as error:
        said = str(error)
    try:
        promise.set_value(torch.tensor(1.0))
    except dtorch_ops.PromiseAlreadySatisfiedError:
        return said
    return "it can still be set"


def set_then_overwrite(promise: Promise, size: int) -> None:
    value = torch.ones(size)
    promise.set_value(value)
    value.zero_()


# ---- Told when ----------------------------------------------------------------------------------


def set_when_told(promise: Promise, ready: str, go: str) -> str:
    """Says through one named pipe that it has the promise, and waits for the other to open."""
    assert promise.is_pending()
    with open(ready, "w"):
        pass
    with open(go):
        pass
    return error_of_set(promise)


def errors_of_get_future(promise: Any) -> list[str]:
    said = []
    for get_future in (promise.get_future, lambda: torch.ops.dtorch.get_future(promise)):
        try:
            get_future()
            said.append("none")
        except dtorch_ops.DTorchError as error:
            said.append(str(error))
    return said


def error_of_cancel(promise: Any) -> str:
    try:
        promise.cancel()
    except dtorch_ops.DTorchError as error:
        return str(error)
    return "none"


def set_first_drop_second(first: Promise, second: Promise) -> None:
    assert second.is_pending()
    first.set_value(torch.tensor(1.0))


def error_of_token(token: str) -> str:
    try:
        Promise.from_token(token)
    except dtorch_ops.DTorchError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


# ---- Other machines -----------------------------------------------------------------------------


def set_after_holding_the_lock(promise: Promise, milliseconds: int) -> None:
    """Without giving Python's lock away meanwhile, as a slow extension does."""
    ctypes.PyDLL(None).usleep(milliseconds * 1000)
    promise.set_value(torch.tensor(1.0))


def time_of_setting(promise: Promise) -> float:
    """On the monotonic clock, when it had been acknowledged."""
    promise.set_value(torch.tensor(1.0))
    return time.monotonic()


def refusals(token: str) -> str:
    """What making a promise of a token says here."""
    try:
        Promise.from_token(token)
    except dtorch_ops.DTorchError as error:
        return str(error)
    return "none"


def attached() -> int:
    """Processes whose shared memory this one has attached itself to."""
    return dtorch_ops.stats()["consumers"]


def all_reduce_while_setting(
    promises: list[Promise], rank: int, groups: list[tuple[int, int]]
) -> list[float]:
    """Sums of collectives of the user's default group, which run beside the promises.

    One such group after the other: its port, and how many are in it.
    """
    setter = threading.Thread(target=set_many, args=(promises,))
    setter.start()
    sums = []
    for port, size in groups:
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
        )
        for index in range(50):
            value = torch.tensor(float(index + rank))
            torch.distributed.all_reduce(value)
            sums.append(value.item())
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    setter.join()
    return sums


def port_of_network() -> int:
    """On which this process hears of promises."""
    return int(Promise("network").token().rpartition(":")[2])


def make_promises(count: int) -> bytes:
    """Of this process; await_made() tells what becomes of them."""
    global _made
    promises = [Promise() for _ in range(count)]
    _made = [promise.get_future() for promise in promises]
    return pickle.dumps(promises)


_made: list[Any] = []


def values_of_made() -> list[float]:
    return [future.wait(30_000).item() for future in _made]


def error_in_forked_child(promise: Promise) -> str:
    """What it says in a child that was forked from a process with RPC."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, error_of_set(promise).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as said:
        return said.read()


def hold_the_lock(milliseconds: int) -> float:
    """Python's. When it was given back, on the monotonic clock."""
    ctypes.PyDLL(None).usleep(milliseconds * 1000)
    return time.monotonic()


def error_of_set_token(token: str) -> str:
    return error_of_set(Promise.from_token(token))


def load_and_hold(data: bytes) -> None:
    _held.extend(pickle.loads(data))


def set_full_for_ever(promise: Promise, size: tuple[int, ...]) -> None:
    """The promise, and then promises of this process's own, over and over: there is always one."""
    value = torch.ones(size)
    promise.set_value(value)
    while True:
        value.add_(1)


def shut_down() -> str:
    """Of RPC, once all have called it; and what the first of made promises says."""
    dtorch_ops.network.shutdown()
    return error_of_made() if _made else ""


def join_again(rank: int, port: int, maps_devices: bool = False) -> None:
    """``maps_devices``: to worker0, of the accelerator that tests run on."""
    import network_group

    options = {}
    if maps_devices:
        options["device_maps"] = {"worker0": _device_map()}
    network_group.join(f"worker{rank}", rank, 2, port, **options)


def know_the_accelerator() -> None:
    """Both have to, where one maps its devices to the other's."""
    _device_map()


def _device_map() -> dict[torch.device, torch.device]:
    import accelerators
    from torch.distributed.rpc import backend_registry, options

    accelerators.install()
    device = torch.device(accelerators.DEVICES[-1])
    if device.type == "cuda":
        return {device: device}
    # In Python RPC refuses all devices but CUDA's. Those of another process are CUDA's or its CPU.
    options._to_device = torch.device
    backend_registry._tensorpipe_validate_devices = lambda *_: True
    return {device: torch.device("cpu")}


def set_held_on_accelerator(first: float, size: int, strided: bool = False) -> None:
    set_on_accelerator(_held, first, size, strided)


_said: queue.SimpleQueue[str] = queue.SimpleQueue()


def listen_to_log() -> None:
    """From now on, for await_log()."""
    handler = logging.Handler()
    handler.emit = lambda record: _said.put(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dtorch_ops")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)


def await_log(expected: str, times: int = 1) -> None:
    """Until that was logged so often."""
    for _ in range(times):
        while expected not in _said.get(timeout=30):
            pass


def error_of_interrupted_set(kind: str) -> str:
    """What ends the setting of a held promise when this process is interrupted as it waits.

    ``kind``: a "small" or a "large" value, or one "on an accelerator". It is overwritten then.
    """

    def interrupt() -> None:
        asleep = 0
        while asleep < 5:  # in its wait: the interpreter lock it has got meanwhile
            time.sleep(0.01)
            with open(f"/proc/self/task/{os.getpid()}/stat") as stat:
                asleep = asleep + 1 if stat.read().rpartition(")")[2].split()[0] == "S" else 0
        os.kill(os.getpid(), signal.SIGINT)

    value = torch.full((1 << 24 if kind == "large" else 3,), 2.0)
    if kind == "on an accelerator":
        import accelerators

        accelerators.install()
        value = value.to(accelerators.DEVICE)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        _held[0].set_value(value)
    except BaseException as error:
        return type(error).__name__
    finally:
        value.zero_()
        thread.join()
    return "none"


def make_promise_named(name: str) -> bytes:
    """Of this process, which is called so: for a process that is to reach it through RPC alone."""
    return make_promises(1).replace(b"@" + name.encode(), b"=" + name.encode())


def from_token_of_a_group(token: str) -> None:
    """In a process that is a group of its own: a token is read before anybody is looked for."""
    import network_group

    network_group.join("alone", 0, 1, network_group.free_port())
    Promise.from_token(token)


def shown(promise: Promise) -> str:
    return repr(promise)


def error_of_made() -> str:
    try:
        _made[0].wait(30_000)
    except dtorch_ops.DTorchError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def sum_of_made() -> float:
    return sums_of_made()[0]


def sums_of_made() -> list[float]:
    return [future.wait(30_000).sum().item() for future in _made]


def devices_of_made() -> list[str]:
    return [str(future.wait(30_000).device) for future in _made]


def set_held_full(size: tuple[int, ...]) -> str:
    try:
        _held[0].set_value(torch.ones(size))
    except dtorch_ops.DTorchError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def set_and_ask(pickled: bytes, value: float) -> bool:
    """Whether the owner says, right after the value was set, that it has been."""
    promise = pickle.loads(pickled)
    promise.set_value(torch.tensor(value))
    try:
        promise.set_value(torch.tensor(-1.0))
    except dtorch_ops.PromiseAlreadySatisfiedError:
        return not promise.is_pending()
    return False


def call_at_once(worker: str, count: int) -> tuple[list[float], list[bool]]:
    """RPC's calls of so many functions that fulfil a promise each: what they set, and saw."""
    from torch.distributed import rpc

    promises = [Promise("network") for _ in range(count)]
    futures = [promise.get_future() for promise in promises]
    calls = [
        rpc.rpc_async(worker, set_and_ask, (pickle.dumps(promise), float(index)))
        for index, promise in enumerate(promises)
    ]
    values = [value.item() for value in dtorch_ops.wait_all(futures, timeout_ms=30_000)]
    return values, torch.futures.wait_all(calls)
