"""How processes end that have promises in shared memory: by themselves, or killed at any moment."""

from __future__ import annotations

import textwrap

import fresh
import pytest
from forked import check

# ---- The end of the process ---------------------------------------------------------------------

# Workers that end with the process that they serve, and say nothing.
_WORKERS = """
def hold(link):
    held = []
    try:
        while True:
            held.append(pickle.loads(hear(link)))
            say(link)
    except (AssertionError, TimeoutError):
        pass

def set_on(link):
    try:
        while True:
            for promise in pickle.loads(hear(link)):
                try:
                    promise.set_value(torch.ones(1000))
                except dtorch_ops.BrokenPromiseError:
                    pass
                del promise
    except (AssertionError, TimeoutError):
        pass

holder, setter = forked(hold), forked(set_on)

def held_elsewhere(cls=dtorch_ops.TensorPromise):
    promise, future = pending(cls)
    holder.say(pickle.dumps(promise))
    holder.hear()
    return future

value = torch.ones(1)
"""

# How often, since most of what can go wrong does so now and then; and how the program ends.
_ENDINGS: dict[str, tuple[int, str]] = {
    "outstanding": (
        6,
        """
        futures = [held_elsewhere() for _ in range(20)] + [held_elsewhere(dtorch_ops.VoidPromise)]
        unsent = [pending() for _ in range(5)]
        tokens = [promise.token() for promise, _ in unsent]
        class Noisy:
            def __del__(self):
                pass
        for future in futures:
            future.add_done_callback(lambda f, n=Noisy(): print(f.value()))
        chained = [future.then(lambda f, n=Noisy(): f.value()) for future in futures]
        group, first = dtorch_ops.collect_all(chained), dtorch_ops.collect_any(futures)
        iterator = dtorch_ops.as_completed(futures)
        """,
    ),
    "waiting threads": (
        6,
        """
        future = held_elsewhere()
        for wait in (
            future.get, lambda: future.wait(60000), lambda: dtorch_ops.wait_all([future]),
            lambda: list(dtorch_ops.as_completed([future])),
            lambda: torch.ops.dtorch.wait_for(future, 60000),
            lambda: dtorch_ops.collect_all([future]).get(),
        ):
            threading.Thread(target=wait, daemon=True).start()
        async def main():
            await asyncio.gather(future, future, future.then(lambda f: f.value()))
        threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
        """,
    ),
    "completing": (
        20,
        """
        begun = threading.Semaphore(0)
        def callback(f):
            f.value()
            begun.release()
            sum(range(100))
        promises = [pending() for _ in range(400)]
        for _, future in promises:
            future.add_done_callback(callback)
        chained = [f.then(lambda f: f.value()).then(callback) for _, f in promises]
        groups = [dtorch_ops.collect_all(chained[i:]) for i in range(0, 400, 10)]
        setter.say(pickle.dumps([promise for promise, _ in promises]))
        for _ in range(20):
            begun.acquire()
        """,
    ),
    "completing without callbacks": (
        10,
        """
        promises = [pending() for _ in range(400)]
        setter.say(pickle.dumps([promise for promise, _ in promises]))
        dtorch_ops.collect_any([future for _, future in promises]).wait()
        kept = [future.value() for _, future in promises if future.is_ready()]
        """,
    ),
    "inside callbacks": (
        6,
        """
        never = held_elsewhere()
        entered = [threading.Event() for _ in range(3)]
        def waits(f):
            entered[0].set()
            never.get()
        def sleeps(f):
            entered[1].set()
            time.sleep(60)
        def computes(f):
            entered[2].set()
            while True:
                sum(range(100))
        for callback in (waits, sleeps, computes):
            for hang in ("add_done_callback", "then"):
                promise, future = pending()
                getattr(future, hang)(callback)
                setter.say(pickle.dumps([promise]))
                del promise
        for event in entered:
            event.wait()
        """,
    ),
    "breaking": (
        10,
        """
        begun = threading.Event()
        futures = [held_elsewhere() for _ in range(50)]
        for future in futures:
            future.add_done_callback(lambda f: begun.set())
        os.kill(holder.pid, signal.SIGKILL)
        begun.wait()
        """,
    ),
    "handler registered after import": (
        4,
        """
        import atexit
        promise, future = pending()
        data = pickle.dumps([promise])
        def at_exit():
            called = threading.Event()
            future.add_done_callback(lambda f: called.set())
            setter.say(data)
            assert future.get().sum() == 1000
            assert called.wait(10)
        atexit.register(at_exit)
        """,
    ),
}


