"""Ctrl-C, a wall clock that is set, the end of the process, and fork."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import fresh
import pytest
from helpers import PRELUDE, ROOT

# ---- Ctrl-C -------------------------------------------------------------------------------------

_INTERRUPT = """
promise = dtorch_ops.TensorPromise()
future = promise.get_future()
stock = torch.futures.Future()
sent = []

def main_sleeps():
    with open(f"/proc/self/task/{os.getpid()}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "S"

def send(signum=signal.SIGINT):
    asleep = 0
    while asleep < 5:  # it has got the interpreter lock meanwhile if it wanted that
        time.sleep(0.01)
        asleep = asleep + 1 if main_sleeps() else 0
    sent.append(time.monotonic())
    os.kill(os.getpid(), signum)

def sending(*args):
    thread = threading.Thread(target=send, args=args)
    thread.start()
    return thread
"""


def test_ctrl_c_ends_every_wait_within_a_second_and_the_future_lives_on() -> None:
    fresh.check(
        _INTERRUPT
        + textwrap.dedent("""
        handle = dtorch_ops.Future(stock)
        waits = dict(
            get=lambda: future.get(),
            wait=lambda: future.wait(),
            wait_ms=lambda: future.wait(60000),
            wait_all=lambda: dtorch_ops.wait_all([dtorch_ops.sync_future(), future]),
            wait_all_ms=lambda: dtorch_ops.wait_all([future], 60000),
            as_completed=lambda: next(dtorch_ops.as_completed([future])),
            for_as_completed=lambda: list(dtorch_ops.as_completed([future, future], 60000)),
            collect=lambda: dtorch_ops.collect_all([future]).get(),
            then=lambda: future.then(lambda f: f.value()).get(),
            stock=lambda: handle.get(),
            wait_for_operator=lambda: torch.ops.dtorch.wait_for(future, 60000),
            wait_all_operator=lambda: torch.ops.dtorch.wait_all([future, future]),
        )
        for name, wait in waits.items():
            print(name, flush=True)
            thread = sending()
            try:
                wait()
                raise AssertionError("not interrupted")
            except KeyboardInterrupt:
                assert time.monotonic() - sent[-1] < 1
            thread.join()
            assert future.valid() and handle.valid() and not future.is_ready()
        promise.set_value(torch.ones(1))
        stock.set_result(torch.ones(1))
        for wait in reversed(waits.values()):
            wait()
        assert not future.valid() and not handle.valid()
        """),
        timeout=20,
    )


def test_a_wait_goes_on_after_a_signal_that_is_handled() -> None:
    """The handler may even set the promise that the wait is for."""
    fresh.check(
        _INTERRUPT
        + textwrap.dedent("""
        handled = []
        signal.signal(signal.SIGUSR1, lambda *_: handled.append(1))
        thread = sending(signal.SIGUSR1)
        start = time.monotonic()
        try:
            future.wait(1000)
            raise AssertionError
        except TimeoutError:
            assert time.monotonic() - start >= 1
        thread.join()
        assert handled == [1]

        signal.signal(signal.SIGINT, lambda *_: promise.set_value(torch.tensor(5.0)))
        thread = sending()
        assert future.get() == torch.tensor(5.0)
        assert time.monotonic() - sent[-1] < 1
        thread.join()
        """)
    )


def test_the_error_that_a_handler_raises_ends_the_wait() -> None:
    fresh.check(
        _INTERRUPT
        + textwrap.dedent("""
        class Alarm(Exception):
            pass
        def handler(*_):
            raise Alarm("ring", 2)
        signal.signal(signal.SIGALRM, handler)
        thread = sending(signal.SIGALRM)
        try:
            future.get()
            raise AssertionError
        except Alarm as error:
            assert error.args == ("ring", 2)
        thread.join()
        assert future.valid()
        """)
    )


def test_a_storm_of_signals_neither_shortens_nor_stretches_a_limit() -> None:
    fresh.check("""
        future = (promise := dtorch_ops.TensorPromise()).get_future()
        ticks = []
        signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        for wait in (future.wait, lambda ms: dtorch_ops.wait_all([future], ms)):
            start = time.monotonic()
            try:
                wait(300)
                raise AssertionError
            except TimeoutError:
                assert 0.3 <= time.monotonic() - start < 5
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert ticks
    """)


def test_ctrl_c_reaches_the_main_thread_while_others_wait_on() -> None:
    fresh.check(
        _INTERRUPT
        + textwrap.dedent("""
        got = []
        others = [threading.Thread(target=lambda: got.append(future.wait())) for _ in range(4)]
        for other in others:
            other.start()
        thread = sending()
        try:
            future.get()
            raise AssertionError
        except KeyboardInterrupt:
            pass
        thread.join()
        assert all(other.is_alive() for other in others)
        promise.set_value(torch.ones(1))
        for other in others:
            other.join(10)
        assert len(got) == 4
        """)
    )


@pytest.mark.parametrize("timeout_ms", [None, 60_000])
@pytest.mark.parametrize("main_first", [True, False])
def test_ctrl_c_reaches_the_main_thread_in_an_iteration_that_others_share(
    main_first: bool, timeout_ms: int | None
) -> None:
    """The others wait on, and between them they still get every future once."""
    fresh.check(
        _INTERRUPT
        + textwrap.dedent(f"""
        promises = [dtorch_ops.TensorPromise() for _ in range(4)]
        futures = [p.get_future() for p in promises]
        iterator = dtorch_ops.as_completed(futures, {timeout_ms})
        got = []
        def consume():
            for future in iterator:
                got.append(future)
        others = [threading.Thread(target=consume, daemon=True) for _ in range(3)]
        def start_others():
            for other in others:
                other.start()
            asleep = 0
            while asleep < 5 * len(others):
                time.sleep(0.005)
                for other in others:
                    with open(f"/proc/self/task/{{other.native_id}}/stat") as stat:
                        if stat.read().rpartition(")")[2].split()[0] == "S":
                            asleep += 1
                        else:
                            asleep = 0
        def start_others_and_send():
            asleep = 0
            while asleep < 5:
                time.sleep(0.01)
                asleep = asleep + 1 if main_sleeps() else 0
            start_others()
            send()
        if {main_first}:
            thread = threading.Thread(target=start_others_and_send)
            thread.start()
        else:
            start_others()
            thread = sending()
        try:
            next(iterator)
            raise AssertionError("not interrupted")
        except KeyboardInterrupt:
            assert time.monotonic() - sent[-1] < 1
        thread.join()
        assert not got and all(other.is_alive() for other in others)
        for promise in promises:
            promise.set_value(torch.ones(1))
        got.extend(iterator)
        for other in others:
            other.join(10)
            assert not other.is_alive()
        assert sorted(map(id, got)) == sorted(map(id, futures))
        """)
    )


def test_ctrl_c_in_a_callback_that_waits() -> None:
    """It ends that wait; setting the promise has succeeded, and the other callbacks run."""
    fresh.check(
        _INTERRUPT
        + textwrap.dedent("""
        seen = []
        sys.unraisablehook = lambda u: seen.append(u.exc_type)
        first = dtorch_ops.TensorPromise()
        first.get_future().add_done_callback(lambda f: future.get())
        first.get_future().add_done_callback(lambda f: seen.append("next"))
        thread = sending()
        first.set_value(torch.ones(1))
        thread.join()
        assert seen == [KeyboardInterrupt, "next"]
        assert future.valid()
        """)
    )


# ---- The wall clock -----------------------------------------------------------------------------

_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <sys/time.h>
#include <time.h>

static volatile long shift;
void jump(long seconds) { shift = seconds; }

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*next)(clockid_t, struct timespec *);
  if (!next) next = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int rc = next(clock, now);
  if (rc == 0 && clock == CLOCK_REALTIME) now->tv_sec += shift;
  return rc;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec real;
  (void)zone;
  int rc = clock_gettime(CLOCK_REALTIME, &real);
  now->tv_sec = real.tv_sec;
  now->tv_usec = real.tv_nsec / 1000;
  return rc;
}

time_t time(time_t *result) {
  struct timespec real;
  clock_gettime(CLOCK_REALTIME, &real);
  if (result) *result = real.tv_sec;
  return real.tv_sec;
}
"""


@pytest.mark.parametrize("backend", ["memory", "file", "file, with a listener"])
def test_a_wall_clock_that_jumps_an_hour_changes_no_limit(tmp_path: Path, backend: str) -> None:
    """Back, which would stretch a limit measured on it, and forward, which would end it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "the package is built with a C compiler, and so is this test"
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(_SHIM)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl"], check=True, timeout=60
    )
    script = PRELUDE + textwrap.dedent(f"""
        import ctypes
        jump = ctypes.CDLL(None).jump
        jump.argtypes = [ctypes.c_long]
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        if {backend!r} != "memory":
            promise.token()
        if "listener" in {backend!r}:
            future.add_done_callback(lambda f: None)
        waits = [
            lambda: future.wait(300),
            lambda: dtorch_ops.wait_all([future], 300),
            lambda: list(dtorch_ops.as_completed([future], 300)),
            lambda: torch.ops.dtorch.wait_for(future, 300),
        ]
        for seconds in (-3600, 3600):
            for wait in waits:
                jumps = threading.Timer(0.1, jump, [seconds])
                wall, start = time.time(), time.monotonic()
                jumps.start()
                try:
                    wait()
                    raise AssertionError
                except TimeoutError:
                    passed = time.monotonic() - start
                    assert 0.3 <= passed < 5, passed
                assert abs(time.time() - wall - seconds) < 60, "the shim does nothing"
                jumps.join()
                jump(0)
        promise.set_value(torch.ones(1))
        future.get()
    """)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=os.environ | {"LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- The end of the process ---------------------------------------------------------------------

# How often, since most of what can go wrong does so now and then; and how the program ends.
_ENDINGS: dict[str, tuple[int, str]] = {
    "outstanding": (
        20,
        """
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        child = future.then(lambda f: f.value())
        groups = [dtorch_ops.collect_all([future]), dtorch_ops.collect_any([future, child])]
        iterator = dtorch_ops.as_completed([future])
        stock = torch.futures.Future()
        handle = dtorch_ops.Future(stock)
        group = dtorch_ops.collect_all([stock, future])
        class Noisy:
            def __del__(self):
                pass
        noisy = Noisy()
        future.add_done_callback(lambda f, n=noisy: print(f.value()))
        noisy_child = future.then(lambda f, n=noisy: print(f.value()))
        noisy_child.add_done_callback(lambda f, n=noisy: print(f.value()))
        handle.then(lambda f, n=noisy: print(f.value()))
    """,
    ),
    "completing": (
        20,
        """
        promises = [dtorch_ops.TensorPromise() for _ in range(400)]
        lasts = []
        for p in promises:
            f = p.get_future()
            f.add_done_callback(lambda f: sum(range(100)))
            lasts.append(f.then(lambda f: f.value()).then(lambda f: sum(range(100))))
        groups = [dtorch_ops.collect_all(lasts[i:]) for i in range(0, 400, 10)]
        begun = threading.Event()
        def complete():
            for i, p in enumerate(promises):
                if i % 3:
                    p.set_value(value)
                else:
                    p.set_exception(ValueError(i))
                if i == 20:
                    begun.set()
        threading.Thread(target=complete, daemon=True).start()
        begun.wait()
    """,
    ),
    "completing_without_callbacks": (
        10,
        """
        begun = threading.Event()
        def complete():
            while True:
                begun.set()
                for _ in range(400):
                    p = dtorch_ops.TensorPromise()
                    f = p.get_future()
                    p.set_value(value)
                    f.get()
                    p = dtorch_ops.TensorPromise()
                    f = p.get_future()
                    del p
        threading.Thread(target=complete, daemon=True).start()
        begun.wait()
    """,
    ),
    "waiting_threads": (
        20,
        """
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
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
    "waking_threads": (
        10,
        """
        # They are woken, and want the interpreter lock, while the interpreter goes away.
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        def wait():
            try:
                while True:
                    try:
                        future.wait(1)
                    except TimeoutError:
                        pass
            finally:
                future.is_ready()
        threads = [threading.Thread(target=wait, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
    """,
    ),
    "inside_callbacks": (
        10,
        """
        gate = dtorch_ops.VoidPromise()
        opened = gate.get_future()
        entered = [threading.Event() for _ in range(3)]
        def waits(f):
            entered[0].set()
            opened.get()
        def sleeps(f):
            entered[1].set()
            time.sleep(60)
        def computes(f):
            entered[2].set()
            while True:
                sum(range(100))
        for callback in (waits, sleeps, computes):
            for hang in ("add_done_callback", "then"):
                promise = dtorch_ops.TensorPromise()
                getattr(promise.get_future(), hang)(callback)
                threading.Thread(
                    target=promise.set_value, args=(value,), daemon=True
                ).start()
        for event in entered:
            event.wait()
    """,
    ),
    "callbacks_that_raise": (
        20,
        """
        # The hook that is told of it, and the error's own methods, wait for the interpreter lock.
        def hook(unraisable, sleep=time.sleep):
            sleep(0.0002)
        sys.unraisablehook = hook
        class Bad(Exception):
            def __init__(self, *arguments, sleep=time.sleep):
                super().__init__(*arguments)
                sleep(0.0001)
            def __reduce__(self, sleep=time.sleep):
                sleep(0.0001)
                return Bad, self.args
        def bad(f):
            raise Bad("of a callback")
        begun = threading.Event()
        def complete(hang):
            while True:
                p = dtorch_ops.VoidPromise()
                hang(p.get_future())
                p.set_value()
                begun.set()
        for hang in (
            lambda f: f.add_done_callback(bad),
            lambda f: f.then(bad),
            lambda f: f.then(bad).then(bad).add_done_callback(bad),
            lambda f: dtorch_ops.collect_all([f]).add_done_callback(bad),
        ):
            threading.Thread(target=complete, args=(hang,), daemon=True).start()
        begun.wait()
    """,
    ),
    "closures_with_finalizers": (
        20,
        """
        # The last reference to what a callback closes over goes with the callback: there, in the
        # thread that completes the future, Python code runs.
        devnull = open(os.devnull, "w")
        dropped = threading.Event()
        class Closed:
            def __del__(self, time=time, print=print, devnull=devnull, dropped=dropped):
                dropped.set()
                print("dropped", file=devnull, flush=True)
                time.sleep(0.0002)
        def complete():
            while True:
                p = dtorch_ops.VoidPromise()
                f = p.get_future()
                f.add_done_callback(lambda f, c=Closed(): None)
                f.then(lambda f, c=Closed(): None)
                g = f.then(lambda f, c=Closed(): 1)
                g.then(lambda f, c=Closed(): None)
                dtorch_ops.collect_any([f, g]).add_done_callback(lambda f, c=Closed(): None)
                del f, g
                p.set_value()
                del p
        for _ in range(2):
            threading.Thread(target=complete, daemon=True).start()
        dropped.wait()
    """,
    ),
    "values_with_finalizers": (
        20,
        """
        # As above, of what a callback has returned, which goes with the future.
        devnull = open(os.devnull, "w")
        dropped = threading.Event()
        class Value:
            def __del__(self, time=time, print=print, devnull=devnull, dropped=dropped):
                dropped.set()
                print("dropped", file=devnull, flush=True)
                time.sleep(0.0002)
        def complete():
            while True:
                p = dtorch_ops.VoidPromise()
                f = p.get_future()
                f.then(lambda f: Value()).then(lambda f: f.value())
                del f
                p.set_value()
                del p
        for _ in range(2):
            threading.Thread(target=complete, daemon=True).start()
        dropped.wait()
    """,
    ),
    "errors_with_finalizers": (
        20,
        """
        # As above, of what a callback has raised.
        dropped = threading.Event()
        class Bad(Exception):
            def __del__(self, sleep=time.sleep, dropped=dropped):
                dropped.set()
                sleep(0.0002)
        def bad(f):
            raise Bad("of a callback")
        def complete():
            while True:
                p = dtorch_ops.VoidPromise()
                p.get_future().then(bad)
                p.set_value()
                del p
        for _ in range(2):
            threading.Thread(target=complete, daemon=True).start()
        dropped.wait()
    """,
    ),
    "closures_that_are_never_called": (
        20,
        """
        # The promise goes, and then the future, in a thread that the interpreter does not wait for.
        devnull = open(os.devnull, "w")
        dropped = threading.Event()
        class Closed:
            def __del__(self, time=time, print=print, devnull=devnull, dropped=dropped):
                dropped.set()
                print("dropped", file=devnull, flush=True)
                time.sleep(0.0002)
        def drop():
            while True:
                stock = torch.futures.Future()
                f = dtorch_ops.Future(stock)
                f.add_done_callback(lambda f, c=Closed(): None)
                f.then(lambda f, c=Closed(): None).then(lambda f, c=Closed(): None)
                dtorch_ops.collect_any([f]).add_done_callback(lambda f, c=Closed(): None)
                del stock, f
        for _ in range(2):
            threading.Thread(target=drop, daemon=True).start()
        dropped.wait()
    """,
    ),
    "handler_registered_after_import": (
        6,
        """
        import atexit
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        def at_exit():
            setter = threading.Thread(target=promise.set_value, args=(torch.ones(1),))
            setter.start()
            assert future.get() == torch.ones(1)
            setter.join()
        atexit.register(at_exit)
    """,
    ),
    "destructors_at_the_very_end": (
        6,
        """
        class Last:
            def __init__(self):
                self.pending = dtorch_ops.TensorPromise()
                self.future = self.pending.get_future()
                self.future.add_done_callback(lambda f: None)
            def __del__(self, make=dtorch_ops.TensorPromise, value=value, late=TimeoutError):
                promise = make()
                future = promise.get_future()
                promise.set_value(value)
                assert future.get() is value
                try:
                    self.future.wait(1)
                except late:
                    pass
                self.pending.set_value(value)
                self.future.get()
        last = Last()
        sys.last_of_all = Last()
        torch.another = Last()
    """,
    ),
}


