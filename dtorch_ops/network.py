"""Promises that are fulfilled on other machines, through ``torch.distributed.rpc``.

Once RPC is initialised, with :func:`init` or with ``torch.distributed.rpc.init_rpc``, a promise of
mode "auto" that is unpickled where shared memory does not reach is fulfilled through RPC; one of
mode "network" always is. docs/network.md says how.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed import rpc

from . import _C

__all__ = ["init", "lost_after", "set_lost_after", "shutdown"]

# How long a worker that leaves waits for what a device was still computing.
_FLUSH_MS = 10_000


def init(
    name: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str = "env://",
    interface: str | None = None,
    lost_after: float | None = None,
    **options: Any,
) -> None:
    """Initialise ``torch.distributed.rpc`` as suits promises; under ``torchrun`` without arguments.

    Thin: what it does is ``rpc.init_rpc`` with TensorPipe over TCP alone. Its transport through
    shared memory keeps cores busy while nothing happens, and promises need none: those of one
    machine have their own. Blocks until all workers have called it, for
    half an hour at most, which is torch's limit.

    Args:
        name: of this worker, by which the others reach it; None is ``worker<rank>``.
        rank: its number from 0; None is the environment's ``RANK``.
        world_size: how many workers there are; None is the environment's ``WORLD_SIZE``.
        init_method: where the workers meet: "env://" (``MASTER_ADDR`` and ``MASTER_PORT``), or
            "tcp://host:port" of rank 0.
        interface: the network interface whose address the others connect to, "eth0", say; it is
            put into the environment's ``TP_SOCKET_IFNAME`` (and ``GLOO_SOCKET_IFNAME``, for the
            start). None is what is there, or else the address of the host's name.
        lost_after: in seconds, as for :func:`set_lost_after`.
        options: of ``rpc.TensorPipeRpcBackendOptions``: ``num_worker_threads``, ``rpc_timeout``
            (in seconds; of the user's own calls, it does not limit promises), ``device_maps``,
            ``devices``.

    Raises:
        ValueError: no rank or world size, or a rank that is not below it; no such interface; an
            ``init_method`` of another form.
        RuntimeError: RPC is initialised already, or the workers do not meet.

    Example:
        >>> dtorch_ops.network.init(  # doctest: +SKIP
        ...     "trainer", rank=0, world_size=2, init_method="tcp://10.0.0.1:29500")
    """
    rank = _number("rank", "RANK", rank)
    world_size = _number("world_size", "WORLD_SIZE", world_size)
    if rpc.api._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        raise RuntimeError(
            "expected torch.distributed.rpc not to be initialised, but it is: promises work with "
            "it as it is, so init() is not needed"
        )
    if not 0 <= rank < world_size:  # RPC would wait for ever
        raise ValueError(
            f"rank: expected 0 to {world_size - 1}, for {world_size} workers, got {rank}"
        )
    if "://" not in init_method:
        raise ValueError(
            f"init_method: expected 'env://' or 'tcp://host:port' of rank 0, got {init_method!r}"
        )
    limit_ms = _C.lost_after_ms() if lost_after is None else _limit_ms(lost_after)
    options.setdefault("_transports", ["uv"])
    with _interface(interface), _limit(limit_ms), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend")  # it is RPC that does
        rpc.init_rpc(  # type: ignore[no-untyped-call]
            f"worker{rank}" if name is None else name,
            rank=rank,
            world_size=world_size,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=init_method, **options),
        )


@contextlib.contextmanager
def _limit(limit_ms: int) -> Iterator[None]:
    """From before the start, in which others may already send promises. Undone if that fails."""
    before = _C.lost_after_ms()
    _C.set_lost_after_ms(limit_ms)
    try:
        yield
    except BaseException:
        _C.set_lost_after_ms(before)
        raise


@contextlib.contextmanager
def _interface(name: str | None) -> Iterator[None]:
    """Have RPC use it. It stays in the environment, unless what is done in here fails."""
    if name is None:
        yield
        return
    known = [each for _, each in socket.if_nameindex()]
    if name.partition(":")[0] not in known:  # behind it, the label of one of its addresses
        raise ValueError(f"interface: expected one of {', '.join(known)}, got {name!r}")
    variables = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")  # RPC starts with the latter
    before = {variable: os.environ.get(variable) for variable in variables}
    os.environ.update(dict.fromkeys(variables, name))
    try:
        yield
    except BaseException:
        for variable, value in before.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value
        raise


def _number(argument: str, variable: str, given: int | None) -> int:
    if given is not None:
        return given
    text = os.environ.get(variable)
    if text is None:
        raise ValueError(
            f"{argument}: expected a number, here or in the environment's {variable}, got neither: "
            "give it, or start the program with torchrun"
        )
    return int(text)


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """``rpc.shutdown``: what is still pending with another worker fails, and says so.

    A worker serves others until it returns: one that has nothing else to do calls it at once.

    Args:
        graceful: wait until all workers have called it. Not once a worker is lost: that one never
            will.
        timeout: of that, in seconds; 0 is no limit.

    Raises:
        RuntimeError: not all workers have called it in time, or RPC is not initialised.
    """
    rpc.shutdown(graceful, timeout)


def set_lost_after(seconds: float) -> None:
    """Set how long a worker may give no sign before it counts as lost; 30 s at first.

    A sign is due every quarter of it, and it counts from the last one.

    One whose connection is closed, since it has died, is lost at once. One that is merely slow, or
    busy, or holds Python's lock, gives signs all the same. For this process; the others have their
    own.

    Args:
        seconds: at least 0.1.

    Raises:
        TypeError: no number.
        ValueError: less than that.
    """
    _C.set_lost_after_ms(_limit_ms(seconds))


def _limit_ms(seconds: float) -> int:
    if not isinstance(seconds, numbers.Real):
        raise TypeError(f"seconds: expected a number, got {seconds!r}")
    if not seconds >= 0.1:
        raise ValueError(f"seconds: expected at least 0.1, got {seconds}")
    return int(min(seconds * 1000, 2**30))  # torch counts in 32 bits


def lost_after() -> float:
    """How long a worker may give no sign before it counts as lost, in seconds."""
    return _C.lost_after_ms() / 1000


# ---- The end -------------------------------------------------------------------------------------


def _see_to_shutdown() -> None:
    """Have RPC's shutdown tell us: it has no hook.

    Done when this is imported: a worker that only serves others is in the middle of ``shutdown()``
    all the time. What it calls there, one after the other, it looks up as it goes.
    """
    from torch.distributed.rpc import api

    def before(step: str, do: Callable[..., object]) -> None:
        call = getattr(api, step)

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            do(*args)
            return call(*args, **kwargs)

        setattr(api, step, wrapped)

    def leave(*_: object) -> None:
        _C.leave_network(True)

    def leave_group(_: object, name: str, is_join: bool) -> None:
        if not is_join:
            _C.leave_network(False)

    def close(*_: object) -> None:
        _C.leave_network(False)  # where it is not graceful, the rest is not called
        _C.close_network()

    # Until all workers have called it; others may still want what is under way from here.
    before("_wait_all_workers", lambda *_: _C.flush_promises(_FLUSH_MS))
    before("_delete_all_user_and_unforked_owner_rrefs", leave)
    # Of workers that come and go.
    before("_group_membership_management", leave_group)
    before("_finalize_shutdown", close)


_see_to_shutdown()
