"""The first use of an accelerator, the end of the process, and forks, with work pending.

On the fake accelerator, or CUDA; each test in a process of its own (on_accelerator.py).
"""

from __future__ import annotations

import os
import sys
import threading

import fake_accelerator as fake
import pytest
import torch
from on_accelerator import *  # noqa: F403

import dtorch_ops

pytestmark = pytest.mark.timeout(600)  # the first one may have to build the fake


# ---- The end of the process, and forks ----------------------------------------------------------


@pytest.mark.parametrize("leave", ["end", "sys.exit", "exception", "thread"])
@pytest.mark.parametrize("stuck", ["held", "lost"])
@on_fake(DELAYS, timeout=8, runs=2)
def test_the_process_ends_with_futures_pending(stuck, leave):
    global kept
    tensor = torch.ones(3, device=DEVICE)
    streams = [current_stream(), *new_streams(3)]
    kept = []
    for stream in streams:
        if stuck == "held":
            hold(stream)
        else:
            fake.lose_next_event()
        with stream:
            kept += [dtorch_ops.to_torch_async(tensor) for _ in range(20)]
            kept.append(dtorch_ops.to_torch_async(tensor, copy=True))
            kept.append(dtorch_ops.sync_future(DEVICE))
    kept[0].add_done_callback(lambda f: f.value())
    kept.append(kept[1].then(lambda f: f.value()))
    promise = dtorch_ops.TensorPromise()
    kept.append(promise.get_future())
    promise.set_value(tensor)
    until_waiting(4)
    assert_pending(*kept[:: len(kept) // 7])
    if leave == "thread":
        for future in kept[:3]:
            threading.Thread(target=future.wait, daemon=True).start()
    elif leave == "sys.exit":
        sys.exit(0)
    elif leave == "exception":
        try:
            dtorch_ops.wait_all(kept, 1)
        except TimeoutError:
            sys.exit()


@on_fake(DEPTH, timeout=8, runs=3)
def test_the_process_ends_while_futures_complete():
    global kept
    tensor = torch.ones(3, device=DEVICE)
    hold(DEVICE)
    kept = [dtorch_ops.to_torch_async(tensor) for _ in range(2000)]
    for future in kept[::2]:
        future.add_done_callback(lambda f: f.value())
    release(DEVICE)


@pytest.mark.parametrize("device", [None, "cpu"])
@on_accelerator(timeout=8, runs=6)
def test_the_process_ends_while_what_nobody_has_any_more_is_dropped(device):
    """By another thread, which comes to be the last that has the tensors, Python's part of them."""
    hold(DEVICE)
    for _ in range(300):
        dtorch_ops.to_torch_async(torch.ones(2, device=DEVICE), device=device)
    release(DEVICE)


@on_accelerator(timeout=8, runs=6)
def test_the_process_ends_right_after_a_value_was_taken():
    tensor = torch.ones(2, device=DEVICE)
    worker = Worker(lambda: dtorch_ops.to_torch(tensor, device="cpu").tolist())
    assert worker.finish(LIMIT) == [1, 1]


@on_accelerator(timeout=8)
def test_the_process_ends_while_a_callback_blocks():
    global kept
    tensor = torch.ones(3, device=DEVICE)
    entered = threading.Event()
    with held(DEVICE):
        kept = [dtorch_ops.to_torch_async(tensor) for _ in range(3)]
        kept[0].add_done_callback(lambda f: (entered.set(), threading.Event().wait()))
    assert entered.wait(LIMIT)


@on_accelerator(runs=3)
def test_a_fork_with_work_pending_leaves_the_parent_alone_and_tells_the_child():
    tensor = torch.ones(3, device=DEVICE)
    with held(DEVICE):
        ready = dtorch_ops.to_torch_async(torch.ones(2))
        futures = [dtorch_ops.to_torch_async(tensor) for _ in range(50)]
        futures.append(dtorch_ops.sync_future(DEVICE))
        until_waiting(1)

        def child(link):
            for way in (
                lambda f: f.wait(),
                lambda f: f.wait(LIMIT_MS),
                lambda f: dtorch_ops.wait_all([f]),
                lambda f: torch.ops.dtorch.wait_for(f, LIMIT_MS),
                lambda f: dtorch_ops.collect_all([f]).wait(),
                lambda f: f.get(),
            ):
                for future in (futures[0], futures[-1]):
                    error = error_of(lambda way=way, future=future: way(future))
                    assert isinstance(error, dtorch_ops.DTorchError), repr(error)
                    assert "fork" in str(error), error
            assert ready.get().tolist() == [1, 1]
            assert dtorch_ops.to_torch(torch.ones(2)).tolist() == [1, 1]
            error = error_of(lambda: dtorch_ops.to_torch_async(tensor))
            assert isinstance(error, RuntimeError), repr(error)
            assert our_threads() == []
            futures.clear()

        for leave in (os._exit, sys.exit):
            forked(child, leave).end()
        assert_pending(futures[0], futures[-1])
    dtorch_ops.wait_all(futures, LIMIT_MS)
    assert value_of(dtorch_ops.to_torch_async(tensor)).tolist() == [1, 1, 1]


@on_accelerator()
def test_a_child_forked_before_the_accelerator_is_used_can_use_it():
    promise = dtorch_ops.TensorPromise()
    future = promise.get_future()
    assert dtorch_ops.to_torch(torch.ones(2)).tolist() == [1, 1]

    def use():
        tensor = torch.ones(3, device=DEVICE)
        assert dtorch_ops.to_torch(tensor).tolist() == [1, 1, 1]
        assert dtorch_ops.to_torch(tensor, device="cpu").tolist() == [1, 1, 1]
        dtorch_ops.sync()

    forked(lambda link: use()).end()
    assert not is_initialized()
    use()
    promise.set_value(torch.ones(2))
    assert future.get().tolist() == [1, 1]


@on_accelerator(prelude=BARE_PRELUDE)
def test_nothing_but_use_initialises_the_accelerator():
    import pickle

    import dtorch_ops

    for cls in (dtorch_ops.TensorPromise, dtorch_ops.VoidPromise):
        for mode in ("auto", "memory", "file"):
            promise = cls(mode)
            future = promise.get_future()
            group = dtorch_ops.collect_all([future])
            if mode != "memory":
                pickle.dumps(promise)
            if cls is dtorch_ops.TensorPromise:
                promise.set_value(torch.ones(2))
            else:
                promise.set_value()
            group.get()
            future.get()
    void = dtorch_ops.VoidPromise()
    torch.ops.dtorch.sync(void)
    dtorch_ops.sync()
    dtorch_ops.sync("cpu")
    dtorch_ops.sync_future().get()
    dtorch_ops.to_torch_async(torch.ones(2), copy=True).get()
    dtorch_ops.to_torch_async(torch.ones(2), device="cpu").get()
    dtorch_ops.to_torch_async(torch.ones(2, requires_grad=True) * 2).get()
    pending = dtorch_ops.TensorPromise().get_future()
    try:
        pending.wait(0)
    except (TimeoutError, dtorch_ops.DTorchError):
        pass
    assert dtorch_ops.stats()["outstanding"] == 0
    assert is_untouched()
