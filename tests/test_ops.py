"""The operators of ``torch.ops.dtorch``, called eagerly: one process, the CPU."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import fresh
import pytest
import torch
from expecttest import assert_expected_inline
from helpers import Worker
from torch import Tensor

import dtorch_ops

ops = torch.ops.dtorch

# Every way to fetch a value. All must mean the same.
FETCHES: dict[str, Callable[..., Tensor]] = {
    "packet": lambda t, **kw: ops.get_tensor_async(t, **kw).wait(),
    "overload": lambda t, **kw: ops.get_tensor_async.default(t, **kw).wait(),
    "to_torch_async": lambda t, **kw: dtorch_ops.to_torch_async(t, **kw).get(),
    "to_torch": lambda t, **kw: dtorch_ops.to_torch(t, **kw),
    "method_async": lambda t, **kw: t.to_torch_async(**kw).get(),
    "method": lambda t, **kw: t.to_torch(**kw),
}


@pytest.fixture(params=FETCHES)
def fetch(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    return FETCHES[request.param]


def failed(error: BaseException) -> dtorch_ops.TensorFuture:
    promise = dtorch_ops.TensorPromise()
    promise.set_exception(error)
    return promise.get_future()


def stock_failed(error: BaseException) -> torch.futures.Future[Tensor]:
    """As torch.futures leaves it: the exception is the value."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_exception(error)
    return future


# ---- Schemas ------------------------------------------------------------------------------------

SCHEMAS = sorted(
    (s for s in torch._C._jit_get_all_schemas() if s.name.startswith("dtorch::")), key=str
)


def test_the_schemas_of_the_namespace():
    assert_expected_inline(
        "\n".join(str(schema) for schema in SCHEMAS),
        """\
dtorch::collect_all(Future(t)[] futures) -> Future(Future(t)[])
dtorch::collect_any(Future(t)[] futures) -> Future(t)
dtorch::get_future(__torch__.torch.classes.dtorch.TensorPromise promise) -> Future(Tensor)
dtorch::get_future.void(__torch__.torch.classes.dtorch.VoidPromise promise) -> Future(NoneType)
dtorch::get_start(Tensor self, *, Device? device=None, bool frozen=False) -> Tensor
dtorch::get_tensor(Tensor self, __torch__.torch.classes.dtorch.TensorPromise promise) -> ()
dtorch::get_tensor.copy(Tensor self, __torch__.torch.classes.dtorch.TensorPromise promise, *, bool copy) -> ()
dtorch::get_tensor_async(Tensor self, *, Device? device=None, bool copy=False) -> Future(Tensor)
dtorch::get_tensors_async(Tensor[] self, *, Device? device=None, bool copy=False) -> Future(Tensor[])
dtorch::get_wait(Tensor handle, Tensor source, *, Device? device=None) -> Tensor
dtorch::is_ready(Future(t) future) -> bool
dtorch::sync(Device[]? devices=None) -> Future(NoneType)
dtorch::sync.devices_promise(Device[]? devices, __torch__.torch.classes.dtorch.VoidPromise promise) -> ()
dtorch::sync.promise(__torch__.torch.classes.dtorch.VoidPromise promise, Device[]? devices=None) -> ()
dtorch::wait_all(Future(t)[] futures) -> t[]
dtorch::wait_for(Future(t) future, int timeout_ms) -> t""",  # noqa: E501
    )


def dispatched() -> list[str]:
    return sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("dtorch::"))


def test_the_operators_that_the_dispatcher_knows():
    """The others know type variables, which only the TorchScript runtime can."""
    assert_expected_inline(
        "\n".join(dispatched()),
        """\
dtorch::get_future
dtorch::get_future.void
dtorch::get_start
dtorch::get_tensor
dtorch::get_tensor.copy
dtorch::get_tensor_async
dtorch::get_tensors_async
dtorch::get_wait
dtorch::sync
dtorch::sync.devices_promise
dtorch::sync.promise""",
    )


@pytest.mark.parametrize("name", dispatched())
def test_alias_analysis_is_conservative(name):
    assert "alias analysis kind: CONSERVATIVE\n" in torch._C._dispatch_dump(name)


def _graph_of_two_equal_calls(schema: torch._C.FunctionSchema) -> torch._C.Graph:
    def written(type_: object) -> str:
        text = str(type_).replace("[t]", "[Tensor]")
        if text == "t":
            return "Tensor"
        for spelled, parsed in (
            ("Optional[List[Device]]", "Device[]?"),
            ("Optional[Device]", "Device?"),
            ("List[Future[Tensor]]", "Future(Tensor)[]"),
            ("List[Tensor]", "Tensor[]"),
            ("Future[Future(Tensor)[]]", "Future(Future(Tensor)[])"),
            ("Future[Tensor]", "Future(Tensor)"),
            ("Future[Tensor[]]", "Future(Tensor[])"),
            ("Future[NoneType]", "Future(NoneType)"),
        ):
            text = text.replace(spelled, parsed)
        return text

    takes = ", ".join(f"%{a.name} : {written(a.type)}" for a in schema.arguments)
    given = ", ".join(f"%{a.name}" for a in schema.arguments)
    call = f"{schema.name}({given})"
    calls = [
        "".join(f"%r{i} : {written(r.type)} = " for r in schema.returns) + call for i in range(2)
    ]
    return torch._C.parse_ir(
        f"graph({takes}):\n  "
        + "\n  ".join([*calls, "%none : NoneType = prim::Constant()", "return (%none)"])
    )


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: f"{s.name}.{s.overload_name}")
def test_two_equal_unused_calls_are_neither_merged_nor_dropped(schema):
    graph = _graph_of_two_equal_calls(schema)
    torch._C._jit_pass_cse(graph)
    torch._C._jit_pass_dce(graph)
    assert len(list(graph.findAllNodes(schema.name))) == 2, graph


