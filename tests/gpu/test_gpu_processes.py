"""Several processes, and the end of one: spawned producers, forks, exits with work pending.

Run on the fake accelerator too.
"""

from __future__ import annotations

import pickle
import sys

import pytest
import torch
from on_accelerator import *  # noqa: F403

import dtorch_ops

pytestmark = pytest.mark.timeout(600)  # the first one may have to build the fake


@pytest.mark.parametrize("used_before", [False, True], ids=["unused", "used"])
@on_accelerator(timeout=60)
def test_spawned_processes_fulfil_promises_with_what_their_device_computes(used_before):
    import multiprocessing

    import producers

    if used_before:
        torch.ones(1, device=DEVICES[-1])
    pairs = [[pending("file") for _ in range(5)] for _ in range(2)]
    spawn = multiprocessing.get_context("spawn")
    processes = []
    for index, own in enumerate(pairs):
        promises = [promise for promise, _ in own]
        arguments = (promises, 10.0 * index, 500_000)
        processes.append(spawn.Process(target=producers.set_on_accelerator, args=arguments))
        processes[-1].start()
    assert is_initialized() == used_before
    for index, own in enumerate(pairs):
        for number, (_, future) in enumerate(own):
            value = future.wait(4 * LIMIT_MS)
            assert value.device == torch.device(DEVICES[-1])
            assert value.to("cpu").unique().tolist() == [10 * index + number]
    for process in processes:
        process.join(4 * LIMIT)
        assert process.exitcode == 0


@on_accelerator(timeout=60)
def test_a_spawned_process_that_is_killed_breaks_what_its_device_has_not_computed():
    import multiprocessing

    import producers

    promise, future = pending("file")
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=producers.set_on_a_stuck_stream, args=(promise,))
    process.start()
    gone = promise
    del gone, promise
    until(lambda: dtorch_ops.stats()["unclaimed"] == 0, 4 * LIMIT)
    process.kill()
    process.join(LIMIT)
    error = error_of(lambda: value_of(future))
    assert isinstance(error, dtorch_ops.BrokenPromiseError), repr(error)


@on_accelerator()
def test_children_forked_after_the_import_use_the_device_and_their_parent_does_then():
    promise, future = pending()
    token = pickle.dumps(promise)
    assert is_untouched()

    def child(link):
        own = pickle.loads(token)
        tensor = torch.zeros(1000, device=DEVICE)
        keep_busy(5)
        own.set_value(tensor.fill_(3))
        assert dtorch_ops.to_torch(tensor, device="cpu").unique().tolist() == [3]

    children = [forked(child, sys.exit)]
    assert is_untouched()
    assert value_of(future).to("cpu").unique().tolist() == [3]
    for one in children:
        one.end()
    assert dtorch_ops.to_torch(torch.ones(3, device=DEVICE), device="cpu").tolist() == [1, 1, 1]


@pytest.mark.parametrize("stuck", ["busy", "held"])
@on_accelerator(timeout=8, runs=2)
def test_the_process_ends_with_work_pending(stuck):
    global kept
    tensor, large = torch.ones(3, device=DEVICE), torch.ones(1_000_000, device=DEVICE)
    value_of(dtorch_ops.to_torch_async(tensor, device="cpu"))
    kept = []
    for stream in [current_stream(), *new_streams(3)]:
        with stream:
            if stuck == "busy":
                keep_busy(500)
            else:
                hold(stream)
            kept += [dtorch_ops.to_torch_async(tensor) for _ in range(20)]
            kept += [dtorch_ops.to_torch_async(large, device="cpu") for _ in range(5)]
            kept.append(dtorch_ops.sync_future(DEVICE))
    kept[0].add_done_callback(lambda f: f.value())
    until_waiting(1)
