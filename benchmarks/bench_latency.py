"""What a fetch costs in one process, beside torch's own future."""

from __future__ import annotations

import concurrent.futures
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

import dtorch_ops

from .common import Figure, Helper, Sample, Settings, Target, compare, expect, per_operation
from .common import measure as take

TENSOR = torch.ones(2)

# The bodies are written as a user writes them, attribute look-ups included: they are part of the
# price, of the baseline's too.


def _torch_future(count: int) -> None:
    for _ in range(count):
        future = torch.futures.Future()
        future.set_result(TENSOR)
        value = future.wait()
    expect(value is TENSOR, "torch.futures.Future")


def _to_torch_async(count: int) -> None:
    for _ in range(count):
        value = dtorch_ops.to_torch_async(TENSOR).get()
    expect(value is TENSOR, "to_torch_async")


def _operator(count: int) -> None:
    for _ in range(count):
        value = torch.ops.dtorch.get_tensor_async.default(TENSOR).wait()
    expect(value is TENSOR, "get_tensor_async.default")


def _operator_at_hand(count: int) -> None:
    operator = torch.ops.dtorch.get_tensor_async.default
    for _ in range(count):
        value = operator(TENSOR).wait()
    expect(value is TENSOR, "get_tensor_async.default")


def _packet(count: int) -> None:
    for _ in range(count):
        value = torch.ops.dtorch.get_tensor_async(TENSOR).wait()
    expect(value is TENSOR, "get_tensor_async")


def _promise(count: int) -> None:
    for _ in range(count):
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        promise.set_value(TENSOR)
        value = future.get()
    expect(value is TENSOR, "TensorPromise")


def _make_torch_future(count: int) -> None:
    for _ in range(count):
        future = torch.futures.Future()
    expect(not future.done(), "a new torch.futures.Future")


def _make_promise(count: int) -> None:
    for _ in range(count):
        promise = dtorch_ops.TensorPromise()
    expect(promise.is_pending(), "a new TensorPromise")


def _torch_chain(count: int) -> None:
    for _ in range(count):
        future = torch.futures.Future()
        last = future.then(_double).then(_double).then(_double)
        future.set_result(TENSOR)
        value = last.wait()
    expect(value == 8, "then of torch.futures.Future")


def _chain(count: int) -> None:
    for _ in range(count):
        promise = dtorch_ops.TensorPromise()
        last = promise.get_future().then(_double).then(_double).then(_double)
        promise.set_value(TENSOR)
        value = last.get()
    expect(value == 8, "then of TensorFuture")


def _double(future: torch.futures.Future[torch.Tensor | int]) -> int:
    value = future.value()
    return 2 if value is TENSOR else 2 * value


def _in_one_thread(settings: Settings) -> list[Figure]:
    bodies = {
        "torch_future": _torch_future,
        "to_torch_async": _to_torch_async,
        "operator": _operator,
        "operator_at_hand": _operator_at_hand,
        "packet": _packet,
        "promise": _promise,
        "make_torch_future": _make_torch_future,
        "make_promise": _make_promise,
        "torch_chain": _torch_chain,
        "chain": _chain,
    }
    # Samples of at most a millisecond, shorter than the time slice after which another process
    # gets the core; the median drops those that were interrupted.
    count = settings.count(100, 50)
    samples = {name: per_operation(body, count) for name, body in bodies.items()}
    series = take(samples, settings.rounds, per_round=settings.count(50, 3))

    def figure(
        name: str, title: str, baseline: str, baseline_title: str, at_most: float | None = None
    ) -> Figure:
        return compare(
            f"latency.{name}",
            title,
            baseline_title,
            subject=series[name],
            baseline=series[baseline],
            unit="µs",
            target=None if at_most is None else Target(at_most),
        )

    whole = ("torch_future", "torch.futures.Future: make, set, wait")
    return [
        figure("to_torch_async", "dtorch_ops.to_torch_async(t).get()", *whole, 0.5),
        figure("operator", "ops.dtorch.get_tensor_async.default(t).wait()", *whole, 1.0),
        figure("operator_at_hand", "operator(t).wait(), looked up before", *whole),
        figure("packet", "ops.dtorch.get_tensor_async(t).wait()", *whole, 1.3),
        figure("promise", "TensorPromise: make, get_future, set, get", *whole),
        figure(
            "make_promise", "TensorPromise: make", "make_torch_future", "torch.futures.Future: make"
        ),
        figure(
            "chain",
            "TensorPromise: make, three then(), set, get",
            "torch_chain",
            "torch.futures.Future: make, three then(), set, wait",
        ),
    ]


