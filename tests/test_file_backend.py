"""Promises that are fulfilled by another process of this machine, through shared memory."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from helpers import ROOT, check_python
from peer import Peer

import dtorch_ops

LIMIT_MS = 30_000
Promise = dtorch_ops.TensorPromise


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with Peer() as process:
        yield process


# ---- What a peer does ---------------------------------------------------------------------------


def set_full(promise: Promise, value: float, size: tuple[int, ...] = (3,)) -> None:
    promise.set_value(torch.full(size, value))


def set_through_operator(promise: Promise) -> None:
    torch.ops.dtorch.get_tensor(torch.arange(4.0), promise)


def set_void(promise: dtorch_ops.VoidPromise) -> None:
    promise.set_value()


def sync_void(promise: dtorch_ops.VoidPromise) -> None:
    torch.ops.dtorch.sync(promise)


def error_of_set(promise: Promise) -> str:
    try:
        promise.set_value(torch.zeros(1))
    except dtorch_ops.DTorchError as error:
        return type(error).__name__
    return "none"


def error_of_get_future(promise: Promise) -> str:
    with pytest.raises(dtorch_ops.DTorchError) as raised:
        promise.get_future()
    return str(raised.value)


def drop(promise: Promise) -> None:
    assert promise.is_pending()


_held: list[object] = []


def hold(*promises: Promise) -> None:
    _held.extend(promises)


def release() -> None:
    _held.clear()


def set_held() -> str:
    try:
        for index, promise in enumerate(_held):
            promise.set_value(torch.tensor(float(index)))  # type: ignore[attr-defined]
    except dtorch_ops.DTorchError as error:
        return type(error).__name__
    return "none"


def dump_held() -> bytes:
    return pickle.dumps(_held[0])


def load_and_set(data: bytes, value: float) -> None:
    pickle.loads(data).set_value(torch.tensor(value))


def leave(_: Promise) -> None:
    os._exit(0)


class TwoArguments(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.first = first


def raise_in_producer(promise: Promise, kind: str) -> None:
    errors: dict[str, BaseException] = {
        "key": KeyError("k", 3),
        "os": FileNotFoundError(2, "no such file", "name"),
        "torch": torch.OutOfMemoryError("too large"),
        "unknown": TwoArguments(1, 2),
        "stop": StopIteration(3),
        "exit": SystemExit(4),
        "cancelled": concurrent.futures.CancelledError(),
        "large": ValueError("x" * 10_000_000),
    }
    try:
        raise errors[kind]
    except BaseException as error:
        promise.set_exception(error)


CASES: dict[str, torch.Tensor] = {
    **{
        str(dtype).removeprefix("torch."): torch.arange(6).to(dtype).reshape(2, 3)
        for dtype in (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.uint16,
            torch.uint32,
            torch.uint64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.complex64,
            torch.complex128,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2fnuz,
            torch.float8_e8m0fnu,
        )
    },
    "no dimension": torch.tensor(1.5),
    "no element": torch.empty(0),
    "no element of two dimensions": torch.empty(0, 5),
    "no element of three dimensions": torch.empty(3, 0, 2),
    "64 dimensions": torch.arange(4.0).reshape((1,) * 62 + (2, 2)),
    "9 dimensions": torch.arange(512.0).reshape((2,) * 9),
    **{f"{n} bytes": torch.arange(n).to(torch.uint8) for n in (1, 12, 143, 144, 145, 4095, 4097)},
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "strided": torch.arange(100.0)[::7],
    "strided float8": torch.arange(16.0).to(torch.float8_e5m2).reshape(4, 4).t(),
    "strided complex128": torch.complex(torch.arange(16.0), torch.ones(16))
    .to(torch.complex128)
    .reshape(4, 4)
    .t(),
    "expanded": torch.arange(3.0).expand(4, 3),
    "view of much": torch.arange(1_000_000.0)[10:12],
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative view": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "requires grad": torch.ones(3, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "large": torch.arange(3_000_000.0),
}


def complex_half() -> torch.Tensor:
    """Made aside, since torch warns that its support is experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.arange(6).to(torch.complex32).reshape(2, 3)