@pytest.mark.parametrize(("runs", "ending"), _ENDINGS.values(), ids=_ENDINGS.keys())
def test_a_process_with_futures_outstanding_exits_cleanly(runs: int, ending: str) -> None:
    # No daemon thread calls torch: at exit that alone ends the process with an abort.
    fresh.check("value = torch.ones(1)\n" + textwrap.dedent(ending), runs=runs, timeout=10)


def test_handlers_registered_before_our_import_still_use_futures() -> None:
    """They run after ours, last in, first out."""
    fresh.check(
        """
        import atexit
        def at_exit():
            promise = dtorch_ops.TensorPromise()
            future = promise.get_future()
            future.add_done_callback(lambda f: seen.append("called"))
            seen = []
            setter = threading.Thread(target=promise.set_value, args=(torch.ones(1),))
            setter.start()
            assert future.get() == torch.ones(1)
            setter.join()
            assert seen == ["called"]
            outstanding.set_exception(KeyError("k"))
            try:
                dtorch_ops.wait_all([outstanding.get_future()], 10000)
                raise AssertionError
            except KeyError:
                pass
            async def main():
                return await dtorch_ops.to_torch_async(torch.ones(1))
            assert asyncio.run(main()) == torch.ones(1)
            print("handler done")
        atexit.register(at_exit)
        import dtorch_ops
        outstanding = dtorch_ops.TensorPromise()
        """,
        runs=20,
        timeout=10,
        prelude=PRELUDE.replace("import dtorch_ops", ""),
    )