# ---- A thousand tensors -------------------------------------------------------------------------

_LEAVES = [torch.ones(2) for _ in range(1000)]
_TREES: dict[str, Any] = {
    "tree_list": _LEAVES,
    "tree_nested": {f"layer{i}": _LEAVES[10 * i : 10 * i + 10] for i in range(100)},
}


def _one_call(tree: Any, count: int) -> None:
    for _ in range(count):
        value = dtorch_ops.to_torch_async(tree).get()
    expect(value is not tree and len(value) == len(tree), "to_torch_async of a tree")


def _thousand_calls(count: int) -> None:
    for _ in range(count):
        futures = [dtorch_ops.to_torch_async(leaf) for leaf in _LEAVES]
        values = [future.get() for future in dtorch_ops.collect_all(futures).get()]
    expect(values[-1] is _LEAVES[-1], "a thousand of to_torch_async")


def _trees(settings: Settings) -> list[Figure]:
    samples = {
        name: per_operation(functools.partial(_one_call, tree), 1) for name, tree in _TREES.items()
    }
    samples["calls"] = per_operation(_thousand_calls, 1)
    series = take(samples, settings.rounds, per_round=settings.count(50, 3))
    titles = {"tree_list": "a list of 1,000", "tree_nested": "100 lists of 10 in a dict"}
    return [
        compare(
            f"latency.{name}",
            f"to_torch_async of {title}: get()",
            "1,000 to_torch_async, collect_all, get() of each",
            subject=series[name],
            baseline=series["calls"],
            unit="µs",
        )
        for name, title in titles.items()
    ]


# ---- One thread sets, another one is blocked -----------------------------------------------------


def _woken_after(
    helper: Helper, action: Callable[[], object], block: Callable[[], object]
) -> float:
    helper.act_soon(action)
    value = block()
    end = time.perf_counter()
    expect(value is TENSOR, "what a blocked thread got")
    return (end - helper.acted_at) * 1e6


def _blocking(helper: Helper) -> dict[str, Sample]:
    def ours() -> float:
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        return _woken_after(helper, lambda: promise.set_value(TENSOR), future.wait)

    def torchs() -> float:
        future = torch.futures.Future()
        return _woken_after(helper, lambda: future.set_result(TENSOR), future.wait)

    def pythons() -> float:
        future = concurrent.futures.Future()
        return _woken_after(helper, lambda: future.set_result(TENSOR), future.result)

    return {"ours": ours, "torch": torchs, "python": pythons}


def _between_threads(settings: Settings) -> list[Figure]:
    helper = Helper()
    series = take(_blocking(helper), settings.rounds, per_round=settings.count(50, 3))
    helper.close()
    title = "TensorPromise: set -> blocked wait() goes on"
    names = {"torch": "torch.futures.Future", "python": "concurrent.futures.Future"}
    return [
        compare(
            f"latency.blocked_thread_{name}",
            title,
            f"{baseline}: set -> blocked wait goes on",
            subject=series["ours"],
            baseline=series[name],
            unit="µs",
        )
        for name, baseline in names.items()
    ]


def run(settings: Settings) -> list[Figure]:
    return _in_one_thread(settings) + _trees(settings) + _between_threads(settings)