def test_the_graph_passes_do_drop_what_is_pure():
    """Else the test above would prove nothing."""
    graph = torch._C.parse_ir(
        """graph(%x : Tensor):
             %a : Tensor = aten::relu(%x)
             %none : NoneType = prim::Constant()
             return (%none)"""
    )
    torch._C._jit_pass_dce(graph)
    assert not list(graph.findAllNodes("aten::relu"))


@pytest.mark.parametrize("name", ["get_tensor_async", "get_tensors_async", "sync"])
def test_the_operators_of_the_contract_return_futures(name):
    assert all(
        str(schema.returns[0].type).startswith("Future[")
        for schema in torch._C._jit_get_schemas_for_operator(f"dtorch::{name}")
        if schema.returns
    )


# ---- get_tensor_async ---------------------------------------------------------------------------


def test_fetching_shares_memory(fetch):
    t = torch.zeros(3)
    result = fetch(t)
    assert result.data_ptr() == t.data_ptr()
    t.add_(1)  # after the fetch
    assert result.tolist() == [1, 1, 1]
    result.mul_(5)
    assert t.tolist() == [5, 5, 5]


def test_on_the_cpu_the_future_is_complete_on_return():
    t = torch.ones(1)
    assert ops.get_tensor_async(t).done()
    assert dtorch_ops.to_torch_async(t, copy=True).is_ready()
    assert ops.sync().done()


@pytest.mark.parametrize("n", [0, 1, 16 * 2**20])
def test_a_copy_is_a_snapshot(fetch, n):
    t = torch.ones(n)
    result = fetch(t, copy=True)
    t.zero_()  # at once
    assert torch.equal(result, torch.ones(n))
    result.fill_(7)
    assert torch.equal(t, torch.zeros(n))


def test_a_snapshot_is_taken_at_the_call_not_at_the_read():
    t = torch.ones(16 * 2**20)
    futures = [ops.get_tensor_async(t, copy=True), dtorch_ops.to_torch_async(t, copy=True)]
    t.zero_()
    for future in futures:
        assert torch.equal(future.wait(), torch.ones_like(t))


def test_a_snapshot_outlives_its_source():
    futures = [dtorch_ops.to_torch_async(torch.full((4,), i), copy=True) for i in range(200)]
    assert [f.get()[0].item() for f in futures] == list(range(200))


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_the_device_that_the_tensor_is_on_is_no_copy(fetch, device):
    t = torch.zeros(2)
    assert fetch(t, device=device).data_ptr() == t.data_ptr()


def test_a_copy_on_the_same_device_is_a_snapshot(fetch):
    t = torch.zeros(2)
    result = fetch(t, device="cpu", copy=True)
    t.add_(1)
    assert result.tolist() == [0, 0]


@pytest.mark.parametrize("copy", [False, True])
def test_to_meta(fetch, copy):
    result = fetch(torch.zeros(2, 3, dtype=torch.int16), device="meta", copy=copy)
    assert (result.device.type, result.shape, result.dtype) == ("meta", (2, 3), torch.int16)


def test_from_meta_there_is_nothing_to_copy(fetch):
    with pytest.raises(NotImplementedError, match="meta"):
        fetch(torch.zeros(2, device="meta"), device="cpu")


def test_the_first_paragraph_of_the_docstring_says_what_is_shared():
    first, _, _ = dtorch_ops.to_torch_async.__doc__.partition("\n\n")
    for words in ("shares memory", "in-place update shows", "copy=True", "snapshot"):
        assert words in " ".join(first.split())


# ---- Gradients ----------------------------------------------------------------------------------

copies = pytest.mark.parametrize("copy", [False, True])


@copies
def test_gradients_reach_a_leaf(fetch, copy):
    leaf = torch.ones(2, requires_grad=True)
    (fetch(leaf, copy=copy) * torch.tensor([2.0, 3.0])).sum().backward()
    assert leaf.grad.tolist() == [2, 3]


@copies
def test_gradients_go_through_what_was_computed(fetch, copy):
    leaf = torch.ones(2, requires_grad=True)
    (fetch(leaf * 2, copy=copy) * 5).sum().backward()
    assert leaf.grad.tolist() == [10, 10]


@copies
@pytest.mark.parametrize(
    "view, gradient",
    [
        (lambda t: t[1:], [[0, 0], [1, 1]]),
        (lambda t: t.t(), [[1, 1], [1, 1]]),
        (lambda t: t[0].expand(3, 2), [[3, 3], [0, 0]]),
        (lambda t: t.diagonal(), [[1, 0], [0, 1]]),
    ],
    ids=["slice", "transpose", "expand", "diagonal"],
)
def test_gradients_go_through_views(fetch, copy, view, gradient):
    leaf = torch.ones(2, 2, requires_grad=True)
    fetch(view(leaf), copy=copy).sum().backward()
    assert leaf.grad.tolist() == gradient