@pytest.mark.parametrize(
    ("end", "exit_code"),
    [("raise ValueError('unhandled')", 1), ("sys.exit(7)", 7), ("os._exit(8)", 8)],
)
def test_the_exit_code_is_the_programs_own(end: str, exit_code: int) -> None:
    outcomes = fresh.run(
        f"""
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        future.add_done_callback(lambda f: print(f.value()))
        threading.Thread(target=future.get, daemon=True).start()
        {end}
        """,
        runs=20 if exit_code == 1 else 2,
        timeout=10,
    )
    for outcome in outcomes:
        assert outcome.exit_code == exit_code, outcome
        if exit_code == 1:
            assert outcome.stderr.startswith("Traceback (most recent call last):")
            assert outcome.stderr.count("Error") == 1, outcome.stderr
        else:
            assert outcome.stderr == ""


def test_an_unhandled_error_of_a_future_ends_the_program_as_any_other() -> None:
    (outcome,) = fresh.run("""
        def the_producer(promise):
            try:
                raise KeyError("of the producer")
            except KeyError as error:
                promise.set_exception(error)
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        the_producer(promise)
        future.get()
    """)
    assert outcome.exit_code == 1
    assert "in the_producer" in outcome.stderr
    assert outcome.stderr.rstrip().endswith("KeyError: 'of the producer'")


