"""Promises of other machines: who is lost, what shows there, and what lives beside it."""

from __future__ import annotations

import os
import pickle
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerators
import producers
import pytest
import torch
from helpers import check_python, run_python, until
from network_group import Group, Two, Worker, free_port, stop
from peer import Peer

import dtorch_ops
from dtorch_ops import network

LIMIT_MS = 30_000
BrokenPromiseError = dtorch_ops.BrokenPromiseError
Promise = dtorch_ops.TensorPromise


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    made = Group(workers=15)
    yield made
    made.close()


@pytest.fixture(scope="module")
def worker(group: Group) -> Worker:
    """One that lives."""
    return group.take()


@pytest.fixture(scope="module")
def another_worker(group: Group) -> Worker:
    return group.take()


@pytest.fixture
def mortal(group: Group) -> Worker:
    """One for a test that ends it."""
    return group.take()


@pytest.fixture
def soon() -> Iterator[None]:
    """The limit of the silent, so short that a test can wait for it."""
    before = network.lost_after()
    network.set_lost_after(1.0)
    yield
    network.set_lost_after(before)


def pending(cls: Any = Promise, mode: str = "auto") -> tuple[Any, Any]:
    promise = cls(mode)
    return promise, promise.get_future()


# ---- Which way ----------------------------------------------------------------------------------


def test_a_token_names_the_worker_where_rpc_is_initialised(group: Group) -> None:
    assert "@owner@uv://127.0.0.1:" in Promise().token()
    assert "=owner@uv://127.0.0.1:" in Promise("network").token()
    assert "owner" not in Promise("file").token()
    assert len(Promise("network").token()) < 300


def test_on_one_machine_auto_takes_shared_memory(mortal: Worker) -> None:
    promise, future = pending()
    before = mortal.call(producers.attached)
    Peer.start(mortal, producers.set_full, promise, 3.0)  # as it is, without far_away()
    mortal.finish()
    assert future.wait(LIMIT_MS).tolist() == [3.0] * 3
    assert mortal.call(producers.attached) == before + 1
    promise, future = pending()
    mortal.call(producers.set_full, promise, 4.0)
    assert future.wait(LIMIT_MS).tolist() == [4.0] * 3
    assert mortal.call(producers.attached) == before + 1


def test_in_its_own_process_it_is_the_object(group: Group) -> None:
    promise, future = pending(mode="network")
    again = pickle.loads(pickle.dumps(promise))
    value = torch.ones(2, requires_grad=True)
    again.set_value(value)
    assert future.wait(LIMIT_MS) is value


WITHOUT_RPC = """
import dtorch_ops, pickle
promise = dtorch_ops.TensorPromise("network")
try:
    pickle.dumps(promise)
except dtorch_ops.DTorchError as error:
    print(error)
future = promise.get_future()
promise.set_value(torch.ones(1))  # which it still can
print(future.get().item())
"""


def test_without_rpc_mode_network_stays_and_says_so() -> None:
    said = check_python(WITHOUT_RPC).splitlines()
    assert "not initialised" in said[0] and "dtorch_ops.network.init()" in said[0]
    assert said[1] == "1.0"


@pytest.fixture(scope="module")
def token_of_the_dead() -> str:
    """Of a process whose memory is not to be reached any more."""
    return check_python("print(dtorch_ops.TensorPromise().token())").strip()


def test_an_error_says_why_neither_way_leads_there(token_of_the_dead: str) -> None:
    with Peer() as without:
        said = without.call(producers.refusals, token_of_the_dead)
        assert "shared memory" in said and "where it was pickled" in said
        said = without.call(producers.refusals, f"{token_of_the_dead}@somebody@uv://127.0.0.1:1")
        assert "shared memory" in said and "not initialised here" in said and "'somebody'" in said


@pytest.mark.parametrize(
    "change",
    [
        lambda token: token + ";",
        lambda token: token + "\n",
        lambda token: token * 2,
        lambda token: token + token[token.index("@") :],
        lambda token: token[: token.index("://")],
        lambda token: token[: token.rindex(":") + 1],
        lambda token: token[: token.index("=") + 1],
        lambda token: token.replace("=", "=@"),
        lambda token: token.replace("uv:", "\udc80:"),
        lambda token: "=",
    ],
    ids=["junk", "line", "twice", "address", "cut", "port", "nobody", "nameless", "bytes", "empty"],
)
def test_a_token_that_was_damaged_is_a_value_error(
    group: Group, change: Callable[[str], str]
) -> None:
    promise, future = pending(mode="network")
    with Peer() as elsewhere, pytest.raises(AssertionError, match=r"(Value|UnicodeEncode)Error"):
        elsewhere.call(producers.from_token_of_a_group, change(promise.token()))
    promise.set_value(torch.ones(1))
    assert future.wait(0).item() == 1.0


