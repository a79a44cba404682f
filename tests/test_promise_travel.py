"""The ways by which a promise gets to another process, and on to the next."""

from __future__ import annotations

import concurrent.futures
import copy
import io
import multiprocessing
import pickle
import queue
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import producers
import pytest
import torch
import torch.multiprocessing
from forked import check
from helpers import ROOT, check_python
from peer import Peer
from producers import Promise

import dtorch_ops

LIMIT_MS = 30_000
cloudpickle = pytest.importorskip("cloudpickle")


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with Peer() as process:
        yield process


@pytest.fixture(scope="module")
def forked_peer() -> Iterator[Peer]:
    with Peer("fork") as process:
        yield process


def pending(cls: Any = Promise) -> tuple[Any, Any]:
    promise = cls()
    return promise, promise.get_future()


# ---- Carriers -----------------------------------------------------------------------------------


@dataclass
class Task:
    name: str
    promise: Promise
    extra: dict[str, Promise] = field(default_factory=dict)


# What another process can unpickle with pickle alone.
PICKLED: dict[str, Callable[[Any], bytes]] = {
    **{f"protocol {n}": lambda p, n=n: pickle.dumps(p, n) for n in range(6)},
    "python's own pickler": lambda p: _dumped_in_python(p),
    "cloudpickle": cloudpickle.dumps,
    "multiprocessing": lambda p: bytes(multiprocessing.reduction.ForkingPickler.dumps(p)),
}


def _dumped_in_python(promise: Promise) -> bytes:
    file = io.BytesIO()
    pickle._Pickler(file).dump(promise)  # type: ignore[attr-defined]
    return file.getvalue()


@pytest.mark.parametrize("dumps", PICKLED.values(), ids=PICKLED.keys())
def test_pickled_by(peer: Peer, dumps: Any) -> None:
    promise, future = pending()
    data = dumps(promise)
    assert len(data) < 400
    peer.call(producers.load_and_set, data, 2.0)
    assert future.wait(LIMIT_MS).item() == 2.0


def set_task(task: Task) -> None:
    for index, name in enumerate(task.extra):
        task.extra[name].set_value(torch.tensor(float(index)))
    task.promise.set_value(torch.tensor(9.0))


def set_nested(value: Any) -> int:
    """Sets every promise in it to how many were set before; their number."""
    done: list[Promise] = []

    def walk(item: Any) -> None:
        if isinstance(item, Promise):
            if not any(item is other for other in done):
                item.set_value(torch.tensor(float(len(done))))
                done.append(item)
        elif isinstance(item, dict):
            walk(list(item.values()))
        elif isinstance(item, (list, tuple)):
            for each in item:
                walk(each)

    walk(value)
    return len(done)


def test_within_other_objects(peer: Peer) -> None:
    promises = [pending() for _ in range(3)]
    a, b, c = (promise for promise, _ in promises)
    peer.call(set_task, Task("t", a, {"b": b, "c": c}))
    values = dtorch_ops.wait_all([future for _, future in promises], LIMIT_MS)
    assert [v.item() for v in values] == [9.0, 0.0, 1.0]
    promises = [pending() for _ in range(3)]
    a, b, c = (promise for promise, _ in promises)
    assert peer.call(set_nested, {"x": [a, {"y": (b, [a])}], "z": (a, b, c)}) == 3
    values = dtorch_ops.wait_all([future for _, future in promises], LIMIT_MS)
    assert [v.item() for v in values] == [0.0, 1.0, 2.0]


def call_pickled(function: bytes) -> None:
    cloudpickle.loads(function)()


def test_in_a_closure_by_cloudpickle(peer: Peer) -> None:
    promise, future = pending()
    void, done = pending(dtorch_ops.VoidPromise)

    def closure() -> None:
        promise.set_value(torch.tensor(3.0))
        void.set_value()

    peer.call(call_pickled, cloudpickle.dumps(closure))
    assert future.wait(LIMIT_MS).item() == 3.0
    assert done.wait(LIMIT_MS) is None


def set_token(kind: str, token: str) -> None:
    promise = getattr(dtorch_ops, kind).from_token(token)
    promise.set_value(*([torch.tensor(4.0)] if kind == "TensorPromise" else []))