# ---- fork ---------------------------------------------------------------------------------------

# in_child(function) runs it in a forked child, with a limit, and fails if it failed.
_FORK = """
import warnings
warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)

def in_child(function, *args, leave=os._exit):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)  # a child that hangs is killed
        code = 1
        try:
            function(*args)
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
            sys.stderr.flush()
        signal.alarm(0)
        leave(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code != -signal.SIGALRM, "the child hangs"
    assert code == 0, f"the child ended with {code}"

def refused(call):
    try:
        call()
    except dtorch_ops.DTorchError as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError("expected a DTorchError that names the fork")

async def awaited(future):
    return await future

promise = dtorch_ops.TensorPromise(mode="memory")
future = promise.get_future()
"""


def test_a_child_that_waits_for_a_future_of_its_parent_is_told_so() -> None:
    """Only the parent can complete it; then the parent does."""
    fresh.check(
        _FORK
        + textwrap.dedent("""
        void = dtorch_ops.VoidPromise()
        waits = dict(
            get=lambda: future.get(),
            wait=lambda: future.wait(),
            wait_ms=lambda: future.wait(60000),
            another_handle=lambda: promise.get_future().get(),
            another_class=lambda: dtorch_ops.Future(future).get(),
            bare=lambda: dtorch_ops.Future(torch.ops.dtorch.get_future(promise)).get(),
            void=lambda: void.get_future().get(),
            coroutine=lambda: asyncio.run(awaited(future)),
            wait_all=lambda: dtorch_ops.wait_all([dtorch_ops.sync_future(), future]),
            wait_all_ms=lambda: dtorch_ops.wait_all([future], 60000),
            collect_all=lambda: dtorch_ops.collect_all([future]).get(),
            collect_any=lambda: dtorch_ops.collect_any([future]).get(),
            as_completed=lambda: list(dtorch_ops.as_completed([future])),
            wait_for_operator=lambda: torch.ops.dtorch.wait_for(future, 60000),
            wait_all_operator=lambda: torch.ops.dtorch.wait_all([future]),
            collect_operator=lambda: torch.ops.dtorch.collect_all([future]).wait(),
        )
        for name, wait in waits.items():
            print(name, flush=True)
            in_child(refused, wait)
            in_child(refused, lambda: (refused(wait), wait()))
        promise.set_value(torch.ones(1))
        void.set_value()
        for wait in reversed(waits.values()):
            wait()
        """)
    )