def test_what_is_shown_of_a_promise_asks_nobody(worker: Worker, mortal: Worker) -> None:
    promise, _ = pending()
    assert worker.call(producers.shown, promise) == "<TensorPromise of worker 'owner'>"
    # So that it has connected: TensorPipe stops listening if a process ends in the middle of that.
    mortal.call(producers.hold, promise)
    pickled = mortal.call(producers.make_promise_named, mortal.name)
    theirs = pickle.loads(pickled)[0]
    mortal.kill()
    assert repr(theirs) == f"<TensorPromise of worker '{mortal.name}'>"
    with pytest.raises(BrokenPromiseError):
        theirs.is_pending()


def test_an_unknown_worker_is_named(worker: Worker, token_of_the_dead: str) -> None:
    said = worker.call(producers.refusals, f"{token_of_the_dead}@somebody@uv://127.0.0.1:1")
    assert "knows no worker 'somebody'" in said


def test_the_owner_says_so_if_the_promise_is_not_its_own(
    worker: Worker, token_of_the_dead: str
) -> None:
    owner = Promise("network").token().partition("=")[2]
    said = worker.call(producers.error_of_set_token, f"{token_of_the_dead}={owner}")
    assert said.startswith("BrokenPromiseError") and "not the one that waits" in said


# ---- What travels -------------------------------------------------------------------------------


def test_a_large_tensor_and_then_small_ones(worker: Worker) -> None:
    """Each as it was set, whatever the one before was like."""
    for size in ((1 << 26,), (3,), (0,), (2, 5), ()):
        promise, future = pending()
        worker.call(producers.set_full, promise, 2.0, size)
        received = future.wait(LIMIT_MS)
        assert received.shape == size and bool((received == 2).all())


def test_a_thousand_at_once(worker: Worker) -> None:
    promises = [Promise() for _ in range(1000)]
    futures = [promise.get_future() for promise in promises]
    worker.call(producers.set_many, promises)
    values = dtorch_ops.wait_all(futures, timeout_ms=LIMIT_MS)
    assert [value.item() for value in values] == [float(index) for index in range(1000)]


def test_neither_threads_nor_descriptors_grow_with_the_promises(worker: Worker) -> None:
    def rounds(count: int) -> None:
        for index in range(count):
            promises = [Promise() for _ in range(10)]
            futures = [promise.get_future() for promise in promises]
            worker.call(producers.set_many, promises, float(index))
            for value in futures:
                value.then(lambda taken: taken.value()).wait(LIMIT_MS)  # in a thread of its own

    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    rounds(5)
    threads, descriptors = used()
    rounds(50)
    until(lambda: used()[0] <= threads)  # those that ran callbacks have ended
    assert used()[1] == descriptors


def test_it_goes_from_worker_to_worker(group: Group, worker: Worker, mortal: Worker) -> None:
    """And is not broken on the way, though nobody has it but its pickle."""
    promise, future = pending()
    worker.call(producers.hold, promise)
    passed_on = worker.call(producers.dump_held)
    worker.call(producers.release)
    del promise
    mortal.call(producers.load_and_set, passed_on, 7.0)
    assert future.wait(LIMIT_MS).item() == 7.0


def test_at_home_too_a_pickle_keeps_it() -> None:
    promise, future = pending()
    unpickled = pickle.loads(pickle.dumps(promise))
    passed_on = pickle.dumps(unpickled)
    del promise, unpickled
    pickle.loads(passed_on).set_value(torch.tensor(5.0))
    assert future.wait(LIMIT_MS).item() == 5.0


def test_a_remote_sync(worker: Worker) -> None:
    promise, future = pending(dtorch_ops.VoidPromise)
    worker.call(producers.sync_void, promise)
    assert future.wait(LIMIT_MS) is None


def test_more_functions_at_once_than_rpc_has_threads(two: Two) -> None:
    """Each waits for replies, with no thread of RPC's left: torch's own nested calls stop there."""
    values, acknowledged = two.owner.call(producers.call_at_once, "worker1", 64)
    assert values == [float(number) for number in range(64)]
    assert all(acknowledged)


