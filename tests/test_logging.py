"""What is logged, and that nothing is where nobody asks; futures that stay pending."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fresh
import pytest
import torch
from futures import LIMIT, blocked_in, pending, ready
from helpers import ROOT, Worker
from peer import Peer

import dtorch_ops
from dtorch_ops import _logging
from dtorch_ops.pending import report_pending


class Records(logging.Handler):
    """Keeps what is logged, and waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._more = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._more:
            self.records.append(record)
            self._more.notify_all()

    def until(self, text: str) -> logging.LogRecord:
        with self._more:
            assert self._more.wait_for(lambda: self.having(text), LIMIT), self.texts()
            return self.having(text)[0]

    def having(self, text: str) -> list[logging.LogRecord]:
        return [record for record in self.records if text in record.getMessage()]

    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def records() -> Iterator[Records]:
    """What is logged meanwhile; the level is for the test to set."""
    handler, logger = Records(), logging.getLogger("dtorch_ops")
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    yield handler
    logger.setLevel(logging.NOTSET)
    _logging._reader.stop()  # nothing of this test is left for the next one
    logging.getLogger("dtorch_ops.promise").setLevel(logging.NOTSET)
    logger.propagate = propagate
    logger.removeHandler(handler)


def log_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dtorch_ops-log"]


# ---- Logging ------------------------------------------------------------------------------------


def test_nothing_is_logged_and_no_thread_runs_at_first():
    assert log_threads() == []
    assert logging.getLogger("dtorch_ops").level == logging.NOTSET


def test_a_promise_is_logged_from_its_making_to_its_completion(records):
    logging.getLogger("dtorch_ops").setLevel(logging.DEBUG)
    promise, future = pending()
    promise.set_value(torch.ones(2))
    address = records.until("made, of future").getMessage().split()[-1]
    completed = records.until(f"{address} is completed")
    assert records.having(f"set, of future {address}")
    assert (completed.name, completed.levelname) == ("dtorch_ops.future", "DEBUG")
    assert completed.thread == threading.get_native_id()
    assert completed.threadName == threading.current_thread().name
    assert abs(completed.created - time.time()) < LIMIT
    assert future.is_ready()


def test_a_level_leaves_out_what_is_below(records):
    logging.getLogger("dtorch_ops").setLevel(logging.INFO)
    promise, _ = pending()
    promise.cancel()
    records.until("cancelled, of future")
    assert {record.levelno for record in records.records} == {logging.INFO}


def test_a_component_has_a_level_of_its_own(records):
    logging.getLogger("dtorch_ops").setLevel(logging.DEBUG)
    logging.getLogger("dtorch_ops.promise").setLevel(logging.WARNING)
    promise, _ = pending()
    promise.set_value(torch.ones(2))
    records.until("is completed")
    assert {record.name for record in records.records} == {"dtorch_ops.future"}


def test_switched_off_it_is_silent_and_there_is_one_thread(records):
    logger = logging.getLogger("dtorch_ops")
    for _ in range(3):
        logger.setLevel(logging.DEBUG)
        assert len(log_threads()) == 1
        logger.setLevel(logging.NOTSET)
    before = len(records.records)
    ready()
    logger.setLevel(logging.INFO)
    promise, _ = pending()
    promise.cancel()
    records.until("cancelled, of future")
    assert len(records.records) == before + 1