@pytest.mark.parametrize(("runs", "ending"), _ENDINGS.values(), ids=_ENDINGS.keys())
def test_a_process_with_promises_elsewhere_exits_cleanly(runs: int, ending: str) -> None:
    check(_WORKERS + textwrap.dedent(ending), runs=runs, timeout=10)


_EARLY_HANDLER = """
import asyncio, atexit, os, pickle, socket, sys, threading
import torch

def at_exit():
    promise = dtorch_ops.TensorPromise()
    future = promise.get_future()
    called = threading.Event()
    future.add_done_callback(lambda f: called.set())
    send([promise, outstanding])
    del promise
    assert future.get().item() == 3
    assert called.wait(10)
    async def main():
        return await outstanding.get_future()
    assert asyncio.run(main()).item() == 3
    local = dtorch_ops.TensorPromise()
    local.set_value(torch.ones(1))
    assert local.get_future().get().item() == 1
    print("handler done", flush=True)

atexit.register(at_exit)
ours, theirs = socket.socketpair()
if os.fork() == 0:
    import dtorch_ops
    ours.close()
    data = theirs.makefile("rb")
    while size := data.read(4):
        for promise in pickle.loads(data.read(int.from_bytes(size, "little"))):
            promise.set_value(torch.tensor(3.0))
            del promise
    os._exit(0)
theirs.close()

import dtorch_ops

def send(promises):
    data = pickle.dumps(promises)
    ours.sendall(len(data).to_bytes(4, "little") + data)
"""


def test_handlers_registered_before_our_import_still_use_promises_of_other_processes() -> None:
    """They run after ours, last in, first out."""
    said = fresh.check(
        """
        outstanding = dtorch_ops.TensorPromise()
        pending = dtorch_ops.TensorPromise()
        pending.token()
        """,
        prelude=_EARLY_HANDLER,
        runs=4,
        timeout=10,
    )
    assert said == "handler done\n"


@pytest.mark.parametrize("leave", ["sys.exit(0)", "return"])
def test_so_do_those_that_a_forked_child_has_inherited(leave: str) -> None:
    """Whose promises its parent has too; the child ends as any program does."""
    end = "sys.exit(0)" if leave == "sys.exit(0)" else "pass"
    said = fresh.check(
        f"""
        import warnings
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="unclosed", category=ResourceWarning)
        outstanding = dtorch_ops.TensorPromise()
        outstanding.token()
        inherited = dtorch_ops.TensorPromise()
        waiting = inherited.get_future()
        waiting.add_done_callback(lambda f: None)
        pid = os.fork()
        if pid == 0:
            # A socket, and with it a worker, of its own would be needed for what crosses.
            send = lambda promises: [p.set_value(torch.tensor(3.0)) for p in promises]
            outstanding = dtorch_ops.TensorPromise()
            {end}
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert code == 0, code
            assert not waiting.is_ready()
            inherited.set_value(torch.ones(1))
            waiting.get()
        """,
        prelude=_EARLY_HANDLER,
        runs=3,
        timeout=15,
    )
    assert said == "handler done\n" * 2


@pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])
def test_a_worker_fulfils_promises_in_its_handlers_too(how: str) -> None:
    """In those that were registered before our import; multiprocessing has its own for them."""
    fresh.check(
        f"""
        import atexit, multiprocessing, multiprocessing.util, pickle, warnings
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        read, write = os.pipe()
        def work():
            os.close(write)
            def at_exit():
                for number, promise in enumerate(promises):
                    promise.set_value(torch.full((50_000,), float(number)))
            if {how!r} == "os.fork":
                atexit.register(at_exit)
            else:
                multiprocessing.util.Finalize(None, at_exit, exitpriority=1)
            import dtorch_ops
            with open(read, "rb") as pipe:
                promises = pickle.load(pipe)
        if {how!r} == "os.fork":
            pid = os.fork()
            if pid == 0:
                work()
                sys.exit(0)
        else:
            process = multiprocessing.get_context("fork").Process(target=work)
            process.start()
        os.close(read)
        import dtorch_ops
        promises = [dtorch_ops.TensorPromise() for _ in range(10)]
        futures = [promise.get_future() for promise in promises]
        with open(write, "wb") as pipe:
            pickle.dump(promises, pipe)
        del promises
        for number, value in enumerate(dtorch_ops.wait_all(futures, 10_000)):
            assert value.unique().tolist() == [number]
        if {how!r} == "os.fork":
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        else:
            process.join(10)
            assert process.exitcode == 0
        """,
        prelude="import os, sys\nimport torch\n",
        runs=4,
        timeout=15,
    )


@pytest.mark.parametrize(
    ("end", "exit_code"),
    [("raise ValueError('unhandled')", 1), ("sys.exit(7)", 7), ("os._exit(8)", 8)],
)
def test_the_exit_code_is_the_programs_own(end: str, exit_code: int) -> None:
    outcomes = fresh.run(
        f"""
        import socket
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        future.add_done_callback(lambda f: print(f.value()))
        token = promise.token()
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            held = dtorch_ops.TensorPromise.from_token(token)
            theirs.sendall(b".")
            theirs.recv(1)
            os._exit(0)
        theirs.close()
        assert ours.recv(1) == b"."
        threading.Thread(target=future.get, daemon=True).start()
        {end}
        """,
        runs=4,
        timeout=10,
    )
    for outcome in outcomes:
        assert outcome.exit_code == exit_code, outcome
        assert outcome.stdout == ""
        assert outcome.stderr.count("Error") == (1 if exit_code == 1 else 0), outcome.stderr


# ---- Killed -------------------------------------------------------------------------------------

_COUNTS = """
import random, select
rng = random.Random(5)
SIZES = [3, 1000, 100_000, 2_000_000]

def counts():
    gc.collect()
    with open("/proc/self/maps") as maps:
        mappings = sum("memfd:dtorch_ops" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), mappings

def kill(child):
    os.kill(child.pid, signal.SIGKILL)
    child.end(-signal.SIGKILL)
    child.link.close()

def spin():  # for less than the copy of a large value takes
    for _ in range(rng.randrange(20_000)):
        pass
"""


def test_workers_that_are_killed_in_the_midst_of_it_leave_nothing() -> None:
    """Each value has come whole, or its promise is broken."""
    check(
        _COUNTS
        + textwrap.dedent("""
        def worker(link):
            for number, promise in enumerate(pickle.loads(hear(link))):
                promise.set_value(torch.full((SIZES[number % 4],), float(number)))
            hear(link)
        def one_round():
            promises = [pending() for _ in range(12)]
            futures = [future for _, future in promises]
            child = forked(worker)
            child.say(pickle.dumps([promise for promise, _ in promises]))
            del promises
            value_of(futures[rng.randrange(12)])
            spin()
            kill(child)
            broke = 0
            for number, future in enumerate(futures):
                try:
                    value = future.wait(LIMIT * 1000)
                except dtorch_ops.BrokenPromiseError:
                    broke += 1
                else:
                    assert value.shape == (SIZES[number % 4],)
                    assert bool((value == number).all()), "torn"
            return broke
        def settled():
            until(lambda: dtorch_ops.stats()["producers"] == 0)
            until(lambda: dtorch_ops.stats()["received_bytes"] == 0)
            return dtorch_ops.stats(), counts()
        shm = set(os.listdir("/dev/shm"))
        for _ in range(10):
            one_round()
        before = settled()
        broke = sum(one_round() for _ in range(60))
        assert 0 < broke < 60 * 12, broke
        after = settled()
        assert after == before, (before, after)
        assert set(os.listdir("/dev/shm")) == shm
        """),
        timeout=90,
    )