# ---- Threads ------------------------------------------------------------------------------------


def test_a_callback_may_wait_for_the_next_value_of_the_same_worker(worker: Worker) -> None:
    first, future = pending()
    second, next_future = pending()
    chained = future.then(lambda f: f.value() + next_future.wait(LIMIT_MS))
    worker.call(producers.set_many, [first, second], 1.0)
    assert chained.wait(LIMIT_MS).item() == 3.0


def test_the_owner_needs_no_python_lock_to_take_a_value(worker: Worker) -> None:
    promise, future = pending()
    worker.start(producers.time_of_setting, promise)
    released = producers.hold_the_lock(700)
    assert worker.finish() < released
    assert future.wait(LIMIT_MS).item() == 1.0


def test_a_forked_child_says_that_rpc_does_not_work_there(worker: Worker) -> None:
    promise, future = pending()
    said = worker.call(producers.error_in_forked_child, promise)
    assert said.startswith("DTorchError") and "forked" in said
    with pytest.raises(BrokenPromiseError):
        future.wait(LIMIT_MS)


def test_rpc_works_in_a_forked_process_that_initialises_it_itself() -> None:
    """As the workers of a server that has imported everything, and forks."""
    said = check_python(
        """
        from torch.distributed import rpc

        def run(port, said):
            dtorch_ops.network.init(
                "only", rank=0, world_size=1, init_method=f"tcp://127.0.0.1:{port}", interface="lo"
            )
            os.write(said, dtorch_ops.TensorPromise("network").token().encode())
            dtorch_ops.network.shutdown()

        ports = [int(port) for port in sys.argv[1:]]
        read, write = os.pipe()
        dtorch_ops.network.init(
            "parent", rank=0, world_size=1, init_method=f"tcp://127.0.0.1:{ports[0]}",
            interface="lo",
        )
        dtorch_ops.TensorPromise().token()
        dtorch_ops.network.shutdown()
        if os.fork() == 0:
            run(ports[1], write)
            os._exit(0)
        os.close(write)
        print(os.read(read, 1000).decode())
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        """,
        args=(str(free_port()), str(free_port())),
    )
    assert "=only@" in said


# ---- Beside the user's own ----------------------------------------------------------------------


@pytest.mark.parametrize("processes", [2, 3])
def test_collectives_run_beside_it(processes: int, worker: Worker, another_worker: Worker) -> None:
    """500 promises each way, while all processes reduce and meet, in groups of their own."""
    workers = [worker, another_worker][: processes - 1]
    count = 500 // len(workers)
    promises = [[Promise() for _ in range(count)] for _ in workers]
    futures = [promise.get_future() for each in promises for promise in each]
    theirs = [
        promise
        for each in workers
        for promise in pickle.loads(
            each.call(producers.make_promises, count).replace(
                f"@{each.name}".encode(), f"={each.name}".encode()
            )
        )
    ]
    groups = [(free_port(), processes) for _ in range(2)]
    for rank, each in enumerate(workers, 1):
        each.start(producers.all_reduce_while_setting, promises[rank - 1], rank, groups)
    sums = producers.all_reduce_while_setting(theirs, 0, groups)
    ranks = sum(range(processes))
    assert sums == 2 * [float(processes * index + ranks) for index in range(50)]
    assert all(each.finish() == sums for each in workers)
    values = dtorch_ops.wait_all(futures, timeout_ms=LIMIT_MS)
    expected = [float(index) for index in range(count)]
    assert [value.item() for value in values] == expected * len(workers)
    made = [value for each in workers for value in each.call(producers.values_of_made)]
    # This process has set them all in one go.
    assert made == [float(index) for index in range(count * len(workers))]


# ---- Who is lost --------------------------------------------------------------------------------


def test_a_worker_that_is_killed_is_named(mortal: Worker) -> None:
    promise, future = pending()
    mortal.call(producers.hold, promise)
    mortal.kill()
    with pytest.raises(BrokenPromiseError, match=f"connection to worker '{mortal.name}' is lost"):
        future.wait(LIMIT_MS)


def test_a_worker_that_has_gone_leaves_no_connection(mortal: Worker) -> None:
    """Nothing is said to it any more, by which one would notice."""
    promise, future = pending()
    mortal.call(producers.set_full, promise, 3.0)
    assert future.wait(LIMIT_MS).tolist() == [3, 3, 3]
    port = mortal.call(producers.port_of_network)
    assert connections_to(port)
    mortal.kill()
    until(lambda: not connections_to(port))