def test_gradients_of_the_copy_are_those_of_the_snapshot(fetch):
    leaf = torch.full((2,), 3.0, requires_grad=True)
    t = leaf * 1
    snapshot = fetch(t, copy=True)
    t.zero_()
    (snapshot * snapshot).sum().backward()
    assert leaf.grad.tolist() == [6, 6]


@copies
def test_second_derivatives(fetch, copy):
    assert torch.autograd.gradgradcheck(
        lambda t: fetch(t, copy=copy) ** 3, torch.ones(2, dtype=torch.double, requires_grad=True)
    )


# torch loads rules for forward mode that are written in TorchScript.
_forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@_forward_mode
@copies
def test_forward_mode_derivatives(fetch, copy):
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        dual = forward.make_dual(torch.ones(2), torch.tensor([3.0, 4.0]))
        assert forward.unpack_dual(fetch(dual, copy=copy)).tangent.tolist() == [3, 4]


@_forward_mode
@copies
@pytest.mark.parametrize("fetch", [FETCHES["packet"], FETCHES["to_torch"]], ids=["op", "to_torch"])
@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f, x: torch.func.grad(f)(x),
        lambda f, x: torch.func.jvp(f, (x,), (torch.tensor([1.0, 0.0]),))[1] * torch.ones(2),
    ],
    ids=["grad", "jvp"],
)
def test_functional_derivatives_are_right_or_refused(fetch, copy, differentiate):
    """A wrong number is never an answer."""
    try:
        derivative = differentiate(lambda t: (fetch(t, copy=copy) * 2).sum(), torch.ones(2))
    except (RuntimeError, NotImplementedError) as error:
        assert "get_tensor_async" in str(error)
    else:
        assert derivative.tolist() == [2, 2]


def test_vmap_has_no_rule_and_says_so(fetch):
    with pytest.raises(RuntimeError, match="get_tensor_async"):
        torch.func.vmap(fetch)(torch.ones(2, 2))


def test_without_grad_nothing_is_recorded(fetch):
    leaf = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not fetch(leaf, copy=True).requires_grad
        assert fetch(leaf).requires_grad  # the very same tensor


def test_gradients_go_through_a_promise():
    leaf = torch.ones(2, requires_grad=True)
    promise = dtorch_ops.TensorPromise()
    ops.get_tensor(leaf * 2, promise)
    (promise.get_future().get() * 3).sum().backward()
    assert leaf.grad.tolist() == [6, 6]


def test_inference_tensors(fetch):
    with torch.inference_mode():
        t = torch.ones(2)
        assert fetch(t).is_inference()
        assert fetch(t, copy=True).is_inference()
    assert fetch(t) is t
    outside = fetch(t, copy=True)
    assert outside.tolist() == [1, 1] and not outside.is_inference()


# ---- get_tensor, get_future, sync ---------------------------------------------------------------


@pytest.fixture(params=["ours", "torch.classes"])
def tensor_promise(request: pytest.FixtureRequest) -> object:
    if request.param == "ours":
        return dtorch_ops.TensorPromise()
    return torch.classes.dtorch.TensorPromise()


@pytest.fixture(params=["ours", "torch.classes"])
def void_promise(request: pytest.FixtureRequest) -> object:
    if request.param == "ours":
        return dtorch_ops.VoidPromise()
    return torch.classes.dtorch.VoidPromise()


def test_get_tensor_fulfils_the_promise(tensor_promise):
    t = torch.ones(2)
    future = ops.get_future(tensor_promise)
    assert not future.done()
    assert ops.get_tensor(t, tensor_promise) is None
    assert future.wait() is t


@pytest.mark.parametrize("make", [dtorch_ops.TensorPromise, dtorch_ops.VoidPromise])
def test_a_promise_is_true_and_equal_to_itself(make):
    """As every object is that says nothing else about it: for ``if``, ``in`` and ``remove()``."""
    promise, other = make(), make()
    assert promise
    assert promise == promise and promise != other and promise != 3
    promises = [other, promise]
    assert promise in promises and make() not in promises
    promises.remove(promise)
    assert len(promises) == 1 and len({promise, other}) == 2


@pytest.mark.parametrize("get_future", [ops.get_future, ops.get_future.default])
def test_get_future_of_a_tensor_promise(tensor_promise, get_future):
    first, second = get_future(tensor_promise), get_future(tensor_promise)
    ops.get_tensor(torch.ones(2), tensor_promise)
    assert first.wait() is second.wait()


@pytest.mark.parametrize("get_future", [ops.get_future, ops.get_future.void])
def test_get_future_of_a_void_promise(void_promise, get_future):
    future = get_future(void_promise)
    assert not future.done()
    ops.sync(void_promise)
    assert future.wait() is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.sync(),
        lambda: ops.sync(None),
        lambda: ops.sync([]),
        lambda: ops.sync(["cpu"]),
        lambda: ops.sync([torch.device("cpu"), torch.device("meta")]),
        lambda: ops.sync(devices=["cpu"]),
        lambda: ops.sync.default(),
        lambda: ops.sync.default(["cpu"]),
        lambda: dtorch_ops.sync_future(),
        lambda: dtorch_ops.sync_future("cpu"),
        lambda: dtorch_ops.sync_future(torch.device("cpu")),
        lambda: dtorch_ops.sync_future(["cpu", torch.device("meta")]),
        lambda: dtorch_ops.sync_future([]),
    ],
)
def test_sync_gives_a_future_of_nothing(call):
    assert call().wait() is None