@pytest.mark.parametrize(
    ("made", "where"),
    [
        ("future.then(lambda f: 1)", "parent"),
        ("future.then(lambda f: 1)", "child"),
        ("future.then(lambda f: 1).then(lambda f: 2)", "parent"),
        ("dtorch_ops.collect_all([future])", "parent"),
        ("dtorch_ops.collect_any([future])", "parent"),
    ],
)
def test_a_child_that_waits_for_what_depends_on_its_parent_is_told_so(
    made: str, where: str
) -> None:
    fresh.check(
        _FORK
        + textwrap.dedent(f"""
        depends = {made}
        def child():
            mine = depends if {where!r} == "parent" else {made}
            mine.wait(60000)
        in_child(refused, child)
        in_child(refused, lambda: asyncio.run(awaited(depends)))
        promise.set_value(torch.ones(1))
        depends.get()
        """)
    )


def test_a_child_can_read_what_was_complete_and_looks_without_blocking() -> None:
    fresh.check(
        _FORK
        + textwrap.dedent("""
        done = dtorch_ops.to_torch_async(torch.tensor(3.0))
        kept = dtorch_ops.TensorPromise()
        kept.set_exception(KeyError("k"))
        failed = kept.get_future()
        def child():
            assert not future.is_ready() and not future.done() and future.valid()
            assert "pending" in repr(future)
            try:
                future.value()
                raise AssertionError
            except dtorch_ops.DTorchError:
                pass
            assert done.get() == torch.tensor(3.0)
            assert dtorch_ops.wait_all([done]) == [torch.tensor(3.0)]
            for _ in range(2):
                try:
                    failed.wait()
                    raise AssertionError
                except KeyError as error:
                    assert error.args == ("k",)
        in_child(child)
        assert done.get() == torch.tensor(3.0)
        """)
    )