def connections_to(port: int) -> list[str]:
    """The kernel's lines on those whose other end listened there, and which are not closed here."""
    closed = {"06"}  # TIME_WAIT
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [
        " ".join(line)
        for line in lines
        if int(line[2].partition(":")[2], 16) == port and line[3] not in closed
    ]


def test_a_worker_that_is_killed_in_the_middle_of_a_transfer(mortal: Worker) -> None:
    promise, future = pending()
    held, held_future = pending()
    mortal.call(producers.hold, held)
    mortal.start(producers.set_full_for_ever, promise, (1 << 25,))
    assert bool((future.wait(LIMIT_MS) == 1).all())
    mortal.kill()
    with pytest.raises(BrokenPromiseError):
        held_future.wait(LIMIT_MS)


def test_a_worker_that_gives_no_sign_is_lost(mortal: Worker, soon: None) -> None:
    promise, future = pending()
    other, other_future = pending()
    mortal.call(producers.hold, promise, other)
    stop(mortal.process.pid)
    with pytest.raises(TimeoutError):
        future.wait(10)  # the caller's own limit
    with pytest.raises(BrokenPromiseError, match="no sign for 1 s"):
        future.wait(LIMIT_MS)
    with pytest.raises(BrokenPromiseError):
        other_future.wait(LIMIT_MS)
    # It comes back, and is told.
    os.kill(mortal.process.pid, signal.SIGCONT)
    assert mortal.call(producers.set_held) == "PromiseAlreadySatisfiedError"


@pytest.mark.parametrize("size", [3, 1 << 24])
def test_a_worker_that_gives_no_sign_is_lost_while_a_value_is_on_its_way_to_it(
    mortal: Worker, soon: None, size: int
) -> None:
    promise, future = pending()
    mortal.call(producers.hold, promise)
    theirs = pickle.loads(mortal.call(producers.make_promise_named, mortal.name))[0]
    stop(mortal.process.pid)
    with pytest.raises(BrokenPromiseError, match="no sign for 1 s"):
        theirs.set_value(torch.ones(size))
    with pytest.raises(BrokenPromiseError, match="no sign for 1 s"):
        future.wait(LIMIT_MS)


def test_a_slow_worker_is_not_lost(worker: Worker, soon: None) -> None:
    promise, future = pending()
    worker.start(producers.set_after_holding_the_lock, promise, 2500)
    assert future.wait(LIMIT_MS).item() == 1.0
    worker.finish()


def test_one_timeout_does_not_spoil_the_connection(worker: Worker) -> None:
    promise, future = pending()
    worker.call(producers.hold, promise)
    with pytest.raises(TimeoutError):
        future.wait(1)
    other, other_future = pending()
    worker.call(producers.set_full, other, 1.0)
    assert other_future.wait(LIMIT_MS).tolist() == [1.0] * 3
    assert worker.call(producers.set_held) == "none"
    assert future.wait(LIMIT_MS).item() == 0.0
    worker.call(producers.release)


def test_a_limit_has_a_least() -> None:
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="at least"):
            network.set_lost_after(wrong)
    assert network.lost_after() == 30.0


# ---- The owner is lost, or leaves ---------------------------------------------------------------


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.close()


def test_the_owner_is_killed(two: Two) -> None:
    two.held()
    two.owner.kill()
    said = two.worker.call(producers.error_of_setting_held)
    assert said.startswith("BrokenPromiseError: ") and "worker 'worker0'" in said


def test_the_owner_gives_no_sign(two: Two) -> None:
    two.held()
    two.worker.call(network.set_lost_after, 1.0)
    stop(two.owner.process.pid)
    said = two.worker.call(producers.error_of_setting_held)
    assert said.startswith("BrokenPromiseError: ") and "no sign for 1 s" in said
    assert "nobody may be left" in said


def test_a_small_value_whose_set_is_interrupted_arrives(two: Two) -> None:
    """It was said, though not acknowledged."""
    two.held()
    stop(two.owner.process.pid)
    assert two.worker.call(producers.error_of_interrupted_set, "small") == "KeyboardInterrupt"
    os.kill(two.owner.process.pid, signal.SIGCONT)
    assert two.owner.call(producers.sums_of_made) == [6.0]