def test_as_a_token(peer: Peer) -> None:
    for cls in (Promise, dtorch_ops.VoidPromise):
        promise, future = pending(cls)
        assert len(promise.token()) < 150 and " " not in promise.token()
        assert promise.token() == promise.token()
        peer.call(set_token, cls.__name__, promise.token())
        value = future.wait(LIMIT_MS)
        assert value is None if cls is dtorch_ops.VoidPromise else value.item() == 4.0


def test_on_a_command_line() -> None:
    promise, future = pending()
    code = (
        "import sys, torch, dtorch_ops\n"
        "dtorch_ops.TensorPromise.from_token(sys.argv[1]).set_value(torch.arange(3.0))\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, promise.token()]
    done = subprocess.run(command, check=True, timeout=60, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", ""), "a resource tracker warns of leaks, say"
    assert future.wait(LIMIT_MS).tolist() == [0.0, 1.0, 2.0]


class Holding(torch.nn.Module):
    """Fulfils the promises that it brings along."""

    def __init__(self, promise: Any, done: Any) -> None:
        super().__init__()
        self.promise = promise
        self.done = done

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.ops.dtorch.get_tensor(x * 2, self.promise)
        torch.ops.dtorch.sync(self.done)
        return x


def run_saved(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.jit.load(io.BytesIO(data))
        module(torch.full((1000,), 3.0))


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("made_by", ["dtorch_ops", "torch.classes"])
def test_in_a_scripted_module_that_is_saved(peer: Peer, made_by: str) -> None:
    """It is loaded, and run, by another process."""
    place: Any = dtorch_ops if made_by == "dtorch_ops" else torch.classes.dtorch
    promise, done = place.TensorPromise(), place.VoidPromise()
    future = dtorch_ops.TensorFuture(torch.ops.dtorch.get_future(promise))
    finished = dtorch_ops.VoidFuture(torch.ops.dtorch.get_future(done))
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Holding(promise, done)), file)
    peer.call(run_saved, file.getvalue())
    assert future.wait(LIMIT_MS).unique().tolist() == [6.0]
    assert finished.wait(LIMIT_MS) is None


def test_torch_s_own_objects_of_the_classes(peer: Peer) -> None:
    """As a scripted function makes them."""
    for name, function in (("TensorPromise", producers.set_full), ("VoidPromise", None)):
        promise = getattr(torch.classes.dtorch, name)()
        future = dtorch_ops.Future(torch.ops.dtorch.get_future(promise))
        if function is None:
            peer.call(producers.set_void, promise)
        else:
            peer.call(function, promise, 2.0)
        value = future.wait(LIMIT_MS)
        assert value is None if name == "VoidPromise" else value.tolist() == [2.0] * 3


# ---- Pools and queues ---------------------------------------------------------------------------


def make_and_take(give: Any) -> float:
    """The other direction: this process has made the promise, whoever gets its token fulfils it."""
    promise, future = pending()
    give.send(pickle.dumps(promise))
    return future.wait(LIMIT_MS).item()


def set_from_queue(promises: Any) -> None:
    while (item := promises.get()) is not None:
        promise, value = item
        promise.set_value(torch.full((200,), value))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_processes_queues_and_pipes_in_both_directions(method: str) -> None:
    context = torch.multiprocessing.get_context(method)
    tasks: Any = context.SimpleQueue()
    worker = context.Process(target=set_from_queue, args=(tasks,))
    worker.start()
    futures = []
    for index in range(100):
        promise, future = pending()
        tasks.put((promise, float(index)))
        futures.append(future)
    del promise
    values = dtorch_ops.wait_all(futures, LIMIT_MS)
    assert [v[0].item() for v in values] == [float(i) for i in range(100)]
    tasks.put(None)
    worker.join(30)
    ours, theirs = context.Pipe()
    maker = context.Process(target=make_and_take, args=(theirs,))
    maker.start()
    producers.load_and_set(ours.recv(), 6.0)
    maker.join(30)
    assert (worker.exitcode, maker.exitcode) == (0, 0)
    ours.close()
    theirs.close()
    tasks.close()


def set_and_return(promise: Promise, value: float) -> float:
    promise.set_value(torch.tensor(value))
    return value


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_in_a_process_pool(method: str) -> None:
    context = multiprocessing.get_context(method)
    promises = [pending() for _ in range(20)]
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        jobs = [
            pool.submit(set_and_return, promise, float(i))
            for i, (promise, _) in enumerate(promises)
        ]
        values = dtorch_ops.wait_all([future for _, future in promises], LIMIT_MS)
        assert [job.result(60) for job in jobs] == [v.item() for v in values]
    lost, never = pending()
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        job = pool.submit(producers.leave, lost)
        with pytest.raises(concurrent.futures.process.BrokenProcessPool):
            job.result(60)
    with pytest.raises(dtorch_ops.BrokenPromiseError):
        never.wait(LIMIT_MS)


def test_thousands_to_many_workers() -> None:
    check(
        """
        def worker(link):
            while data := hear(link):
                for promise, value in pickle.loads(data):
                    promise.set_value(torch.full((50,), value))
        workers = [forked(worker) for _ in range(12)]
        promises = [pending() for _ in range(6000)]
        for first in range(0, 6000, 100):
            chunk = [(promises[i][0], float(i)) for i in range(first, first + 100)]
            workers[first // 100 % 12].say(pickle.dumps(chunk))
        values = dtorch_ops.wait_all([future for _, future in promises], LIMIT * 1000)
        assert all(v[0].item() == v[49].item() == i for i, v in enumerate(values))
        assert dtorch_ops.stats()["outstanding"] == 0
        for w in workers:
            w.say(b"")
            w.end()
        """
    )


# ---- On and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["drop", "kill"])
def test_passed_on_from_worker_to_worker(peer: Peer, end: str) -> None:
    """The first worker may end, or let go, before the second has unpickled it."""
    promise, future = pending()
    with Peer("fork") as first:
        first.call(producers.hold, promise)
        data = first.call(producers.dump_held)
        if end == "kill":
            first.kill()
        else:
            first.call(producers.release)
    with pytest.raises(TimeoutError):
        future.wait(200)
    peer.call(producers.load_and_set, data, 7.0)
    assert future.wait(LIMIT_MS).item() == 7.0


def test_passed_on_and_dropped_breaks_it(peer: Peer, forked_peer: Peer) -> None:
    promise, future = pending()
    forked_peer.call(producers.hold, promise)
    data = forked_peer.call(producers.dump_held)
    forked_peer.call(producers.release)
    peer.call(load_and_drop, data)
    with pytest.raises(dtorch_ops.BrokenPromiseError):
        future.wait(LIMIT_MS)


def test_unpickled_and_dropped_at_once(peer: Peer) -> None:
    for end in (load_and_forget, load_twice_and_forget):
        promise, future = pending()
        peer.call(end, pickle.dumps(promise))
        with pytest.raises(dtorch_ops.BrokenPromiseError):
            future.wait(LIMIT_MS)


def load_and_forget(data: bytes) -> None:
    pickle.loads(data)


def load_twice_and_forget(data: bytes) -> None:
    first, second = pickle.loads(data), pickle.loads(data)
    del first
    assert second.is_pending()


@pytest.mark.parametrize("end", ["set", "drop", "kill"])
def test_inherited_by_a_fork_and_passed_on_from_there(end: str) -> None:
    """To one that was forked before the promise was made; the child that passed it on ends."""
    check(
        f"""
        def last(link):
            promise = pickle.loads(hear(link))
            assert promise.is_pending()
            say(link)
            hear(link)
            if {end!r} == "set":
                promise.set_value(torch.arange(1000.0))
            if {end!r} == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        last = forked(last)
        promise, future = pending()
        def child(link):
            say(link, pickle.dumps(promise))
        child = forked(child)
        data = child.hear()
        child.end()
        del promise
        assert not future.is_ready()
        last.say(data)
        last.hear()
        assert not future.is_ready()
        last.say()
        if {end!r} == "set":
            assert torch.equal(value_of(future), torch.arange(1000.0))
        else:
            broken(future)
        last.end(-signal.SIGKILL if {end!r} == "kill" else 0)
        """
    )


def load_and_drop(data: bytes) -> None:
    assert pickle.loads(data).is_pending()


def test_along_a_chain_of_workers() -> None:
    check(
        """
        def worker(link):
            while data := hear(link):
                promise = pickle.loads(data)
                data = pickle.dumps(promise)
                del promise
                say(link, data)
        workers = [forked(worker) for _ in range(5)]
        for round in range(20):
            promise, future = pending()
            data = pickle.dumps(promise)
            del promise
            for w in workers:
                w.say(data)
                data = w.hear()
            assert not future.is_ready()
            pickle.loads(data).set_value(torch.tensor(float(round)))  # at home again
            assert value_of(future).item() == round
        promise, future = pending()
        workers[0].say(pickle.dumps(promise))
        workers[1].say(workers[0].hear())
        last = pickle.loads(workers[1].hear())
        del promise
        assert not future.is_ready()
        del last
        broken(future)
        for w in workers:
            w.say(b"")
            w.end()
        """
    )


def test_copies_are_the_promise_itself() -> None:
    promise, future = pending()
    assert copy.copy(promise) is promise
    again = copy.deepcopy([promise, {"p": promise}])
    assert again[0] is promise and again[1]["p"] is promise  # type: ignore[index]
    promise.set_value(torch.ones(1))
    assert future.wait(LIMIT_MS).item() == 1.0


@pytest.mark.parametrize("how", ["pickle", "token"])
def test_unpickled_at_home_it_is_a_producer_like_any_other(how: str) -> None:
    ways: dict[str, Callable[[Promise], Promise]] = {
        "pickle": lambda p: pickle.loads(pickle.dumps(p)),
        "token": lambda p: Promise.from_token(p.token()),
    }
    promise, future = pending()
    again = ways[how](promise)
    del promise
    again.set_value(torch.ones(2))
    assert future.wait(LIMIT_MS).tolist() == [1.0, 1.0]
    with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError):
        pickle.dumps(again)
    with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError):
        again.token()
    # Dropped unset by its last holder it is broken, whoever still has the owner's own object.
    promise, future = pending()
    first, second = ways[how](promise), ways[how](promise)
    del first
    assert second.is_pending()
    del second
    with pytest.raises(dtorch_ops.BrokenPromiseError):
        future.wait(LIMIT_MS)
    with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError):
        promise.set_value(torch.ones(1))