def test_a_child_cannot_fulfil_a_memory_promise_of_its_parent() -> None:
    fresh.check(
        _FORK
        + textwrap.dedent("""
        void = dtorch_ops.VoidPromise(mode="memory")
        done = dtorch_ops.TensorPromise()
        done.set_value(torch.ones(1))
        def child():
            for call in (
                lambda: promise.set_value(torch.ones(1)),
                lambda: promise.set_exception(KeyError()),
                lambda: promise.cancel(),
                lambda: torch.ops.dtorch.get_tensor(torch.ones(1), promise),
                lambda: void.set_value(),
                lambda: void.set_exception(KeyError()),
                lambda: void.cancel(),
                lambda: torch.ops.dtorch.sync(void),
            ):
                refused(call)
                refused(call)
            assert promise.is_pending() and void.is_pending()
            try:
                done.set_value(torch.ones(1))
                raise AssertionError
            except dtorch_ops.DTorchError:
                pass
        in_child(child)
        assert not future.is_ready()
        promise.set_value(torch.tensor(2.0))
        assert future.get() == torch.tensor(2.0)
        void.set_value()
        void.get_future().get()
        """)
    )


def test_a_child_that_drops_what_it_inherited_breaks_nothing() -> None:
    fresh.check(
        _FORK
        + textwrap.dedent("""
        seen = []
        future.add_done_callback(lambda f: seen.append(1))
        box = [promise]
        futures = [future, future.then(lambda f: 1), dtorch_ops.collect_all([future])]
        del promise
        def child():
            global future
            box.clear()
            del future
            futures.clear()
            gc.collect()
            assert seen == []
            # New futures may lie where the old ones lay.
            for _ in range(1000):
                p = dtorch_ops.TensorPromise()
                f = p.get_future()
                try:
                    f.wait(0)
                except TimeoutError:
                    p.set_value(torch.ones(1))
                assert f.get() == torch.ones(1)
        in_child(child)
        assert not future.is_ready()
        box[0].set_value(torch.tensor(2.0))
        assert future.get() == torch.tensor(2.0) and seen == [1]
        """)
    )