@pytest.mark.parametrize("kind", ["large", "on an accelerator"])
def test_a_promise_whose_set_is_interrupted_before_its_value_was_there_can_be_set(
    two: Two, kind: str
) -> None:
    """The tensor is the caller's again, who may write to it: no part of it is a value."""
    two.held()
    two.owner.call(producers.listen_to_log)
    stop(two.owner.process.pid)
    assert two.worker.call(producers.error_of_interrupted_set, kind) == "KeyboardInterrupt"
    two.worker.start(producers.set_held)  # behind what the other one has left there
    os.kill(two.owner.process.pid, signal.SIGCONT)
    assert two.worker.finish() == "none"
    two.owner.call(producers.await_log, "has reserved a promise")
    two.owner.call(producers.await_log, "gives a promise back")
    assert two.owner.call(producers.values_of_made) == [0.0]


def test_a_shutdown_fails_what_is_pending_and_does_not_wait(two: Two) -> None:
    """For the call that is always under way, which would be answered seconds later."""
    two.held()
    two.owner.call(network.set_lost_after, 3600.0)
    two.held()  # asked with that limit, or answered with the one before
    two.worker.start(producers.shut_down)
    said = two.owner.call(producers.shut_down)
    two.worker.finish()
    # Whoever of the two leaves first.
    assert said.startswith("BrokenPromiseError: ") and re.search(
        r"torch\.distributed\.rpc was shut down while|has left torch\.distributed\.rpc", said
    )
    said = two.worker.call(producers.error_of_setting_held)
    assert said.startswith("BrokenPromiseError") and "shut down in this process" in said


def test_all_shut_down_whoever_had_to_do_with_promises() -> None:
    """One has values of all sizes, one small ones, one none. Twice; and nobody says anything."""
    check_python(
        """
        from torch.distributed import rpc

        SIZES = {1: [10, 1_000_000, 10], 2: [10, 10]}

        def make(rank):
            promises = [dtorch_ops.TensorPromise("network") for _ in SIZES.get(rank, [])]
            futures.extend(promise.get_future() for promise in promises)
            return promises

        def run(rank, port):
            rpc._init_counter = 0
            dtorch_ops.network.init(
                rank=rank, world_size=4, init_method=f"tcp://127.0.0.1:{port}", interface="lo"
            )
            sizes = SIZES.get(rank, [])
            promises = rpc.rpc_sync("worker0", make, (rank,)) if sizes else []
            for promise, size in zip(promises, sizes, strict=True):
                promise.set_value(torch.ones(size))
            del promises
            dtorch_ops.network.shutdown()
            if rank == 0:
                assert sorted(f.wait(0).numel() for f in futures) == [10, 10, 10, 10, 1_000_000]
                futures.clear()

        futures = []
        for port in sys.argv[1:]:
            children = []
            for rank in range(4):
                child = os.fork()
                if child == 0:
                    run(rank, port)
                    os._exit(0)
                children.append(child)
            for child in children:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
        args=(str(free_port()), str(free_port())),
    )


def test_an_owner_may_exit_without_a_shutdown_as_it_is_asked_and_told() -> None:
    said = run_python(
        """
        import pickle
        from torch.distributed import rpc

        def flood(pickled):
            begun = threading.Barrier(5)

            def ask():
                promise = pickle.loads(pickled)
                promise.is_pending()
                begun.wait()
                try:
                    while True:
                        promise.is_pending()
                except dtorch_ops.BrokenPromiseError:
                    over.release()

            for _ in range(4):
                threading.Thread(target=ask, daemon=True).start()
            begun.wait()

        def run(rank, port):
            rpc._init_counter = 0
            dtorch_ops.network.init(
                rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}", interface="lo"
            )
            if rank == 0:
                promise = dtorch_ops.TensorPromise("network")
                rpc.rpc_sync("worker1", flood, (pickle.dumps(promise),))
                sys.exit()  # all that Python does at its end
            for _ in range(4):
                assert over.acquire(timeout=30)
            os._exit(0)

        over = threading.Semaphore(0)
        port = sys.argv[1]
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                run(rank, port)
            children.append(child)
        print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
        """,
        args=(str(free_port()),),
    )
    assert said.stdout == "[0, 0]\n", said.stderr


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ({"rank": 2}, "rank: expected 0 to 1, for 2 workers, got 2"),
        ({"rank": -1}, "rank: expected 0 to 1, for 2 workers, got -1"),
        ({"rank": 0, "init_method": "127.0.0.1:1"}, "init_method: expected 'env://' or 'tcp://"),
        ({"rank": 0, "interface": "nope0"}, "interface: expected one of lo.*, got 'nope0'"),
    ],
    ids=["rank", "negative", "init_method", "interface"],
)
def test_init_says_what_is_wrong_and_leaves_nothing(
    argument: dict[str, Any], expected: str
) -> None:
    said = check_python(
        """
        before = dict(os.environ), dtorch_ops.network.lost_after()
        try:
            dtorch_ops.network.init(world_size=2, lost_after=5, **eval(sys.argv[1]))
        except ValueError as error:
            print(error)
        assert (dict(os.environ), dtorch_ops.network.lost_after()) == before
        """,
        args=(repr({"init_method": "tcp://127.0.0.1:1"} | argument),),
    )
    assert re.match(expected, said), said


@pytest.mark.parametrize("wrong", ["5", None])
def test_a_limit_is_a_number(wrong: Any) -> None:
    with pytest.raises(TypeError, match="seconds: expected a number, got"):
        network.set_lost_after(wrong)


# ---- Accelerators -------------------------------------------------------------------------------


def test_values_of_an_accelerator_come_through_the_host(worker: Worker) -> None:
    """Reserved at once, and sent when they are there."""
    promises = [Promise() for _ in range(3)]
    futures = [promise.get_future() for promise in promises]
    worker.call(producers.set_on_accelerator, promises, 10.0, 1000)
    for index, future in enumerate(futures):
        assert torch.equal(future.wait(LIMIT_MS).cpu(), torch.full((1000,), 10.0 + index))


@pytest.mark.parametrize("strided", [False, True], ids=["whole", "strided"])
def test_rpc_maps_of_devices_spare_the_host(two: Two, strided: bool) -> None:
    """What is sent lies on the device, and has its device's name where it arrives."""
    for each in (two.owner, two.worker):
        each.call(producers.know_the_accelerator)
    two.join_again(True)
    two.held(3)
    two.worker.call(producers.listen_to_log)
    two.worker.call(producers.set_held_on_accelerator, 10.0, 1000, strided)
    two.worker.call(producers.await_log, "is sent from there", 3)
    assert two.owner.call(producers.sums_of_made) == [10_000.0, 11_000.0, 12_000.0]
    assert two.owner.call(producers.devices_of_made) == [accelerators.DEVICES[-1]] * 3


