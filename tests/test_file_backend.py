"""Promises that are fulfilled by another process of this machine, through shared memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import producers
import pytest
import torch
from forked import check
from helpers import ROOT, check_python, until
from peer import Peer
from producers import Promise

import dtorch_ops

LIMIT_MS = 30_000


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with Peer() as process:
        yield process


# ---- Values -------------------------------------------------------------------------------------


def test_slots_are_used_again_while_their_last_events_are_told(peer: Peer) -> None:
    for _ in range(50):
        promises = [Promise() for _ in range(20)]
        for index, promise in enumerate(promises):
            peer.start(producers.set_full, promise, float(index))
        values = dtorch_ops.wait_all([p.get_future() for p in promises], LIMIT_MS)
        assert [v[0].item() for v in values] == [float(i) for i in range(20)]
        for _ in promises:
            peer.finish()


def test_thousands_outstanding_cost_no_descriptor_and_no_thread(peer: Peer) -> None:
    def count(folder: str) -> int:
        return len(os.listdir(f"/proc/self/{folder}"))

    first = Promise()
    peer.call(producers.set_full, first, 0.0)
    first.get_future().wait(LIMIT_MS)
    descriptors, threads = count("fd"), count("task")
    promises = [Promise() for _ in range(3000)]
    peer.call(producers.hold, *promises)
    assert count("fd") <= descriptors
    assert count("task") <= threads
    peer.start(producers.set_held)
    values = dtorch_ops.wait_all([p.get_future() for p in promises], LIMIT_MS)
    assert peer.finish() == "none"
    peer.call(producers.release)
    assert [v.item() for v in values] == [float(i) for i in range(3000)]
    assert count("fd") <= descriptors


# ---- Errors and ends ----------------------------------------------------------------------------


def test_the_last_of_several_producers_breaks_it(peer: Peer) -> None:
    promise = Promise()
    future = promise.get_future()
    with Peer() as second:
        peer.call(producers.hold, promise)
        second.call(producers.hold, promise)
        second.kill()
    with pytest.raises(TimeoutError):
        future.wait(200)
    assert peer.call(producers.set_held) == "none"
    peer.call(producers.release)
    assert future.wait(LIMIT_MS).item() == 0.0


def test_one_of_two_producers_wins_and_the_other_is_told(peer: Peer) -> None:
    promises = [Promise() for _ in range(300)]
    with Peer() as second:
        peer.call(producers.hold, *promises)
        second.call(producers.hold, *promises)
        peer.start(producers.set_held)
        second.start(producers.set_held)
        values = dtorch_ops.wait_all([p.get_future() for p in promises], LIMIT_MS)
        told = [peer.finish(), second.finish()]
        peer.call(producers.release)
    assert "PromiseAlreadySatisfiedError" in told
    assert [v.item() for v in values] == [float(i) for i in range(300)]


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
    peer.call(producers.hold, promise)
    del promise
    with pytest.raises(TimeoutError):
        future.wait(100)
    assert peer.call(producers.set_held) == "none"
    peer.call(producers.release)
    assert future.wait(LIMIT_MS).item() == 0.0


# ---- What is left behind ------------------------------------------------------------------------


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


# ---- Tensors that are more, or less, than their elements ----------------------------------------


def check_sent_or_refused(make: str, expected: str, *words: str) -> None:
    """A worker sets what ``make`` says: the consumer gets it, or both an error with words."""
    check(
        f"""
        def resized(tensor, size):
            tensor.untyped_storage().resize_(size)
            return tensor
        def worker(link):
            promise = pickle.loads(hear(link))
            value = {make}
            try:
                promise.set_value(value)
            except (TypeError, ValueError, RuntimeError) as error:
                assert all(word in str(error) for word in {words!r}), error
                say(link, b"refused")
            else:
                say(link, b"sent")
        child = forked(worker)
        promise, future = pending()
        child.say(pickle.dumps(promise))
        if child.hear() == b"sent":
            assert {bool(expected)}, value_of(future)
            assert torch.equal(value_of(future), {expected or None})
        else:
            told = error_of(lambda: future.wait(5000))
            assert isinstance(told, (TypeError, ValueError, RuntimeError)), repr(told)
            assert all(word in str(told) for word in {words!r}), told
        child.end()
        """
    )


WITHOUT_MEMORY = {
    # A lazy kind, like the conjugate and the negative.
    "zeros as autograd makes them": ("torch._efficientzerotensor((2, 2))", "torch.zeros(2, 2)"),
    "a functional tensor": ("torch._to_functional_tensor(torch.ones(3))", "torch.ones(3)"),
    # As what shards a model leaves of its parameters.
    "memory that was freed": ("resized(torch.ones(3), 0)", ""),
    "a large one that was freed": ("resized(torch.ones(100_000), 0)", ""),
    "memory that was cut short": ("resized(torch.ones(10), 24)", ""),
    "a large one that was cut short": ("resized(torch.ones(100_000), 24)", ""),
}


@pytest.mark.parametrize(("make", "expected"), WITHOUT_MEMORY.values(), ids=WITHOUT_MEMORY.keys())
def test_a_tensor_without_the_memory_of_its_elements(make: str, expected: str) -> None:
    """It works or is refused; it neither ends the worker, nor sends what lies beyond."""
    check_sent_or_refused(make, expected, "tensor")


# Where the worker is as it sets a plain tensor, whose elements have to be gathered or resolved.
WITHIN = {
    "fake mode": """
        from torch._subclasses import FakeTensorMode
        with FakeTensorMode(allow_non_fake_inputs=True):
            set_all()
    """,
    "grad": """
        torch.func.grad(lambda x: (set_all(), x.sum())[1])(torch.ones(2))
    """,
    "trace": """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.trace(lambda x: (set_all(), x + 1)[1], torch.ones(2), check_trace=False)
    """,
    "no_grad": """
        with torch.no_grad(), torch.inference_mode():
            set_all()
    """,
}


@pytest.mark.parametrize("within", WITHIN)
def test_sending_is_no_operation_that_modes_transforms_or_traces_see(within: str) -> None:
    check(
        """
        complex = torch.tensor([1 + 2j, 3 - 4j])
        VALUES = [
            torch.arange(6.0), torch.arange(6.0).reshape(2, 3).t(), complex.conj(),
            torch.arange(1_000_000.0).reshape(1000, 1000).t(), torch.tensor(2.0).expand(300, 300),
        ]
        def worker(link):
            promises = pickle.loads(hear(link))
            def set_all():
                for promise, value in zip(promises, VALUES):
                    promise.set_value(value)
        """
        + textwrap.indent(textwrap.dedent(WITHIN[within]), " " * 12)
        + """
        child = forked(worker)
        ends = [pending() for _ in VALUES]
        child.say(pickle.dumps([promise for promise, _ in ends]))
        futures = [future for _, future in ends]
        del ends
        for value, future in zip(VALUES, futures):
            assert torch.equal(value_of(future), value.resolve_conj())
        child.end()
        """
    )


def test_a_value_for_which_there_is_no_room_fails_on_both_sides() -> None:
    """The next one works."""
    check(
        """
        def worker(link):
            promise, another = pickle.loads(hear(link))
            value = torch.ones(1, dtype=torch.uint8).expand(1 << 34)
            error = error_of(lambda: promise.set_value(value))
            assert type(error) is dtorch_ops.DTorchError, repr(error)
            say(link, str(error).encode())
            assert not promise.is_pending()
            another.set_value(value[:1_000_000])
            hear(link)
        child = forked(worker)
        (promise, future), (another, its_future) = pending(), pending()
        child.say(pickle.dumps((promise, another)))
        said = child.hear().decode()
        told = error_of(lambda: future.wait(5000))
        assert type(told) is dtorch_ops.DTorchError, repr(told)
        assert str(told) == said and str(1 << 34) in said, (said, str(told))
        assert its_future.wait(5000).sum() == 1_000_000
        child.say(b"done")
        child.end()
        """
    )


def test_a_snapshot_of_lent_memory_is_a_copy() -> None:
    """Without a copy what is written later shows, as that of ``empty`` says."""
    check(
        """
        def worker(link):
            for promise, copy in zip(pickle.loads(hear(link)), (True, False)):
                value = promise.empty(100_000).fill_(1)
                torch.ops.dtorch.get_tensor(value, promise, copy=copy)
                value.zero_()
            say(link, b"written")
            hear(link)
        child = forked(worker)
        ends = [pending(), pending()]
        child.say(pickle.dumps([promise for promise, _ in ends]))
        child.hear()
        assert [value_of(future).sum() for _, future in ends] == [100_000, 0]
        child.say(b"done")
        child.end()
        """
    )


def test_a_parameter_without_a_shape_is_refused_by_name() -> None:
    check_sent_or_refused("torch.nn.UninitializedParameter()", "", "ninitialized")


def test_an_opaque_tensor_is_refused_by_name() -> None:
    check_sent_or_refused("torch.ones(3).to_mkldnn()", "", "mkldnn", "to_dense")


def test_a_dtensor_is_refused_with_what_to_call_instead() -> None:
    check_python(
        """
        import pickle
        import torch.distributed as dist
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        token = pickle.dumps(promise)
        pid = os.fork()  # before there is a thread
        if pid == 0:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            t = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
            promise = pickle.loads(token)
            code = 1
            try:
                promise.set_value(t)
            except TypeError as error:
                words = ("DTensor", ".to_local()", ".full_tensor()")
                code = 0 if all(word in str(error) for word in words) else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        """
    )


# ---- A consumer that is gone --------------------------------------------------------------------

CALLS = {
    "set_value": "promise.set_value(torch.ones(1))",
    "a large value": "promise.set_value(torch.ones(1_000_000))",
    "set_exception": "promise.set_exception(KeyError('k'))",
    "get_tensor": "torch.ops.dtorch.get_tensor(torch.ones(1), promise)",
    "lent": "promise.set_value(lent)",
    "void set_value": "void.set_value()",
    "void set_exception": "void.set_exception(KeyError('k'))",
    "sync": "torch.ops.dtorch.sync(void)",
}


@pytest.mark.parametrize("end", ["kill", "exit"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_every_way_to_fulfil_tells_that_the_consumer_has_ended(call: str, end: str) -> None:
    """It neither hangs nor crashes; nor do the calls after it."""
    check(
        f"""
        def consumer(link):
            ends = [pending(), pending(dtorch_ops.VoidPromise)]
            say(link, pickle.dumps([promise for promise, _ in ends]))
            hear(link)
        child = forked(consumer)
        promise, void = pickle.loads(child.hear())
        lent = promise.empty(1000).fill_(1.0)
        if {end!r} == "kill":
            os.kill(child.pid, signal.SIGKILL)
        else:
            child.say()
        child.end(-signal.SIGKILL if {end!r} == "kill" else 0)
        error = error_of(lambda: {call})
        assert type(error) is dtorch_ops.BrokenPromiseError, repr(error)
        assert "ended" in str(error), error
        for _ in range(2):
            assert isinstance(error_of(lambda: {call}), dtorch_ops.DTorchError)
        assert bool((lent == 1).all())
        del promise, void, lent
        mine, future = pending()
        mine.set_value(torch.ones(1))
        value_of(future)
        """
    )


# ---- What is read from shared memory ------------------------------------------------------------


def test_nothing_is_unpickled_or_imported_for_a_value_or_an_error(tmp_path: Path) -> None:
    """Not even of an error that names a class which can be found."""
    (tmp_path / "of_the_peer.py").write_text(
        "print('imported')\n\nclass Evil(ValueError):\n    pass\n"
    )
    check(
        f"""
        sys.path.insert(0, {str(tmp_path)!r})
        class Reduced:
            def __reduce__(self):
                return os._exit, (9,)
        def worker(link):
            promises = pickle.loads(hear(link))
            import contextlib, io
            with contextlib.redirect_stdout(io.StringIO()):
                import of_the_peer
            error = ValueError("v")
            error.attribute = Reduced()
            values = [
                torch.ones(3), torch.ones(100_000), KeyError("k"), OSError(2, "o"),
                torch.OutOfMemoryError("m"), of_the_peer.Evil("e"), ValueError("r", Reduced()),
                error, BaseExceptionGroup("g", [of_the_peer.Evil("e")])
                if sys.version_info >= (3, 11) else KeyError("k"),
            ]
            for promise, value in zip(promises, values):
                if isinstance(value, BaseException):
                    promise.set_exception(value)
                else:
                    promise.set_value(value)
        child = forked(worker)
        promises = [pending() for _ in range(9)]
        data = pickle.dumps([promise for promise, _ in promises])
        async def awaited(future):
            return await future
        loop = asyncio.new_event_loop()
        seen = []
        def hook(event, arguments):
            if event == "pickle.find_class" or event == "import":
                seen.append((event, arguments))
        sys.addaudithook(hook)
        child.say(data)
        outcomes = []
        for _, future in promises:
            for read in (
                lambda: future.wait(LIMIT * 1000), lambda: future.value(),
                lambda: dtorch_ops.wait_all([future]),
                lambda: future.then(lambda f: f.value()).get(),
                lambda: loop.run_until_complete(awaited(future)), lambda: future.get(),
            ):
                try:
                    outcome = read()
                except BaseException as error:
                    outcome = type(error)
            outcomes.append(outcome)
        assert not [event for event in seen if event[0] == "pickle.find_class"], seen
        assert not [a for e, a in seen if "of_the_peer" in str(a)], seen
        assert "of_the_peer" not in sys.modules
        remote = dtorch_ops.RemoteError
        assert outcomes[2:8] == [
            KeyError, FileNotFoundError, torch.OutOfMemoryError, remote, remote, ValueError
        ], outcomes
        child.end()
        loop.close()
        """
    )


# ---- Tokens -------------------------------------------------------------------------------------

# The bytes of a token, behind its prefix, two digits each.
PID, START, NAMESPACE, MEMORY, NONCE = slice(0, 8), slice(8, 16), slice(16, 32), slice(32, 40), 48


def changed(token: str, where: slice) -> str:
    """The token with other numbers there."""
    prefix, digits = token[:10], token[10:]
    there = "".join("0123456789abcdef"[int(c, 16) ^ 1] for c in digits[where])
    return prefix + digits[: where.start] + there + digits[where.stop :]


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (START, "has ended"),  # a pid that lives, of another process than the owner
        (NAMESPACE, "PID namespace"),
        (slice(NONCE, NONCE + 2), "another mailbox"),
    ],
    ids=["start time", "namespace", "nonce"],
)
def test_a_token_of_another_process_than_the_living_one_is_refused(
    peer: Peer, where: slice, said: str
) -> None:
    promise = Promise()
    future = promise.get_future()
    told = peer.call(producers.error_of_token, changed(promise.token(), where))
    assert told.startswith("DTorchError: ") and said in told, told
    with pytest.raises(TimeoutError):
        future.wait(0)
    peer.call(producers.set_full, promise, 2.0)
    assert future.wait(LIMIT_MS).tolist() == [2.0] * 3


def test_why_neither_backend_can_be_used_is_said() -> None:
    """The shared memory cannot be reached, nor is there a network backend that could."""
    for cls in (Promise, dtorch_ops.VoidPromise):
        with pytest.raises(dtorch_ops.DTorchError) as refused:
            cls.from_token(changed(cls().token(), NAMESPACE))
        assert "another container" in str(refused.value)
        assert re.search("network|RPC", str(refused.value))


def test_what_was_passed_on_while_another_had_reserved_it_is_kept(tmp_path: Path) -> None:
    promise = Promise()
    future = promise.get_future()
    ready = str(tmp_path / "ready")
    os.mkfifo(ready)
    with Peer() as giver, Peer() as reserver, Peer() as heir:
        giver.call(producers.hold, promise)
        reserver.start(producers.set_on_a_stuck_stream, promise, ready)
        with open(ready):
            pass
        pickled = giver.call(producers.dump_held)
        giver.call(producers.release)
        reserver.kill()
        until(promise.is_pending)
        heir.call(producers.load_and_set, pickled, 3.0)
        assert future.wait(LIMIT_MS).item() == 3.0


def test_tokens_full_of_garbage_harm_neither_end() -> None:
    """Each is refused, or is a producer's like any other."""
    check(
        """
        import random
        rng = random.Random(3)
        promise, future = pending()
        kept, its_future = pending()
        tokens = [promise.token(), kept.token()]
        ends = {}
        def producer(link):
            for _ in range(3000):
                digits = list(rng.choice(tokens))
                for _ in range(rng.choice([1, 1, 1, 2, 5, 40])):
                    # But for where it rings: that alone makes no other promise of it.
                    place = rng.choice([*range(10, 50), *range(58, len(digits))])
                    digits[place] = rng.choice("0123456789abcdef")
                token = "".join(digits)
                if token in tokens:
                    continue
                try:
                    other = dtorch_ops.TensorPromise.from_token(token)
                    other.is_pending()
                    name = "taken"
                except (ValueError, dtorch_ops.DTorchError) as error:
                    name = type(error).__name__
                ends[name] = ends.get(name, 0) + 1
            say(link, pickle.dumps(ends))
            hear(link)
            dtorch_ops.TensorPromise.from_token(tokens[0]).set_value(torch.tensor(3.0))
        child = forked(producer)
        ends = pickle.loads(child.hear())
        assert ends["DTorchError"] > 100 and ends["ValueError"] > 10, ends
        assert not future.is_ready() and not its_future.is_ready()
        child.say()
        assert value_of(future).item() == 3.0
        child.end()
        kept.set_value(torch.ones(1))
        value_of(its_future)
        """
    )