_OWN_WORK = """
def own_work():
    p = dtorch_ops.TensorPromise()
    f = p.get_future()
    seen = []
    f.add_done_callback(lambda f: seen.append(f.value()))
    child = f.then(lambda f: f.value() + 1)
    group = dtorch_ops.collect_all([f, child])
    try:
        f.wait(1)
        raise AssertionError
    except TimeoutError:
        pass
    got = []
    waiter = threading.Thread(target=lambda: got.append(group.get()))
    waiter.start()
    async def main():
        setter = threading.Thread(target=p.set_value, args=(torch.ones(1),))
        asyncio.get_running_loop().call_soon(setter.start)
        assert await f == torch.ones(1)
        setter.join()
    asyncio.run(main())
    waiter.join(10)
    assert got and seen == [torch.ones(1)] and child.get() == torch.tensor([2.0])
    assert f.get() == torch.ones(1)
    q = dtorch_ops.TensorPromise()
    g = q.get_future()
    q.set_exception(KeyError("k"))
    try:
        g.get()
        raise AssertionError
    except KeyError:
        pass
    r = dtorch_ops.VoidPromise()
    h = r.get_future()
    del r
    try:
        h.get()
        raise AssertionError
    except dtorch_ops.BrokenPromiseError:
        pass
    assert dtorch_ops.to_torch(torch.ones(1)) == torch.ones(1)
    dtorch_ops.sync()
"""


@pytest.mark.parametrize("used_before", [True, False], ids=["after_use", "before_use"])
def test_a_child_has_futures_of_its_own_and_so_have_its_children(used_before: bool) -> None:
    before = "own_work()" if used_before else "del promise, future"
    fresh.check(
        _FORK
        + _OWN_WORK
        + textwrap.dedent(f"""
        {before}
        def child():
            own_work()
            in_child(grandchild)
            own_work()
        def grandchild():
            own_work()
            in_child(own_work)
        in_child(child)
        own_work()
        in_child(child)
        """)
    )


@pytest.mark.parametrize("leave", ["os._exit", "sys.exit", "raise", "return"])
def test_however_a_child_ends_its_parent_is_unaffected(leave: str) -> None:
    """Among them the ways that run the exit handlers and destructors of all it inherited."""
    fresh.check(
        _FORK
        + _OWN_WORK
        + textwrap.dedent(f"""
        seen = []
        future.add_done_callback(lambda f: seen.append(os.getpid()))
        child_future = future.then(lambda f: f.value())
        got = []
        waiters = [
            threading.Thread(target=lambda w=w: got.append(w()), daemon=True)
            for w in (future.wait, child_future.wait, lambda: dtorch_ops.wait_all([future]))
        ]
        for waiter in waiters:
            waiter.start()
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                signal.alarm(15)
                break
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        if pid == 0:
            own_work()
            refused(lambda: promise.set_value(torch.ones(1)))
            if {leave!r} == "os._exit":
                os._exit(0)
            if {leave!r} == "sys.exit":
                sys.exit(0)
            if {leave!r} == "raise":
                raise SystemExit(0)
        else:
            assert not future.is_ready() and not got
            promise.set_value(torch.tensor(2.0))
            for waiter in waiters:
                waiter.join(10)
            assert len(got) == 3 and seen == [os.getpid()]
            assert child_future.get() == torch.tensor(2.0)
        """),
        runs=3,
    )