@pytest.mark.parametrize(
    "call",
    [
        lambda p: ops.sync(p),
        lambda p: ops.sync(p, None),
        lambda p: ops.sync(p, ["cpu"]),
        lambda p: ops.sync(None, p),
        lambda p: ops.sync([], p),
        lambda p: ops.sync(["cpu"], p),
        lambda p: ops.sync(promise=p),
        lambda p: ops.sync(promise=p, devices=["cpu"]),
        lambda p: ops.sync.promise(p),
        lambda p: ops.sync.promise(p, devices=["cpu"]),
        lambda p: ops.sync.devices_promise(["cpu"], p),
    ],
)
def test_sync_fulfils_a_void_promise(void_promise, call):
    future = ops.get_future.void(void_promise)
    assert call(void_promise) is None
    assert future.done() and future.wait() is None


def test_dtorch_ops_sync():
    assert dtorch_ops.sync() is None
    assert dtorch_ops.sync(["cpu"], timeout_ms=0) is None


@pytest.mark.parametrize(
    "fulfil, promise",
    [
        (lambda p: ops.get_tensor(torch.ones(1), p), dtorch_ops.TensorPromise),
        (lambda p: ops.sync(p), dtorch_ops.VoidPromise),
    ],
    ids=["get_tensor", "sync"],
)
def test_an_operator_fulfils_a_promise_once(fulfil, promise):
    satisfied = promise()
    fulfil(satisfied)
    with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError, match="fulfilled"):
        fulfil(satisfied)
    cancelled = promise()
    cancelled.cancel()
    with pytest.raises(dtorch_ops.PromiseAlreadySatisfiedError, match="cancelled"):
        fulfil(cancelled)


def test_the_operators_are_racing_producers():
    """Of many threads that fulfil one promise, one wins and all others are told."""
    for _ in range(200):
        promise = dtorch_ops.TensorPromise()
        start = threading.Barrier(4)

        def produce(value: float, promise=promise, start=start) -> bool:
            start.wait()
            try:
                ops.get_tensor(torch.tensor(value), promise)
            except dtorch_ops.PromiseAlreadySatisfiedError:
                return False
            return True

        workers = [Worker(lambda v=float(i): (v, produce(v))) for i in range(4)]
        won = [value for value, wins in (w.finish() for w in workers) if wins]
        assert won == [promise.get_future().get().item()]


# ---- is_ready, wait_for, collect_all, collect_any, wait_all -------------------------------------


def test_is_ready():
    promise = dtorch_ops.TensorPromise()
    future = promise.get_future()
    assert ops.is_ready(future) is False
    assert ops.is_ready(torch.futures.Future()) is False
    promise.set_value(torch.ones(1))
    assert ops.is_ready(future) is True
    assert ops.is_ready(failed(ValueError("no"))) is True
    assert ops.is_ready(ops.sync()) is True


def test_wait_for_a_value():
    t = torch.ones(2)
    future = dtorch_ops.to_torch_async(t)
    assert ops.wait_for(future, 0) is t
    assert ops.wait_for(future, 2**62) is t
    assert ops.wait_for(ops.get_tensor_async(t), 1000) is t
    assert ops.wait_for(ops.sync(), 0) is None
    assert future.valid()  # it does not consume


def test_wait_for_has_a_bound():
    promise = dtorch_ops.TensorPromise()
    future = promise.get_future()
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="time limit"):
        ops.wait_for(future, 50)
    assert time.monotonic() - begin >= 0.05
    with pytest.raises(TimeoutError):
        ops.wait_for(future, 0)
    assert not future.done()
    promise.set_value(torch.ones(1))
    assert ops.wait_for(future, 0).item() == 1


def test_wait_for_lets_other_threads_run():
    """It neither holds the interpreter lock nor misses a completion from another thread."""
    promise = dtorch_ops.TensorPromise()
    future = promise.get_future()
    waiter = Worker(lambda: ops.wait_for(future, 2**62))
    promise.set_value(torch.ones(1))
    assert waiter.finish().item() == 1


@pytest.mark.parametrize("make", [failed, stock_failed])
@pytest.mark.parametrize(
    "read",
    [
        lambda f: ops.wait_for(f, 1000),
        lambda f: ops.wait_all([f]),
        lambda f: ops.collect_all([f]).wait(),
        lambda f: ops.collect_any([f]).wait(),
    ],
    ids=["wait_for", "wait_all", "collect_all", "collect_any"],
)
def test_an_error_keeps_its_type(make, read):
    for _ in range(2):  # every time it is read
        with pytest.raises(KeyError) as caught:
            read(make(KeyError("k", 1)))
        assert caught.value.args == ("k", 1)


def mixed_futures() -> list[torch._C.Future[Tensor]]:
    """Ours, a bare one and a stock one."""
    stock: torch.futures.Future[Tensor] = torch.futures.Future()
    stock.set_result(torch.tensor(2.0))
    return [
        dtorch_ops.to_torch_async(torch.tensor(0.0)),
        ops.get_tensor_async(torch.tensor(1.0)),
        stock,
    ]


def test_groups_take_futures_of_any_origin():
    assert [t.item() for t in ops.wait_all(mixed_futures())] == [0, 1, 2]
    assert [f.wait().item() for f in ops.collect_all(mixed_futures()).wait()] == [0, 1, 2]
    assert ops.collect_any(mixed_futures()).wait().item() == 0
    ours = [dtorch_ops.to_torch_async(torch.tensor(3.0))]
    assert [t.item() for t in torch.futures.wait_all(ours)] == [3]
    assert torch.futures.collect_all(ours).wait()[0].wait().item() == 3


