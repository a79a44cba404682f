"""What torch.profiler shows: each step, in the thread that makes it, and what leads to what."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from futures import LIMIT, blocked_in, pending
from helpers import ROOT
from on_accelerator import DEVICE, drain, held, on_accelerator
from peer import Peer

import dtorch_ops
from dtorch_ops.profiler import merge_traces, profile


class Trace:
    """A chrome trace, and questions about it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]

    def spans(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e.get("ph") == "X" and e["name"] == name]

    def span(self, name: str) -> dict[str, Any]:
        (found,) = self.spans(name)
        return found

    def arrows_to(self, span: dict[str, Any]) -> list[dict[str, Any]]:
        """The spans that arrows to ``span`` start in, of the same length as there are arrows."""

        def place(event: dict[str, Any]) -> tuple[int, int, float]:
            return event["pid"], event["tid"], event["ts"]

        begins = {(e["cat"], e["id"]): e for e in self.events if e.get("ph") == "s"}
        ends = [e for e in self.events if e.get("ph") == "f" and place(e) == place(span)]
        starts = [begins[e["cat"], e["id"]] for e in ends]
        return [
            e
            for start in starts
            for e in self.events
            if e.get("ph") == "X" and place(e) == place(start) and e["name"].startswith("dtorch::")
        ]


@contextmanager
def quiet() -> Iterator[None]:
    """Torch's profiler writes to stderr of itself."""
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(nothing)
        os.close(stderr)


@contextmanager
def traced(file: Path) -> Iterator[Path]:
    profiler = profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with quiet():
        profiler.start()
    try:
        yield file
    finally:
        with quiet():
            profiler.stop()
    profiler.export_chrome_trace(str(file))


def contains(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    same_thread = (outer["pid"], outer["tid"]) == (inner["pid"], inner["tid"])
    ends = [event["ts"] + event["dur"] for event in (outer, inner)]
    return same_thread and outer["ts"] <= inner["ts"] and ends[1] <= ends[0]


def test_a_promise_leads_to_who_waits_for_it_in_another_thread(tmp_path):
    promise, future = pending()
    with traced(tmp_path / "trace.json") as file:
        worker = blocked_in(future.get)
        promise.set_value(torch.ones(2))
        worker.finish(LIMIT)
    trace = Trace(file)
    sets, completes = trace.span("dtorch::promise.set_value"), trace.span("dtorch::complete")
    waits, wakes = trace.span("dtorch::wait"), trace.span("dtorch::wake")
    assert contains(sets, completes)
    assert contains(waits, wakes)
    assert (sets["tid"], waits["tid"]) == (threading.get_native_id(), worker.native_id)
    assert waits["ts"] < sets["ts"]
    (ready,) = trace.arrows_to(wakes)
    assert ready["name"] == "dtorch::ready"
    assert contains(completes, ready)


def test_an_error_is_a_step_of_its_own(tmp_path):
    promise, future = pending()
    with traced(tmp_path / "trace.json") as file:
        promise.set_exception(ValueError("no"))
    assert contains(
        Trace(file).span("dtorch::promise.set_exception"), Trace(file).span("dtorch::complete")
    )
    assert future.is_ready()


def test_a_promise_without_value_is_a_step_as_well(tmp_path):
    promise = dtorch_ops.VoidPromise()
    with traced(tmp_path / "trace.json") as file:
        promise.set_value()
    trace = Trace(file)
    assert contains(trace.span("dtorch::promise.set_value"), trace.span("dtorch::complete"))


def test_a_fetch_shows_its_operator_and_a_copy_if_there_is_one(tmp_path):
    tensor = torch.ones(2)
    with traced(tmp_path / "trace.json") as file:
        dtorch_ops.to_torch(tensor)
        dtorch_ops.to_torch(tensor, copy=True)
    trace = Trace(file)
    plain, copying = trace.spans("dtorch::get_tensor_async")
    copy = trace.span("dtorch::copy")
    assert contains(copying, copy)
    assert not contains(plain, copy)


@pytest.mark.parametrize(
    "wait", [dtorch_ops.wait_all, lambda fs: list(dtorch_ops.as_completed(fs))]
)
def test_waiting_for_several_is_a_wait(tmp_path, wait):
    promise, future = pending()
    with traced(tmp_path / "trace.json") as file:
        worker = blocked_in(lambda: wait([future]))
        promise.set_value(torch.ones(2))
        worker.finish(LIMIT)
    assert Trace(file).spans("dtorch::wait")[0]["tid"] == worker.native_id


def test_a_profiler_of_one_thread_shows_that_thread(tmp_path):
    promise, future = pending()
    with torch.profiler.profile() as prof:
        worker = blocked_in(future.get)
        promise.set_value(torch.ones(2))
        worker.finish(LIMIT)
    names = [event.name for event in prof.events()]
    assert "dtorch::promise.set_value" in names
    assert "dtorch::wait" not in names


# Torch's profiler would write the end of the step into memory that went with the first run.
def test_a_step_that_outlives_a_profiler_does_no_harm_to_the_next_one():
    # Torch's profiler writes to stderr of itself.
    (outcome,) = fresh.run(
        """
        import gc, json, tempfile
        sys.path.insert(0, "tests")
        from futures import blocked_in, pending
        promise, future = pending()
        with dtorch_ops.profiler.profile() as first:
            worker = blocked_in(future.get)
        del first
        gc.collect()
        with dtorch_ops.profiler.profile() as second:
            for _ in range(5000):
                torch.ones(1).add_(1)
            promise.set_value(torch.ones(2))
            worker.finish(20)
        with tempfile.TemporaryDirectory() as folder:
            second.export_chrome_trace(folder + "/trace.json")
            with open(folder + "/trace.json") as file:
                events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
        assert "dtorch::wait" not in {e["name"] for e in events}
        assert "dtorch::wake" in {e["name"] for e in events}
        adds = [e for e in events if e["name"] == "aten::add_"]
        assert len(adds) == 5000
        """
    )
    assert outcome.exit_code == 0, outcome.stderr


# ---- Devices ------------------------------------------------------------------------------------


@on_accelerator()
def test_a_fetch_leads_to_its_completion_in_the_thread_that_waits_for_the_device():
    import tempfile
    from pathlib import Path

    from test_profiler import Trace, contains, traced

    tensor = torch.zeros(3, device=DEVICE)
    drain(DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        with traced(Path(folder) / "trace.json") as file:
            with held(DEVICE):
                future = dtorch_ops.to_torch_async(tensor, device="cpu")
                worker = blocked_in(future.get)
            worker.finish(LIMIT)
            drain(DEVICE)
        trace = Trace(file)
    operator = trace.span("dtorch::get_tensor_async")
    assert contains(operator, trace.span("dtorch::copy"))
    fetch, arrive = trace.span("dtorch::fetch"), trace.span("dtorch::arrive")
    complete, wake = trace.span("dtorch::complete"), trace.span("dtorch::wake")
    assert contains(operator, fetch)
    assert contains(arrive, complete)
    assert trace.span("dtorch::wait_device")["tid"] == arrive["tid"]
    assert arrive["tid"] not in (fetch["tid"], wake["tid"])
    assert trace.arrows_to(arrive) == [fetch]
    (ready,) = trace.arrows_to(wake)
    assert contains(complete, ready)


# ---- Other processes ----------------------------------------------------------------------------


def _set_traced(promise: dtorch_ops.TensorPromise, file: str) -> None:
    with traced(Path(file)):
        promise.set_value(torch.ones(1000))


def test_an_arrow_leads_from_one_process_to_the_other(tmp_path):
    theirs, both = tmp_path / "theirs.json", tmp_path / "both.json"
    promise, future = pending()
    with Peer() as peer, traced(tmp_path / "ours.json") as ours:
        peer.call(_set_traced, promise, str(theirs))
        future.wait(LIMIT * 1000)
        pid = peer.process.pid
    merge_traces([ours, theirs], both)
    trace = Trace(both)
    write, read = trace.span("dtorch::shm.write"), trace.span("dtorch::shm.read")
    assert write["pid"] == pid != read["pid"]
    assert contains(trace.span("dtorch::promise.set_value"), write)
    assert contains(read, trace.span("dtorch::complete"))
    assert trace.arrows_to(read) == [write]


def _chrome_trace(file: Path, base: int, *events: dict[str, Any]) -> Path:
    file.write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}))
    return file