@pytest.fixture
def reserving(mortal: Worker, tmp_path: Path) -> Callable[[Any], Worker]:
    """A worker that has reserved a promise, and does no more."""
    ready = str(tmp_path / "ready")
    os.mkfifo(ready)

    def reserve(promise: Any) -> Worker:
        mortal.start(producers.set_on_a_stuck_stream, promise, ready)
        with open(ready):
            return mortal

    return reserve


def test_a_reserved_promise_of_a_worker_that_dies_is_broken(
    reserving: Callable[[Any], Worker],
) -> None:
    promise, future = pending()
    mortal = reserving(promise)
    assert not promise.is_pending() and not promise.cancel()
    mortal.kill()
    with pytest.raises(BrokenPromiseError, match=f"connection to worker '{mortal.name}' is lost"):
        future.wait(LIMIT_MS)


def test_a_reserved_promise_of_a_worker_that_dies_is_left_to_those_who_hold_it_too(
    reserving: Callable[[Any], Worker], worker: Worker
) -> None:
    promise, future = pending()
    worker.call(producers.hold, promise)
    mortal = reserving(promise)
    assert worker.call(producers.set_held) == "PromiseAlreadySatisfiedError"
    mortal.kill()
    until(promise.is_pending)
    assert worker.call(producers.set_held) == "none"
    assert future.wait(LIMIT_MS).item() == 0.0
    worker.call(producers.release)


def test_a_device_that_is_not_there_is_said_in_a_line(worker: Worker) -> None:
    promise = Promise(device="xpu")
    future = promise.get_future()
    worker.call(producers.set_full, promise, 1.0)
    with pytest.raises(dtorch_ops.DTorchError, match="expected a device that") as raised:
        future.wait(LIMIT_MS)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 200


def test_rpc_may_be_initialised_again(two: Two) -> None:
    two.held()
    two.join_again()
    two.held()
    assert two.worker.call(producers.set_held) == "none"
    assert two.owner.call(producers.values_of_made) == [0.0]