def test_groups_of_nothing():
    assert ops.wait_all([]) == []
    assert ops.collect_all([]).wait() == []
    with pytest.raises(ValueError, match="at least one future"):
        ops.collect_any([])


def test_the_same_future_twice():
    promise = dtorch_ops.TensorPromise()
    future = promise.get_future()
    both, either = ops.collect_all([future, future]), ops.collect_any([future, future])
    promise.set_value(torch.ones(1))
    assert len(both.wait()) == 2 and either.wait().item() == 1
    assert len(ops.wait_all([future, future])) == 2
    assert future.valid()


@pytest.mark.parametrize("first", ["pending", "failed"])
@pytest.mark.parametrize("make", [failed, stock_failed])
def test_a_group_fails_at_once_while_the_rest_still_runs(first, make):
    promise = dtorch_ops.TensorPromise()
    pending = promise.get_future()
    group = [pending, make(KeyError("k"))]
    if first == "failed":
        group.reverse()
    with pytest.raises(KeyError):
        Worker(lambda: ops.wait_all(group)).finish()
    with pytest.raises(KeyError):
        Worker(ops.collect_all(group).wait).finish()
    assert not pending.done() and pending.valid()
    promise.set_value(torch.ones(1))
    assert pending.get().item() == 1


def test_collect_all_waits_for_all():
    promises = [dtorch_ops.TensorPromise() for _ in range(3)]
    group = ops.collect_all([p.get_future() for p in promises])
    for i in (2, 0, 1):
        assert not group.done()
        promises[i].set_value(torch.tensor(float(i)))
    assert [f.wait().item() for f in group.wait()] == [0, 1, 2]


def test_collect_any_gives_the_first_to_complete():
    promises = [dtorch_ops.TensorPromise() for _ in range(3)]
    group = ops.collect_any([p.get_future() for p in promises])
    assert not group.done()
    promises[1].set_value(torch.tensor(1.0))
    promises[0].set_exception(KeyError("late"))
    assert group.wait().item() == 1


def test_a_bare_future_becomes_one_of_ours_in_one_call():
    bare = ops.get_tensor_async(torch.ones(1))
    future = dtorch_ops.Future(bare)
    assert isinstance(future, torch._C.Future)
    assert future.wait(0).item() == 1 and future.get().item() == 1 and not future.valid()


# ---- Refusals -----------------------------------------------------------------------------------


def absent_devices() -> list[str]:
    """Devices that are not there, whatever this build is for."""
    present = torch.accelerator.current_accelerator()
    names = ["cuda", "cuda:3", "xpu:0", "mps", "hpu", "privateuseone"]
    return [n for n in names if present is None or not n.startswith(present.type)]


@pytest.mark.parametrize("device", absent_devices())
def test_an_absent_device(fetch, device):
    with pytest.raises(ValueError, match=f"expected a device .*cpu, meta.* got {device}"):
        fetch(torch.ones(1), device=device)


@pytest.mark.parametrize("device", absent_devices())
def test_sync_with_an_absent_device(device):
    promise = dtorch_ops.VoidPromise()
    for call in (
        lambda: ops.sync([device]),
        lambda: ops.sync(["cpu", device]),
        lambda: ops.sync([device], promise),
        lambda: dtorch_ops.sync(device),
        lambda: dtorch_ops.sync_future(["cpu", device]),
    ):
        with pytest.raises(ValueError, match=f"expected a device .*cpu, meta.* got {device}"):
            call()
    assert promise.is_pending()


@pytest.mark.parametrize("device", ["nonsense", "cpu:-2", "", -1, 2**70])
@pytest.mark.parametrize(
    "call",
    [lambda d: dtorch_ops.to_torch_async(torch.ones(1), device=d), dtorch_ops.sync],
    ids=["to_torch_async", "sync"],
)
def test_what_names_no_device_is_a_value_error(call, device):
    with pytest.raises(ValueError, match="device"):
        call(device)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an index names an accelerator here")
@pytest.mark.parametrize(
    "call",
    [
        lambda: dtorch_ops.to_torch_async(torch.ones(1), device=0),
        lambda: dtorch_ops.sync(0),
    ],
    ids=["to_torch_async", "sync"],
)
def test_an_index_where_there_is_no_accelerator_is_a_value_error(call):
    with pytest.raises(ValueError, match="device"):
        call()


def test_an_undefined_tensor():
    promise = dtorch_ops.TensorPromise()
    for call in (
        lambda: ops.get_tensor_async(None),
        lambda: ops.get_tensor_async.default(None),
        lambda: ops.get_tensor_async(None, copy=True),
        lambda: ops.get_tensor(None, promise),
        lambda: ops.get_tensor.default(None, promise),
        lambda: torch.classes.dtorch.TensorPromise().set_value(None),
    ):
        with pytest.raises(ValueError, match="expected a tensor, got an undefined one"):
            call()
    assert promise.is_pending()