def test_merged_traces_have_one_scale_of_time_and_arrows_of_their_own(tmp_path):
    def arrow(phase: str, ts: float) -> dict[str, Any]:
        return {"ph": phase, "cat": "fwdbwd", "name": "", "id": 1, "pid": 1, "tid": 1, "ts": ts}

    one = _chrome_trace(tmp_path / "1.json", 5_000_000, arrow("s", 1.0), arrow("f", 2.0))
    two = _chrome_trace(tmp_path / "2.json", 7_000_000, arrow("s", 3.0), arrow("f", 4.0))
    merge_traces([one, two], one)
    merged = Trace(one).events
    assert [event["ts"] for event in merged] == [1.0, 2.0, 2003.0, 2004.0]
    ids = [event["id"] for event in merged]
    assert ids[0] == ids[1] != ids[2] == ids[3]


@pytest.mark.parametrize("text", ["", "[]", "{}", "\x00"])
def test_what_is_no_trace_is_named(tmp_path, text):
    file = tmp_path / "trace.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"traces: expected what torch\.profiler.*trace\.json"):
        merge_traces([file], tmp_path / "merged.json")


def test_no_trace_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one file"):
        merge_traces([], tmp_path / "merged.json")


def test_a_configuration_of_ones_own_is_refused():
    with pytest.raises(TypeError, match="profile_all_threads"):
        profile(experimental_config=torch._C._profiler._ExperimentalConfig())


# ---- The page -----------------------------------------------------------------------------------


def test_the_programs_of_the_page_run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "seeing.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    try:
        for program in programs:
            exec(compile(program, "docs/seeing.md", "exec"), names)
    finally:
        dtorch_ops.report_pending(None)
    assert (
        "'dtorch::complete', 'dtorch::copy', 'dtorch::get_tensor_async'" in capfd.readouterr().out
    )
    assert Trace(tmp_path / "merged.json").span("dtorch::copy")