CASES["complex32"] = complex_half()


def set_case(promise: Promise, name: str) -> None:
    promise.set_value(CASES[name])


def refused(promise: Promise) -> dict[str, str]:
    kinds = {
        "sparse": torch.eye(3).to_sparse(),
        "quantised": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "meta": torch.empty(2, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }
    said = {}
    for name, value in kinds.items():
        try:
            promise.set_value(value)
        except TypeError as error:
            said[name] = str(error)
    promise.set_value(torch.tensor(1.0))  # no refusal has used the promise up
    return said


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Something that torch.equal compares, for dtypes that it does not."""
    resolved = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return resolved.reshape(-1).view(torch.uint8) if resolved.numel() else resolved


# ---- Values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_tensor_arrives_as_it_is(peer: Peer, name: str) -> None:
    promise = Promise()
    peer.call(set_case, promise, name)
    received, sent = promise.get_future().wait(LIMIT_MS), CASES[name]
    assert received.shape == sent.shape
    assert received.dtype == sent.dtype
    assert torch.equal(plain(received), plain(sent))
    assert not received.requires_grad
    assert received.numel() == 0 or received.data_ptr() % 64 == 0
    assert received.untyped_storage().nbytes() == sent.numel() * sent.element_size()


def test_what_has_no_plain_elements_is_refused_by_name(peer: Peer) -> None:
    promise = Promise()
    said = peer.call(refused, promise)
    assert set(said) == {"sparse", "quantised", "meta", "nested"}
    assert "to_dense" in said["sparse"] and "int_repr" in said["quantised"]
    assert promise.get_future().wait(LIMIT_MS).item() == 1.0


def test_what_arrived_is_the_receiver_s_own(peer: Peer) -> None:
    """Writable, and unchanged by what the same producer sends later, whatever is dropped."""
    kept = []
    for index in range(50):
        promise = Promise()
        peer.call(set_full, promise, float(index), (1000,))
        received = promise.get_future().get()
        if index % 7 == 0:
            received.add_(0.5)
            kept.append((index, received))
    for index, tensor in kept:
        assert torch.equal(tensor, torch.full((1000,), index + 0.5))
    assert torch.equal(kept[0][1].clone().share_memory_(), kept[0][1])


def test_a_value_outlives_its_producer() -> None:
    with Peer() as producer:
        promises = [Promise() for _ in range(4)]
        futures = [promise.get_future() for promise in promises]
        for index, promise in enumerate(promises):
            producer.call(set_full, promise, float(index), (100_000,))
        early = futures[0].get()
        producer.kill()
    for index, future in enumerate(futures[1:], 1):
        assert torch.equal(future.get(), torch.full((100_000,), float(index)))
    assert torch.equal(early, torch.zeros(100_000))


def test_through_operators_and_without_a_value(peer: Peer) -> None:
    promise = Promise()
    peer.call(set_through_operator, promise)
    assert promise.get_future().wait(LIMIT_MS).tolist() == [0.0, 1.0, 2.0, 3.0]
    for function in (set_void, sync_void):
        void = dtorch_ops.VoidPromise()
        peer.call(function, void)
        assert void.get_future().wait(LIMIT_MS) is None


def test_await_callbacks_and_groups(peer: Peer) -> None:
    promises = [Promise() for _ in range(20)]
    futures = [promise.get_future() for promise in promises]
    doubled = futures[0].then(lambda f: f.value() * 2)
    for index, promise in enumerate(promises):
        peer.start(set_full, promise, float(index))

    async def main() -> list[torch.Tensor]:
        return await asyncio.wait_for(asyncio.gather(*futures), LIMIT_MS / 1000)

    values = asyncio.run(main())
    for _ in promises:
        peer.finish()
    assert [value[0].item() for value in values] == [float(i) for i in range(20)]
    assert doubled.wait(LIMIT_MS).tolist() == [0.0, 0.0, 0.0]
    assert [v[0].item() for v in dtorch_ops.wait_all(futures)] == [float(i) for i in range(20)]


def test_a_callback_may_block_on_another_future(peer: Peer) -> None:
    """However deep: each blocked callback leaves another thread to listen."""
    promises = [Promise() for _ in range(6)]
    futures = [promise.get_future() for promise in promises]
    chained = [
        futures[i].then(lambda f, i=i: f.value() + futures[i + 1].wait(LIMIT_MS)) for i in range(5)
    ]
    for promise in promises:
        peer.call(set_full, promise, 1.0)
    for child in chained:
        assert child.wait(LIMIT_MS).tolist() == [2.0, 2.0, 2.0]


def test_slots_are_used_again_while_their_last_events_are_told(peer: Peer) -> None:
    for _ in range(50):
        promises = [Promise() for _ in range(20)]
        for index, promise in enumerate(promises):
            peer.start(set_full, promise, float(index))
        values = dtorch_ops.wait_all([p.get_future() for p in promises], LIMIT_MS)
        assert [v[0].item() for v in values] == [float(i) for i in range(20)]
        for _ in promises:
            peer.finish()


def test_thousands_outstanding_cost_no_descriptor_and_no_thread(peer: Peer) -> None:
    def count(folder: str) -> int:
        return len(os.listdir(f"/proc/self/{folder}"))

    first = Promise()
    peer.call(set_full, first, 0.0)
    first.get_future().wait(LIMIT_MS)
    descriptors, threads = count("fd"), count("task")
    promises = [Promise() for _ in range(3000)]
    peer.call(hold, *promises)
    assert count("fd") <= descriptors
    assert count("task") <= threads
    peer.start(set_held)
    values = dtorch_ops.wait_all([p.get_future() for p in promises], LIMIT_MS)
    assert peer.finish() == "none"
    peer.call(release)
    assert [v.item() for v in values] == [float(i) for i in range(3000)]
    assert count("fd") <= descriptors


# ---- How it travels -----------------------------------------------------------------------------


def test_the_token_is_short_and_has_no_space() -> None:
    promise = Promise()
    assert len(pickle.dumps(promise)) < 300
    assert len(promise.token()) < 150
    assert " " not in promise.token()


def test_unpickled_at_home_it_is_the_promise_itself() -> None:
    promise = Promise()
    future = promise.get_future()
    again = pickle.loads(pickle.dumps(promise))
    del promise
    again.set_value(torch.ones(2))
    assert future.get().tolist() == [1.0, 1.0]
    with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError):
        pickle.dumps(again)


def test_mode_memory_cannot_be_pickled_and_file_can(peer: Peer) -> None:
    with pytest.raises(dtorch_ops.DTorchError, match="memory"):
        pickle.dumps(Promise(mode="memory"))
    promise = Promise(mode="file")
    peer.call(set_full, promise, 2.0)
    assert promise.get_future().wait(LIMIT_MS).tolist() == [2.0] * 3


def test_on_a_command_line() -> None:
    promise = Promise()
    code = (
        "import sys, torch, dtorch_ops\n"
        "dtorch_ops.TensorPromise.from_token(sys.argv[1]).set_value(torch.arange(3.0))\n"
    )
    subprocess.run([sys.executable, "-c", code, promise.token()], check=True, timeout=60, cwd=ROOT)
    assert promise.get_future().wait(LIMIT_MS).tolist() == [0.0, 1.0, 2.0]


def test_in_a_process_pool() -> None:
    promises = [Promise() for _ in range(8)]
    context = __import__("multiprocessing").get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        for index, promise in enumerate(promises):
            pool.submit(set_full, promise, float(index)).result(60)
    values = dtorch_ops.wait_all([p.get_future() for p in promises], LIMIT_MS)
    assert [v[0].item() for v in values] == [float(i) for i in range(8)]


def test_passed_on_from_worker_to_worker(peer: Peer) -> None:
    """The first worker may end before the second has unpickled it."""
    promise = Promise()
    future = promise.get_future()
    with Peer() as first:
        first.call(hold, promise)
        data = first.call(dump_held)
        first.kill()
    with pytest.raises(TimeoutError):
        future.wait(200)
    peer.call(load_and_set, data, 7.0)
    assert future.wait(LIMIT_MS).item() == 7.0


def test_a_token_that_means_nothing_is_refused() -> None:
    for text in ("", "hello", "dtorch1-t-1-1-1-1-1-00-0-1", Promise().token() + "x"):
        with pytest.raises(ValueError, match="token"):
            Promise.from_token(text)
    with pytest.raises(ValueError, match="VoidPromise"):
        Promise.from_token(dtorch_ops.VoidPromise().token())
    with pytest.raises(TypeError, match="string"):
        Promise.from_token(3)  # type: ignore[arg-type]


def test_an_owner_that_is_gone_is_named() -> None:
    token = check_python("print(dtorch_ops.TensorPromise().token(), end='')")
    with pytest.raises(dtorch_ops.DTorchError, match="has ended"):
        Promise.from_token(token)


def test_the_future_stays_with_the_owner(peer: Peer) -> None:
    assert "unpickled" in peer.call(error_of_get_future, Promise())


# ---- Errors and ends ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("key", KeyError),
        ("os", FileNotFoundError),
        ("torch", torch.OutOfMemoryError),
        ("stop", StopIteration),
        ("exit", SystemExit),
        ("cancelled", concurrent.futures.CancelledError),
        ("large", ValueError),
    ],
)
def test_errors_of_builtin_and_torch_types_are_rebuilt(
    peer: Peer, kind: str, expected: type[BaseException]
) -> None:
    promise = Promise()
    future = promise.get_future()
    peer.call(raise_in_producer, promise, kind)
    for _ in range(2):
        with pytest.raises(expected) as raised:
            future.wait(LIMIT_MS)
    assert type(raised.value) is expected
    assert "raise_in_producer" in str(raised.value.__cause__)
    if kind == "key":
        assert raised.value.args == ("k", 3)
    if kind == "os":
        assert raised.value.filename == "name"  # type: ignore[attr-defined]


def test_errors_of_other_types_arrive_as_remote_errors(peer: Peer) -> None:
    promise = Promise()
    peer.call(raise_in_producer, promise, "unknown")
    with pytest.raises(dtorch_ops.RemoteError) as raised:
        promise.get_future().wait(LIMIT_MS)
    assert raised.value.type_name == "TwoArguments"
    assert raised.value.message == "1 and 2"
    assert "raise_in_producer" in raised.value.traceback_text


def test_a_producer_that_drops_it_breaks_the_promise(peer: Peer) -> None:
    promise = Promise()
    future = promise.get_future()
    peer.call(drop, promise)
    with pytest.raises(dtorch_ops.BrokenPromiseError):
        future.wait(LIMIT_MS)
    with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError):
        promise.set_value(torch.ones(1))


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_producer_that_ends_breaks_the_promise(end: str) -> None:
    with Peer() as producer:
        promises = [Promise() for _ in range(3)]
        futures = [p.get_future() for p in promises]
        producer.call(hold, *promises)
        if end == "kill":
            producer.kill()
        else:
            producer.start(leave, promises[0])
        for future in futures:
            with pytest.raises(dtorch_ops.BrokenPromiseError):
                future.wait(LIMIT_MS)


def test_the_last_of_several_producers_breaks_it(peer: Peer) -> None:
    promise = Promise()
    future = promise.get_future()
    with Peer() as second:
        peer.call(hold, promise)
        second.call(hold, promise)
        second.kill()
    with pytest.raises(TimeoutError):
        future.wait(200)
    assert peer.call(set_held) == "none"
    peer.call(release)
    assert future.wait(LIMIT_MS).item() == 0.0


def test_one_of_two_producers_wins_and_the_other_is_told(peer: Peer) -> None:
    promises = [Promise() for _ in range(300)]
    with Peer() as second:
        peer.call(hold, *promises)
        second.call(hold, *promises)
        peer.start(set_held)
        second.start(set_held)
        values = dtorch_ops.wait_all([p.get_future() for p in promises], LIMIT_MS)
        told = [peer.finish(), second.finish()]
        peer.call(release)
    assert "PromiseAlreadySatisfiedError" in told
    assert [v.item() for v in values] == [float(i) for i in range(300)]


def test_the_owner_may_be_first_or_cancel(peer: Peer) -> None:
    promise = Promise()
    peer.call(hold, promise)
    promise.set_value(torch.ones(1))
    assert promise.get_future().get().item() == 1.0
    assert peer.call(set_held) == "PromiseAlreadySatisfiedError"
    peer.call(release)
    cancelled = Promise()
    peer.call(hold, cancelled)
    assert cancelled.cancel()
    assert not cancelled.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        cancelled.get_future().get()
    assert peer.call(set_held) == "PromiseAlreadySatisfiedError"
    peer.call(release)


def test_the_owner_that_died_is_told_to_the_producer(peer: Peer) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    code = (
        "import os, sys, dtorch_ops\n"
        "promise = dtorch_ops.TensorPromise()\n"
        "os.write(int(sys.argv[1]), promise.token().encode())\n"
        "os.close(int(sys.argv[1]))\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(write)], stdin=subprocess.PIPE, pass_fds=[write], cwd=ROOT
    )
    os.close(write)
    with os.fdopen(read) as pipe:
        token = pipe.read()
    promise = Promise.from_token(token)
    assert promise.is_pending()
    owner.kill()
    owner.communicate(timeout=60)
    with pytest.raises(dtorch_ops.BrokenPromiseError, match="ended"):
        promise.set_value(torch.ones(1))


def test_the_owner_s_object_may_go_first(peer: Peer) -> None:
    promise = Promise()
    future = promise.get_future()
    peer.call(hold, promise)
    del promise
    with pytest.raises(TimeoutError):
        future.wait(100)
    assert peer.call(set_held) == "none"
    peer.call(release)
    assert future.wait(LIMIT_MS).item() == 0.0


# ---- What is left behind ------------------------------------------------------------------------


def test_nothing_has_a_name() -> None:
    check_python(
        """
        import pickle
        before = set(os.listdir("/dev/shm"))
        promise = dtorch_ops.TensorPromise()
        pickle.dumps(promise)
        assert set(os.listdir("/dev/shm")) == before
        links = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                 if os.path.islink(f"/proc/self/fd/{n}")]
        (memory,) = [link for link in links if "dtorch" in link]
        assert memory == "/memfd:dtorch_ops (deleted)"
        """
    )


def test_short_lived_workers_leave_nothing() -> None:
    """Workers one after the other: descriptors and mappings do not grow with their number."""

    def counts() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            mappings = sum("dtorch_ops (deleted)" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), mappings

    def one_worker() -> None:
        promise = Promise()
        code = (
            "import sys, torch, dtorch_ops\n"
            "promise = dtorch_ops.TensorPromise.from_token(sys.argv[1])\n"
            "promise.set_value(torch.ones(100_000))\n"
        )
        arguments = [sys.executable, "-c", code, promise.token()]
        subprocess.run(arguments, check=True, timeout=60, cwd=ROOT)
        assert promise.get_future().get().sum().item() == 100_000

    one_worker()
    settled = threading.Event()
    before = counts()
    for _ in range(4):
        one_worker()
    for _ in range(100):
        if counts() <= before:
            break
        settled.wait(0.05)
    assert counts() <= before


def test_exit_with_promises_outstanding_is_clean() -> None:
    check_python(
        """
        import pickle
        promises = [dtorch_ops.TensorPromise() for _ in range(10)]
        futures = [p.get_future() for p in promises]
        tokens = [pickle.dumps(p) for p in promises]
        futures[0].add_done_callback(print)
        """
    )