WRONG_FOR_OPERATORS: dict[str, tuple[Callable[[], object], str]] = {
    "no argument": (lambda: ops.get_tensor_async(), "self"),
    "a list for a tensor": (lambda: ops.get_tensor_async([1]), "Tensor.*list"),
    "a positional device": (lambda: ops.get_tensor_async(torch.ones(1), "cpu"), "positional"),
    "a number for a device": (lambda: ops.get_tensor_async(torch.ones(1), device=3), "Device.*int"),
    "an unknown device": (lambda: ops.get_tensor_async(torch.ones(1), device="x"), "device"),
    "an unknown argument": (lambda: ops.get_tensor_async(torch.ones(1), kopy=True), "kopy"),
    "None for a promise": (lambda: ops.get_tensor(torch.ones(1), None), "TensorPromise"),
    "a tensor for a promise": (lambda: ops.get_future(torch.ones(1)), "TensorPromise"),
    "no promise": (lambda: ops.get_tensor(torch.ones(1)), "promise"),
    "a future for a promise": (
        lambda: ops.get_tensor(torch.ones(1), dtorch_ops.TensorPromise().get_future()),
        "TensorPromise",
    ),
    "void promise to get_tensor": (
        lambda: ops.get_tensor(torch.ones(1), dtorch_ops.VoidPromise()),
        "expected a TensorPromise, got a VoidPromise",
    ),
    "tensor promise to sync": (
        lambda: ops.sync(dtorch_ops.TensorPromise()),
        "expected a VoidPromise, got a TensorPromise",
    ),
    "a string for devices": (lambda: ops.sync("cpu"), "device|Device"),
    "numbers for devices": (lambda: ops.sync([1]), "Device"),
    "a tensor for a future": (
        lambda: ops.is_ready(torch.ones(1)),
        "is_ready: future: expected a torch future, got Tensor",
    ),
    "no time limit": (lambda: ops.wait_for(ops.sync()), "timeout_ms"),
    "a float for a time limit": (lambda: ops.wait_for(ops.sync(), 1.5), "int.*float"),
    "a time limit beyond 64 bits": (lambda: ops.wait_for(ops.sync(), 2**63), "int"),
    "a negative time limit": (lambda: ops.wait_for(ops.sync(), -1), ">= 0, got -1"),
    "a tensor for a group": (
        lambda: ops.wait_all(torch.ones(1)),
        "wait_all: futures: expected a list of torch futures, got Tensor",
    ),
    "a group of tensors": (
        lambda: ops.collect_all([torch.ones(1)]),
        "collect_all: futures: expected a torch future, got Tensor",
    ),
}

WRONG_FOR_FUNCTIONS: dict[str, tuple[Callable[[], object], str]] = {
    "to_torch_async of a set": (lambda: dtorch_ops.to_torch_async({1}), "Tensor, or .*got set"),
    "to_torch_async of None": (lambda: dtorch_ops.to_torch_async(None), "Tensor, or .*NoneType"),
    "a number for copy": (lambda: dtorch_ops.to_torch(torch.ones(1), copy=1), "bool, got int"),
    "a positional device to us": (lambda: dtorch_ops.to_torch(torch.ones(1), "cpu"), "positional"),
    "a float for a device": (
        lambda: dtorch_ops.to_torch(torch.ones(1), device=1.5),
        "device: expected .* got float",
    ),
    "True for a device": (
        lambda: dtorch_ops.to_torch(torch.ones(1), device=True),
        "device: expected .* got bool",
    ),
    "sync with a float": (lambda: dtorch_ops.sync(1.5), "devices: expected .* got float"),
    "sync with a hole": (lambda: dtorch_ops.sync(["cpu", None]), "devices: expected .* NoneType"),
    "sync with a negative time": (lambda: dtorch_ops.sync(timeout_ms=-1), ">= 0, got -1"),
    "sync with a time in words": (lambda: dtorch_ops.sync(timeout_ms="1"), "number.* got str"),
}


@pytest.mark.parametrize("call, message", WRONG_FOR_OPERATORS.values(), ids=WRONG_FOR_OPERATORS)
def test_wrong_arguments_of_an_operator(call, message):
    """Torch's own parser of arguments raises RuntimeError for most."""
    with pytest.raises((TypeError, ValueError, RuntimeError), match=f"(?s){message}"):
        call()