def test_a_handler_may_use_the_library(records):
    class Uses(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "cancelled" in record.getMessage():
                ready()
                logging.getLogger("dtorch_ops").setLevel(logging.NOTSET)

    uses = Uses()
    logger = logging.getLogger("dtorch_ops")
    logger.addHandler(uses)
    try:
        logger.setLevel(logging.INFO)
        promise, _ = pending()
        promise.cancel()
        records.until("cancelled, of future")
    finally:
        logger.removeHandler(uses)


def test_who_logs_does_not_wait_for_who_reads(records):
    class Blocks(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.entered, self.go_on = threading.Event(), threading.Event()

        def emit(self, record: logging.LogRecord) -> None:
            self.entered.set()
            assert self.go_on.wait(LIMIT)

    blocks = Blocks()
    logger = logging.getLogger("dtorch_ops")
    logger.addHandler(blocks)
    try:
        logger.setLevel(logging.DEBUG)
        ready()
        assert blocks.entered.wait(LIMIT)
        for _ in range(4000):  # each says three things, and there is room for 10,000
            ready()
    finally:
        blocks.go_on.set()
        logger.removeHandler(blocks)
    records.until("messages were lost")


def _set(promise: dtorch_ops.TensorPromise) -> int:
    promise.set_value(torch.ones(1000))
    return os.getpid()


def _hold(promise: dtorch_ops.TensorPromise) -> None:
    globals()["held"] = promise


def test_another_process_is_logged_from_its_coming_to_its_death(records):
    logging.getLogger("dtorch_ops").setLevel(logging.INFO)
    with Peer() as peer:
        promise, future = pending()
        pid = peer.call(_set, promise)
        future.wait(LIMIT * 1000)
        records.until(f"process {pid} is attached")
        promise, future = pending()
        peer.call(_hold, promise)
        peer.kill()
        with pytest.raises(dtorch_ops.BrokenPromiseError):
            future.wait(LIMIT * 1000)
        records.until(f"process {pid} has ended")
        records.until("the last producer has gone")


# ---- The environment, the end of the process, and forks -----------------------------------------


def run_with(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import os, torch, dtorch_ops\n" + code],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env=os.environ | environment,
        check=False,
    )


MAKES_ONE = "dtorch_ops.TensorPromise().set_value(torch.ones(1))\n"


def test_the_environment_asks_for_it_and_nothing_is_lost_at_exit():
    done = run_with("for _ in range(2000):\n    " + MAKES_ONE, DTORCH_LOG="debug")
    assert (done.returncode, done.stdout) == (0, "")
    lines = done.stderr.splitlines()
    assert len(lines) == 3 * 2000
    assert " DEBUG [MainThread] dtorch_ops.promise: made, of future 0x" in lines[0]
    assert " DEBUG [MainThread] dtorch_ops.future: 0x" in lines[-1]
    assert lines[-1].endswith(" is completed")


def test_a_level_that_is_none_is_told_once_with_those_that_are():
    done = run_with(MAKES_ONE, DTORCH_LOG="loud")
    assert done.returncode == 0
    assert done.stderr.count("DTORCH_LOG") == 1
    assert "expected debug, info, warning or error, got 'loud': nothing is logged" in done.stderr


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program in C++ that logs, and has no host."""
    built = tmp_path_factory.mktemp("cpp") / "log_main"
    sources = [ROOT / "tests" / "cpp" / "log_main.cpp"]
    sources += [ROOT / "csrc" / "dtorch" / "base" / name for name in ("log.cpp", "fork.cpp")]
    command = ["c++", "-std=c++20", "-pthread", "-I", ROOT / "csrc", "-o", built, *sources]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return built


@pytest.mark.parametrize(
    ("level", "says"),
    [
        ("", []),
        ("error", ["device error"]),
        ("INFO", ["file info", "device error"]),
        ("debug", ["future debug", "file info", "device error"]),
    ],
)
def test_a_program_without_python_writes_to_stderr(program, level, says):
    done = subprocess.run(
        [program], capture_output=True, text=True, timeout=60, env={"DTORCH_LOG": level}, check=True
    )
    lines = done.stderr.splitlines()
    assert [line.partition(" [")[0] for line in lines] == [f"dtorch_ops.{each}" for each in says]
    assert not lines or lines[-1].endswith("]: it has failed")


def test_a_program_without_python_says_which_levels_there_are(program):
    done = subprocess.run(
        [program], capture_output=True, text=True, timeout=60, env={"DTORCH_LOG": "x"}, check=True
    )
    assert done.stderr == (
        "dtorch_ops: DTORCH_LOG: expected debug, info, warning or error, got 'x': nothing is "
        "logged\n"
    )


def test_what_was_logged_before_it_was_switched_off_arrives():
    script = """
    import logging, sys
    logging.basicConfig(stream=sys.stdout)
    logging.getLogger("dtorch_ops").setLevel(logging.INFO)
    dtorch_ops.TensorPromise().cancel()
    logging.getLogger("dtorch_ops").setLevel(logging.NOTSET)
    dtorch_ops.TensorPromise().cancel()
    """
    for outcome in fresh.run(script, runs=20):
        assert (outcome.exit_code, outcome.stderr) == (0, "")
        assert outcome.stdout.count("cancelled, of future") == 1


FORKS = """
import logging, sys
logging.getLogger("dtorch_ops").addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("dtorch_ops").setLevel(logging.INFO)
promise = dtorch_ops.TensorPromise()
pid = os.fork()
dtorch_ops.TensorPromise().cancel()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
"""


def test_a_forked_child_logs_as_its_parent_does():
    for outcome in fresh.run(FORKS, runs=20):
        assert (outcome.exit_code, outcome.stderr) == (0, "")
        assert outcome.stdout.count("cancelled, of future") == 2


# ---- Futures that stay pending ------------------------------------------------------------------


@pytest.fixture
def watched(records: Records) -> Iterator[Records]:
    """Reports what is pending for longer than half a second: a test may be held up for a while."""
    report_pending(0.5)
    yield records
    report_pending(None)


def test_a_pending_future_is_told_of_once_with_where_it_was_made(watched):
    promise = dtorch_ops.TensorPromise()
    future = promise.get_future()
    line = sys._getframe().f_lineno - 1
    record = watched.until("still pending")
    assert f"TensorFuture made at {__file__}:{line} is still pending" in record.getMessage()
    assert (record.name, record.levelname) == ("dtorch_ops.pending", "WARNING")
    again = promise.get_future()  # another handle of the same future
    later = dtorch_ops.VoidPromise()
    late = later.get_future()
    watched.until("VoidFuture")
    assert len(watched.having("TensorFuture")) == 1
    promise.set_value(torch.ones(2))
    later.set_value()
    assert future.is_ready() and again.is_ready() and late.is_ready()


def test_one_that_is_dropped_or_complete_is_not_told_of(watched):
    promises = [dtorch_ops.TensorPromise() for _ in range(3)]
    dropped, complete, left = (promise.get_future() for promise in promises)
    del dropped
    promises[1].set_value(torch.ones(2))
    watched.until("still pending")
    marker = dtorch_ops.VoidPromise()
    marked = marker.get_future()
    watched.until("VoidFuture")
    assert len(watched.having("still pending")) == 2
    assert complete.is_ready() and not left.is_ready() and not marked.is_ready()


def test_futures_of_groups_and_of_callbacks_are_told_of_too(watched):
    promise, future = pending()
    group = dtorch_ops.collect_all([future])
    line = sys._getframe().f_lineno - 1
    then = future.then(lambda f: f.value())
    for text in (f"{__file__}:{line} ", f"{__file__}:{line + 2} "):
        watched.until(text)
    promise.set_value(torch.ones(2))
    assert group.is_ready() and then.is_ready()


def test_one_thread_watches_and_none_when_nobody_asks(watched):
    def watchers() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "dtorch_ops-pending"]

    kept = [pending() for _ in range(50)]
    assert len(watchers()) == 1
    report_pending(5)
    assert len(watchers()) == 1
    report_pending(None)
    assert watchers() == []
    assert len(kept) == 50


def test_what_is_watched_goes_with_the_futures():
    report_pending(1000)
    try:
        watch = dtorch_ops.pending._watch
        assert watch is not None
        for _ in range(100):
            pending()
        gc.collect()
        assert (watch._known, watch._waiting) == ({}, {})
        promise, future = pending()
        second = promise.get_future()
        assert len(watch._known) == 1
        del future
        assert len(watch._known) == 1
        del second
        assert watch._known == {}
    finally:
        report_pending(None)


def test_a_thread_that_waits_is_not_disturbed(watched):
    promise, future = pending()
    worker: Worker = blocked_in(future.get)
    watched.until("still pending")
    promise.set_value(torch.ones(2))
    assert worker.finish(LIMIT).tolist() == [1, 1]


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="after_seconds: expected a number above 0, got"):
        report_pending(wrong)


@pytest.mark.parametrize("wrong", ["30", True, [1]])
def test_what_is_no_number_is_refused(wrong):
    with pytest.raises(TypeError, match="after_seconds: expected a number of seconds or None, got"):
        report_pending(wrong)


WAITS_FOR_THE_REPORT = """
import sys
class Stderr:
    def write(self, text):
        sys.__stderr__.write(text)
        if "pending" in text:
            promise.set_value(torch.ones(1))
    def flush(self): pass
sys.stderr = Stderr()
promise = dtorch_ops.TensorPromise()
promise.get_future().wait(30_000)
"""


def test_the_environment_asks_for_reports_and_they_go_to_stderr():
    done = run_with(WAITS_FOR_THE_REPORT, DTORCH_PENDING_AFTER="0.02")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("the TensorFuture made at <string>:")


@pytest.mark.parametrize("wrong", ["soon", "0"])
def test_a_time_in_the_environment_that_is_none_is_told_once(wrong):
    done = run_with("", DTORCH_PENDING_AFTER=wrong)
    assert done.returncode == 0
    assert done.stderr.count("DTORCH_PENDING_AFTER: expected a number of seconds above 0") == 1


def test_a_forked_child_watches_its_own():
    (outcome,) = fresh.run(
        """
        import logging
        texts, told = [], threading.Event()
        def emit(record):
            texts.append(record.getMessage())
            if "VoidFuture" in texts[-1]:
                told.set()
        handler = logging.Handler()
        handler.emit = emit
        logging.getLogger("dtorch_ops.pending").addHandler(handler)
        dtorch_ops.report_pending(0.5)
        promise = dtorch_ops.TensorPromise(mode="memory")
        future = promise.get_future()
        pid = os.fork()
        mine = dtorch_ops.VoidPromise()
        kept = mine.get_future()
        assert told.wait(20)
        assert len(texts) == (2 if pid else 1), texts
        if pid:
            assert os.waitpid(pid, 0)[1] == 0
        """
    )
    assert (outcome.exit_code, outcome.stderr) == (0, "")