def test_consumers_that_are_killed_in_the_midst_of_it_leave_nothing() -> None:
    """The worker is told so at its next value, and goes on."""
    check(
        _COUNTS
        + textwrap.dedent("""
        def consumer(link):
            promises = [pending() for _ in range(12)]
            for _, future in promises[::3]:
                future.add_done_callback(lambda f: None)
            say(link, pickle.dumps([promise for promise, _ in promises]))
            kept = []
            while True:
                for _, future in promises:
                    kept.append(future.wait(LIMIT * 1000))
                hear(link)
        def one_round():
            child = forked(consumer)
            promises = pickle.loads(child.hear())
            last = rng.randrange(12)
            told = 0
            for number, promise in enumerate(promises):
                if number == last:
                    spin()
                    kill(child)
                try:
                    promise.set_value(torch.full((SIZES[number % 4],), float(number)))
                except dtorch_ops.BrokenPromiseError as error:
                    assert "ended" in str(error), error
                    told += 1
                    assert number >= last
                else:
                    assert number < last, "set for nobody"
            assert told == 12 - last
        def settled():
            # What belonged to a consumer goes when the next one is attached to.
            child = forked(consumer)
            promises = pickle.loads(child.hear())
            now = dtorch_ops.stats(), counts()
            kill(child)  # before the promises go, which it would be told
            return now
        shm = set(os.listdir("/dev/shm"))
        for _ in range(10):
            one_round()
        before = settled()
        for _ in range(60):
            one_round()
        after = settled()
        assert after == before, (before, after)
        assert set(os.listdir("/dev/shm")) == shm
        """),
        timeout=90,
    )


def test_the_memory_goes_when_both_were_killed() -> None:
    """The system's own count of shared memory says so: 100 MB of it each time."""
    check(
        _COUNTS
        + textwrap.dedent("""
        def shared():
            with open("/proc/meminfo") as meminfo:
                return next(int(line.split()[1]) for line in meminfo if line[:6] == "Shmem:") >> 10
        def worker(link):
            promise = pickle.loads(hear(link))
            promise.set_value(torch.ones(25_000_000))
            hear(link)
        def consumer(link):
            promise, future = pending()
            say(link, pickle.dumps(promise))
            kept = value_of(future)
            say(link)
            hear(link)
        start = shared()
        for first in ("worker", "consumer"):
            for _ in range(10):
                producer, owner = forked(worker), forked(consumer)
                producer.say(owner.hear())
                owner.hear()
                for child in (producer, owner) if first == "worker" else (owner, producer):
                    kill(child)
        until(lambda: shared() < start + 500)
        """),
        timeout=90,
    )


# ---- How soon -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["kill", "exit", "drop"])
@pytest.mark.parametrize("how", ["wait", "callback"])
def test_a_promise_breaks_as_soon_as_the_kernel_tells_of_the_death(end: str, how: str) -> None:
    """Within a tenth of a second: the median of some, for the machine may be busy."""
    check(
        f"""
        import select
        def worker(link):
            promise = pickle.loads(hear(link))
            say(link)
            hear(link)
            if {end!r} == "drop":
                del promise
                say(link)
                hear(link)
        delays = []
        for _ in range(15):
            promise, future = pending()
            child = forked(worker)
            pidfd = os.pidfd_open(child.pid)
            child.say(pickle.dumps(promise))
            child.hear()
            told = []
            if {how!r} == "callback":
                called = threading.Event()
                future.add_done_callback(lambda f: (told.append(time.monotonic()), called.set()))
            else:
                def wait():
                    try:
                        future.wait(LIMIT * 1000)
                    except dtorch_ops.BrokenPromiseError:
                        told.append(time.monotonic())
                waiter = threading.Thread(target=wait)
                waiter.start()
            assert not future.is_ready()
            if {end!r} == "kill":
                os.kill(child.pid, signal.SIGKILL)
            else:
                child.say()
            if {end!r} == "drop":
                child.hear()
            else:
                assert select.select([pidfd], [], [], LIMIT)[0]
            start = time.monotonic()
            if {how!r} == "callback":
                assert called.wait(LIMIT)
            else:
                waiter.join(LIMIT)
                assert not waiter.is_alive()
            broken(future)
            delays.append(told[0] - start)
            if {end!r} == "drop":
                child.say()
            child.end(-signal.SIGKILL if {end!r} == "kill" else 0)
            os.close(pidfd)
            child.link.close()
        assert sorted(delays)[7] < 0.1, delays
        """
    )