@pytest.mark.parametrize("call, message", WRONG_FOR_FUNCTIONS.values(), ids=WRONG_FOR_FUNCTIONS)
def test_wrong_arguments_of_a_function(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# Torch's own conversion of arguments follows null pointers for some of these: each call is made
# in one process, which tells how each ended.
_CALLS = """
import json
from dtorch_ops import Future, TensorFuture, TensorPromise, VoidPromise
ops = torch.ops.dtorch
BareFuture, ScriptObject = torch._C.Future, torch._C.ScriptObject
tensor, void = TensorPromise(), VoidPromise()
future = tensor.get_future()
done = dtorch_ops.sync_future()
t = torch.ones(2)
outcomes = {{}}
for call in {calls!r}:
    print(call, flush=True)
    try:
        outcomes[call] = f"no error: {{eval(call)}}"
    except Exception as error:
        outcomes[call] = f"{{type(error).__name__}}: {{error}}"
assert tensor.is_pending() and void.is_pending() and not future.is_ready()
print(json.dumps(outcomes))
"""


def outcomes_of(calls: list[str]) -> dict[str, str]:
    outcomes = fresh.check(_CALLS.format(calls=calls)).splitlines()[-1]
    return dict(json.loads(outcomes))


# Expressions that give no future, and the type that the message names.
NO_FUTURE = {
    "None": "NoneType",
    "3": "int",
    "'f'": "str",
    "t": "Tensor",
    "tensor": "TensorPromise",
    "BareFuture": "pybind11_type",
    "[done]": "list",
    # Objects without anything inside, since their __init__ has not run.
    "BareFuture.__new__(BareFuture)": "torch._C.Future",
    "TensorFuture.__new__(TensorFuture)": "TensorFuture",
    "ScriptObject.__new__(ScriptObject)": "torch._C.ScriptObject",
}


@pytest.mark.parametrize("operator", ["is_ready", "wait_for"])
def test_what_is_no_future_is_a_type_error_of_the_operator(operator):
    more = "" if operator == "is_ready" else ", timeout_ms=0"
    expected = {
        f"ops.{operator}{overload}({name}{bad}{more})": (
            f"TypeError: {operator}: future: expected a torch future, got {found}"
        )
        for bad, found in NO_FUTURE.items()
        for overload in ("", ".default")
        for name in ("", "future=")
    }
    if operator == "wait_for":
        expected["ops.wait_for(None, 0)"] = expected["ops.wait_for(None, timeout_ms=0)"]
        expected["ops.wait_for(timeout_ms=0, future=None)"] = expected["ops.wait_for(None, 0)"]
    assert outcomes_of(list(expected)) == expected


@pytest.mark.parametrize("operator", ["wait_all", "collect_all", "collect_any"])
def test_a_member_that_is_no_future_is_a_type_error_of_the_operator(operator):
    expected = {
        f"ops.{operator}{overload}({name}{members})": (
            f"TypeError: {operator}: futures: expected a torch future, got {found}"
        )
        for bad, found in NO_FUTURE.items()
        for overload in ("", ".default")
        for name in ("", "futures=")
        for members in (f"[{bad}]", f"({bad},)", f"[done, future, {bad}]", f"(done, {bad})")
    }
    assert outcomes_of(list(expected)) == expected


@pytest.mark.parametrize("operator", ["wait_all", "collect_all", "collect_any"])
def test_what_is_no_list_is_a_type_error_of_the_operator(operator):
    no_list = {"done": "VoidFuture", "iter([done])": "list_iterator", "{done}": "set"}
    expected = {
        f"ops.{operator}{overload}({name}{bad})": (
            f"TypeError: {operator}: futures: expected a list of torch futures, got {found}"
        )
        for bad, found in (NO_FUTURE | no_list).items()
        if bad != "[done]"
        for overload in ("", ".default")
        for name in ("", "futures=")
    }
    assert outcomes_of(list(expected)) == expected


# Expressions that give no promise, and what the message says it has got.
NO_PROMISE = {
    "None": "NoneType",
    "3": "int",
    "1.5": "float",
    "'p'": "str",
    "[tensor]": "list",
    "t": "Tensor",
    "future": "TensorFuture",
    "ops.sync()": "torch._C.Future",
    "ScriptObject.__new__(ScriptObject)": (
        "a torch._C.ScriptObject whose __init__ has not been called"
    ),
}


def test_what_is_no_promise_is_a_type_error_of_the_operator():
    either = "TensorPromise or VoidPromise"
    expected = {
        call.format(bad): f"TypeError: {operator}: promise: expected a {wanted}, got {found}"
        for call, operator, wanted in (
            ("ops.get_tensor(t, {})", "get_tensor", "TensorPromise"),
            ("ops.get_tensor(t, promise={})", "get_tensor", "TensorPromise"),
            ("ops.get_tensor(promise={}, self=t)", "get_tensor", "TensorPromise"),
            ("ops.get_tensor.default(t, {})", "get_tensor", "TensorPromise"),
            ("ops.get_tensor.default(t, promise={})", "get_tensor", "TensorPromise"),
            ("ops.get_future({})", "get_future", either),
            ("ops.get_future(promise={})", "get_future", either),
            ("ops.get_future.default({})", "get_future", "TensorPromise"),
            ("ops.get_future.default(promise={})", "get_future", "TensorPromise"),
            ("ops.get_future.void({})", "get_future", "VoidPromise"),
            ("ops.get_future.void(promise={})", "get_future", "VoidPromise"),
            ("ops.sync.promise({})", "sync", "VoidPromise"),
            ("ops.sync.promise(devices=['cpu'], promise={})", "sync", "VoidPromise"),
            ("ops.sync.devices_promise(None, {})", "sync", "VoidPromise"),
            ("ops.sync.devices_promise(['cpu'], promise={})", "sync", "VoidPromise"),
        )
        for bad, found in NO_PROMISE.items()
    }
    assert outcomes_of(list(expected)) == expected


def test_a_promise_of_the_other_class_is_a_type_error_of_the_operator():
    """Ours, and torch's own objects of the same class."""
    voids = ("void", "torch.classes.dtorch.VoidPromise()", "VoidPromise.__new__(VoidPromise)")
    tensors = ("tensor", "torch.classes.dtorch.TensorPromise()")
    cases = [
        (voids, "TensorPromise", "ops.get_tensor(t, {})", "get_tensor"),
        (voids, "TensorPromise", "ops.get_tensor(t, promise={})", "get_tensor"),
        (voids, "TensorPromise", "ops.get_tensor.default(t, {})", "get_tensor"),
        (voids, "TensorPromise", "ops.get_future.default({})", "get_future"),
        (tensors, "VoidPromise", "ops.get_future.void({})", "get_future"),
        (tensors, "VoidPromise", "ops.sync({})", "sync"),
        (tensors, "VoidPromise", "ops.sync(promise={})", "sync"),
        (tensors, "VoidPromise", "ops.sync(['cpu'], {})", "sync"),
        (tensors, "VoidPromise", "ops.sync.promise({})", "sync"),
        (tensors, "VoidPromise", "ops.sync.devices_promise(None, {})", "sync"),
    ]
    expected = {
        call.format(promise): f"TypeError: {operator}: promise: expected a {wanted}, got a "
        for promises, wanted, call, operator in cases
        for promise in promises
    }
    outcomes = outcomes_of(list(expected))
    assert {c: o.rpartition(" ")[0] + " " for c, o in outcomes.items()} == expected


def test_what_is_no_promise_is_refused_by_the_packet_of_sync():
    """Where torch chooses the overload, it may be torch that refuses: with a RuntimeError."""
    calls = [
        call.format(bad)
        for bad in NO_PROMISE
        for call in ("ops.sync({})", "ops.sync(['cpu'], {})", "ops.sync(promise={})")
        if (bad, call) != ("None", "ops.sync({})")
    ]
    for call, outcome in outcomes_of(calls).items():
        assert outcome.startswith(("TypeError: sync: ", "RuntimeError: ")), (call, outcome)


def test_what_holds_nothing_is_a_type_error_of_our_functions():
    expected = {
        f"{function}({argument})": f"TypeError: {name}: expected a torch future, got {found}"
        for bad, found in NO_FUTURE.items()
        if bad != "BareFuture"
        for function, argument, name in (
            ("dtorch_ops.wait_all", f"[{bad}]", "futures"),
            ("dtorch_ops.collect_all", f"[done, {bad}]", "futures"),
            ("dtorch_ops.collect_any", f"[{bad}]", "futures"),
            ("dtorch_ops.as_completed", f"[{bad}]", "futures"),
            ("Future", bad, "future"),
            ("TensorFuture", bad, "future"),
        )
    }
    assert outcomes_of(list(expected)) == expected


class _OurFuture(dtorch_ops.TensorFuture):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda t: ops.get_tensor_async(t),
        lambda t: dtorch_ops.to_torch_async(t),
        lambda t: _OurFuture(ops.get_tensor_async(t)),
        lambda t: torch.jit.fork(lambda: t),
    ],
    ids=["bare", "ours", "subclass", "fork"],
)
@pytest.mark.parametrize("overload", ["packet", "default"])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_every_way_of_passing_a_future(make, overload):
    """What looks at the arguments first hands all of them on."""

    def op(name: str) -> Callable[..., object]:
        packet = getattr(ops, name)
        return packet if overload == "packet" else packet.default

    future = make(torch.tensor(4.0))
    assert op("is_ready")(future) is op("is_ready")(future=future) is True
    for read in (
        lambda: op("wait_for")(future, 0),
        lambda: op("wait_for")(timeout_ms=0, future=future),
        lambda: op("wait_all")((future,))[0],
        lambda: op("wait_all")(futures=[future, future])[1],
        lambda: op("collect_all")((future,)).wait()[0].wait(),
        lambda: op("collect_any")(futures=(future,)).wait(),
    ):
        assert read() == torch.tensor(4.0)
    assert op("wait_all")(()) == op("wait_all")(futures=[]) == []