def test_in_a_queue_of_this_process() -> None:
    tokens: queue.Queue[str] = queue.Queue()
    promise, future = pending()
    tokens.put(promise.token())
    del promise
    Promise.from_token(tokens.get()).set_value(torch.ones(1))
    assert future.wait(LIMIT_MS).item() == 1.0


# ---- What is refused ----------------------------------------------------------------------------


def test_mode_memory_stays_and_mode_file_travels(forked_peer: Peer) -> None:
    with pytest.raises(dtorch_ops.DTorchError, match="memory"):
        pickle.dumps(Promise(mode="memory"))
    promise = Promise(mode="file")
    future = promise.get_future()
    forked_peer.call(producers.set_full, promise, 2.0)
    assert future.wait(LIMIT_MS).tolist() == [2.0] * 3


def test_a_token_that_means_nothing_is_refused() -> None:
    for text in ("", "hello", "dtorch1-t-1-1-1-1-1-00-0-1", Promise().token() + "x"):
        with pytest.raises(ValueError, match="token"):
            Promise.from_token(text)
    with pytest.raises(ValueError, match="VoidPromise"):
        Promise.from_token(dtorch_ops.VoidPromise().token())
    with pytest.raises(ValueError, match="TensorPromise"):
        dtorch_ops.VoidPromise.from_token(Promise().token())
    with pytest.raises(TypeError, match="string"):
        Promise.from_token(3)  # type: ignore[arg-type]


def test_an_owner_that_is_gone_is_named() -> None:
    token = check_python("print(dtorch_ops.TensorPromise().token(), end='')")
    with pytest.raises(dtorch_ops.DTorchError, match="has ended"):
        Promise.from_token(token)