def test_threads_that_wait_in_the_parent_do_not_exist_in_the_child() -> None:
    """What they left on their stacks is not touched when the child completes the same future."""
    fresh.check(
        _FORK
        + textwrap.dedent("""
        def recurse(depth):
            return depth and recurse(depth - 1)
        for wait in (
            lambda f: dtorch_ops.Future(f).wait(60000),
            lambda f: torch.ops.dtorch.wait_for(f, 60000),
            lambda f: dtorch_ops.wait_all([f]),
            lambda f: next(dtorch_ops.as_completed([f])),
        ):
            stock = torch.futures.Future()
            waiters = [
                threading.Thread(target=wait, args=(stock,), daemon=True) for _ in range(8)
            ]
            for waiter in waiters:
                waiter.start()
            try:
                dtorch_ops.Future(stock).wait(100)
            except TimeoutError:
                pass
            def child():
                go = threading.Event()
                def use_a_stack():
                    recurse(300)
                    go.wait()
                    recurse(300)
                threads = [threading.Thread(target=use_a_stack) for _ in range(16)]
                for thread in threads:
                    thread.start()
                stock.set_result(torch.ones(1))
                assert dtorch_ops.Future(stock).get() == torch.ones(1)
                go.set()
                for thread in threads:
                    thread.join()
            in_child(child)
            stock.set_result(torch.zeros(1))
            for waiter in waiters:
                waiter.join(10)
                assert not waiter.is_alive()
        """)
    )


def test_a_child_completes_a_stock_future_that_its_parent_watches() -> None:
    fresh.check(
        _FORK
        + textwrap.dedent("""
        stock = torch.futures.Future()
        seen = []
        handle = dtorch_ops.Future(stock)
        handle.add_done_callback(lambda f: seen.append(f.value()))
        child_future = handle.then(lambda f: f.value() + 1)
        group = dtorch_ops.collect_all([stock, handle])
        iterator = dtorch_ops.as_completed([stock])
        def child():
            stock.set_result(1)
            assert seen == [1] and handle.get() == 1
            assert child_future.get() == 2
            assert group.get()[1] is handle
            assert next(iterator) is stock
        in_child(child)
        assert not handle.is_ready() and not group.is_ready()
        stock.set_result(10)
        assert child_future.get() == 11 and seen == [10] and next(iterator) is stock
        """)
    )


def test_multiprocessing_by_fork_with_a_promise_as_argument() -> None:
    """Nothing is pickled there: the child inherits the promise, of a mode that cannot travel."""
    fresh.check(
        _FORK
        + _OWN_WORK
        + textwrap.dedent("""
        import multiprocessing
        def work(promise, future, answers):
            own_work()
            refused(lambda: promise.set_value(torch.ones(1)))
            refused(lambda: future.wait(60000))
            answers.put("done")
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        process = context.Process(target=work, args=(promise, future, answers))
        process.start()
        assert answers.get(timeout=20) == "done"
        process.join(20)
        assert process.exitcode == 0
        with context.Pool(2) as pool:
            pool.starmap(work_in_pool := own_work, [()] * 4)
        answers.close()
        answers.join_thread()
        assert not future.is_ready()
        promise.set_value(torch.ones(1))
        future.get()
        """)
    )


def test_fifty_forks_while_other_threads_hammer_futures() -> None:
    """No lock of ours is left taken in the child by a thread that it does not have."""
    fresh.check(
        _FORK
        + _OWN_WORK
        + textwrap.dedent("""
        stop = threading.Event()
        errors = []
        sys.setswitchinterval(1e-5)
        def hammer(number):
            try:
                while not stop.is_set():
                    promises = [dtorch_ops.TensorPromise() for _ in range(20)]
                    futures = [p.get_future() for p in promises]
                    group = dtorch_ops.collect_all(futures)
                    any_of = dtorch_ops.collect_any([future, *futures])
                    children = [f.then(lambda f: f.value()) for f in futures]
                    try:
                        future.wait(0.01)
                    except TimeoutError:
                        pass
                    for p in promises:
                        p.set_value(torch.ones(1))
                    dtorch_ops.wait_all(children)
                    group.get()
                    any_of.get()
                    list(dtorch_ops.as_completed(futures))
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=hammer, args=(n,), daemon=True) for n in range(3)]
        for thread in threads:
            thread.start()
        def child():
            own_work()
            refused(lambda: future.wait(60000))
            refused(lambda: promise.set_value(torch.ones(1)))
        for _ in range(50):
            in_child(child)
        stop.set()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert not errors, errors
        promise.set_value(torch.ones(1))
        future.get()
        """),
        timeout=60,
    )


def test_fork_in_a_thread_and_in_a_callback() -> None:
    fresh.check(
        _FORK
        + _OWN_WORK
        + textwrap.dedent("""
        def child():
            own_work()
            refused(lambda: future.wait(60000))
        thread = threading.Thread(target=in_child, args=(child,))
        thread.start()
        thread.join()
        forked = []
        def callback(f):
            in_child(own_work)
            forked.append(f.value())
        future.add_done_callback(callback)
        promise.set_value(torch.ones(1))
        assert forked == [torch.ones(1)]
        """)
    )