# ---- Compile ------------------------------------------------------------------------------------


def _compiled_promise(t: Tensor) -> Tensor:
    promise = dtorch_ops.TensorPromise()
    ops.get_tensor(t * 2, promise)
    return promise.get_future().get() + 1


def _compiled_sync(t: Tensor) -> Tensor:
    dtorch_ops.sync()
    ops.sync().wait()
    return t * 2 + 1


COMPILED: dict[str, Callable[[Tensor], Tensor]] = {
    "packet": lambda t: ops.get_tensor_async(t * 2).wait() + 1,
    "overload": lambda t: ops.get_tensor_async.default(t * 2, copy=True).wait() + 1,
    "to_torch_async": lambda t: dtorch_ops.to_torch_async(t * 2).get() + 1,
    "to_torch": lambda t: dtorch_ops.to_torch(t * 2, copy=True) + 1,
    "method": lambda t: (t * 2).to_torch() + 1,
    "wait_all": lambda t: dtorch_ops.wait_all([dtorch_ops.to_torch_async(t * 2)])[0] + 1,
    "wait_all operator": lambda t: ops.wait_all([ops.get_tensor_async(t * 2)])[0] + 1,
    "promise": _compiled_promise,
    "sync": _compiled_sync,
}


# Dynamo itself looks at this attribute of whatever lives across a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# Dynamo says so of every function of a native module that it meets.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", COMPILED)
def test_compiling_around_a_call_gives_the_right_result(name):
    """The graph breaks at the operator, or before it."""
    compiled = torch.compile(COMPILED[name], backend="eager")
    for value in (1.0, 5.0):
        leaf = torch.full((2,), value, requires_grad=True)
        result = compiled(leaf)
        assert result.tolist() == [2 * value + 1] * 2
        result.sum().backward()
        assert leaf.grad.tolist() == [2, 2]


# ---- Profiler -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FETCHES)
def test_the_profiler_sees_the_operator(name):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            FETCHES[name](torch.ones(1))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["dtorch::get_tensor_async"] == 3


def test_the_profiler_sees_the_other_operators():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.get_tensor(torch.ones(1), dtorch_ops.TensorPromise())
        dtorch_ops.sync()
    assert {"dtorch::get_tensor", "dtorch::sync"} <= {e.key for e in profile.key_averages()}
