"""get_start and get_wait as they run: no graph yet. Those of graphs are in test_compile.py."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref

import fake_accelerator as fake
import pytest
import tensor_cases
import torch
from helpers import Worker, check_python
from on_accelerator import (
    error_of,
    everything_held,
    forked,
    on_fake,
    pinned,
    run_all,
    until,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import dtorch_ops
from dtorch_ops import functional
from dtorch_ops.functional import get_start, get_wait

ops = torch.ops.dtorch
CPU, META = torch.device("cpu"), torch.device("meta")


# It says so, and forward-mode differentiation uses it.
torchscript_is_being_retired = pytest.mark.filterwarnings("ignore:.torch.jit")


def fetched(t: Tensor) -> Tensor:
    return get_wait(get_start(t))


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert a.requires_grad == b.requires_grad


# ---- The value ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "cpu", CPU, "meta"], ids=str)
def test_the_pair_equals_to_torch(device):
    t = torch.randn(3, 4)
    expected = dtorch_ops.to_torch(t, device=device, copy=True)
    for value in (get_wait(get_start(t, device)), get_wait(get_start(t, device=device))):
        assert value.device == expected.device and value.stride() == expected.stride()
        if not value.is_meta:
            same(value, expected)


def test_it_is_a_snapshot_taken_at_the_start():
    t = torch.zeros(3)
    first = get_start(t)
    t.add_(1)
    second = get_start(t)
    t.add_(1)
    assert get_wait(second).tolist() == [1, 1, 1]
    value = get_wait(first)
    value.fill_(7)
    assert t.tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", tensor_cases.NAMES)
def test_every_kind_of_strided_tensor(name):
    t = tensor_cases.cases()[name]
    try:
        t.clone()
    except NotImplementedError as refused:  # of torch, which copies not all of its dtypes
        with pytest.raises(NotImplementedError, match=str(refused)):
            get_start(t)
        return
    value, unrecorded = fetched(t), t.detach()
    assert value.shape == t.shape and value.dtype == t.dtype
    assert value.requires_grad == (t.requires_grad and torch.is_grad_enabled())
    assert not value.is_conj() and not value.is_neg()
    assert torch.equal(tensor_cases.plain(value), tensor_cases.plain(t))
    with FakeTensorMode() as fake_mode:
        stands_in = fake_mode.from_tensor(unrecorded)
        assert fetched(stands_in).stride() == value.stride()


@pytest.mark.parametrize("make", [torch.Tensor.clone, torch.Tensor.conj], ids=["plain", "conj"])
def test_no_byte_is_copied_twice(make):
    """The start makes the only copy, and the wait hands out the memory of it."""
    t = make(torch.ones(1 << 10, dtype=torch.complex64))
    with torch.profiler.profile(profile_memory=True) as profile:
        value = fetched(t)
    allocated = [e.cpu_memory_usage for e in profile.events() if e.cpu_memory_usage > 1 << 10]
    assert len([e for e in profile.events() if e.name == "aten::copy_"]) == 1
    assert allocated and all(size == value.nbytes for size in allocated)


def test_a_sparse_tensor():
    t = torch.eye(3).to_sparse()
    assert torch.equal(fetched(t).to_dense(), torch.eye(3))


# ---- The transfer -------------------------------------------------------------------------------


def test_a_transfer_is_waited_for_once():
    transfer = get_start(torch.ones(2))
    get_wait(transfer)
    for _ in range(2):
        with pytest.raises(dtorch_ops.FutureAlreadyRetrievedError, match="has been waited for"):
            get_wait(transfer)


def test_one_of_many_threads_gets_the_value():
    for _ in range(50):
        transfer = get_start(torch.ones(2))
        outcomes: list[object] = []
        start = threading.Barrier(4)

        def take(transfer=transfer, outcomes=outcomes, start=start):
            start.wait()
            try:
                outcomes.append(get_wait(transfer).tolist())
            except dtorch_ops.FutureAlreadyRetrievedError:
                outcomes.append("taken")

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(str, outcomes)) == ["[1.0, 1.0]", "taken", "taken", "taken"]


def test_the_handle_is_a_constant_byte():
    """Graphs compare, copy and keep it."""
    handles = [get_start(torch.randn(i)).handle for i in range(3)]
    for handle in handles:
        assert handle.dtype == torch.uint8 and handle.tolist() == [0] and handle.is_cpu


def test_a_copy_of_a_handle_owns_no_fetch():
    """Its source is fetched then: what checkers of graphs, which copy all arguments, rely on."""
    t = torch.zeros(2)
    transfer = get_start(t)
    t.add_(1)
    copied = transfer._replace(handle=transfer.handle.clone())
    assert get_wait(copied).tolist() == [1, 1]
    assert get_wait(transfer).tolist() == [0, 0]


def test_a_view_of_a_handle_is_the_handle():
    transfer = get_start(torch.zeros(2))
    assert get_wait(transfer._replace(handle=transfer.handle.view(1, 1))).tolist() == [0, 0]
    with pytest.raises(dtorch_ops.FutureAlreadyRetrievedError):
        get_wait(transfer)


def test_a_transfer_that_nobody_waits_for_keeps_nothing():
    t = torch.ones(2)
    gone = weakref.ref(t)
    transfer = get_start(t)
    del t
    assert gone() is not None, "a graph needs the source for as long as it may be read"
    del transfer
    gc.collect()
    assert gone() is None


def test_a_value_keeps_neither_the_source_nor_the_handle():
    t = torch.ones(2)
    transfer = get_start(t)
    gone = [weakref.ref(t), weakref.ref(transfer.handle)]
    value = get_wait(transfer)
    del t, transfer
    gc.collect()
    assert [ref() for ref in gone] == [None, None] and value.tolist() == [1, 1]


# ---- Wrong arguments ----------------------------------------------------------------------------

WRONG = {
    "no tensor": (lambda: get_start(1.0), TypeError, "input: expected a torch.Tensor, got float"),
    "None": (lambda: get_start(None), TypeError, "got NoneType"),
    "a float": (lambda: get_start(torch.ones(1), 1.5), TypeError, "device: expected .* got float"),
    "a bool": (lambda: get_start(torch.ones(1), True), TypeError, "device: expected .* got bool"),
    "no device": (lambda: get_start(torch.ones(1), "moon"), ValueError, "expected one that torch"),
    "unknown": (lambda: get_start(torch.ones(1), "xla"), ValueError, "expected a device .*cpu"),
    "no transfer": (
        lambda: get_wait(torch.ones(1)),
        TypeError,
        "transfer: expected .* Tensor",
    ),
    "other dtype": (
        lambda: get_wait(get_start(torch.ones(1))._replace(source=torch.ones(1, dtype=torch.int))),
        ValueError,
        "expected the tensor and the device that get_start was given",
    ),
    "operator": (lambda: ops.get_start(None), ValueError, "got an undefined one"),
    "operator wait": (
        lambda: ops.get_wait(None, torch.ones(1)),
        ValueError,
        "got an undefined tensor",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


# ---- Modes --------------------------------------------------------------------------------------


def test_no_grad_inference_mode_and_autocast():
    t = torch.ones(2, 2, requires_grad=True)
    with torch.no_grad():
        assert not fetched(t).requires_grad
    with torch.inference_mode():
        assert fetched(t).is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        assert fetched(t).dtype == torch.float32
        assert fetched(t @ t).dtype == torch.bfloat16
    with torch.inference_mode():
        transfer = get_start(t)
    assert get_wait(transfer).tolist() == t.tolist()


def test_a_default_device_moves_nothing():
    with torch.device("meta"):
        assert fetched(torch.ones(2, device="cpu")).tolist() == [1, 1]


@pytest.mark.parametrize("mode", ["fake", "meta"])
def test_tensors_without_data(mode):
    context = FakeTensorMode() if mode == "fake" else torch.device("meta")
    with context:
        t = torch.empty(3, 4).t()
        value = fetched(t)
        assert value.shape == (4, 3) and value.stride() == (1, 4) and value.device == t.device
        assert get_wait(get_start(t, "meta")).is_meta


@torchscript_is_being_retired
def test_a_scripted_function_keeps_the_pair():
    def twice(t: Tensor) -> list[Tensor]:
        first = torch.ops.dtorch.get_start(t)
        second = torch.ops.dtorch.get_start(t)
        t.add_(1)
        return [torch.ops.dtorch.get_wait(first, t), torch.ops.dtorch.get_wait(second, t)]

    scripted = torch.jit.script(twice)
    for _ in range(3):
        assert [v.tolist() for v in scripted(torch.zeros(1))] == [[0], [0]]


# ---- Gradients ----------------------------------------------------------------------------------


def test_the_gradient_goes_to_the_source():
    t = torch.ones(3, requires_grad=True)
    transfer = get_start(t * 2)
    (get_wait(transfer) * torch.arange(3.0)).sum().backward()
    assert t.grad.tolist() == [0, 2, 4]


@torchscript_is_being_retired
def test_gradients_of_gradients_and_forward_mode():
    t = torch.randn(3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(fetched, (t,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(fetched, (t,))


def test_what_has_no_gradient():
    assert not fetched(torch.arange(3)).requires_grad
    assert not get_start(torch.ones(1, requires_grad=True)).handle.requires_grad


TRANSFORMS = {
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(lambda x: f(x).pow(3).sum())(x),
    "vmap": lambda f, x: vmap(f)(x),
    "vmap of another dim": lambda f, x: vmap(f, in_dims=1, out_dims=1)(x),
    "vmap of vmap": lambda f, x: vmap(vmap(f))(x),
    "vmap of grad": lambda f, x: vmap(grad(lambda x: f(x).sum()))(x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


@torchscript_is_being_retired
@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_transforms(name):
    x = torch.randn(3, 4)
    same(TRANSFORMS[name](lambda x: fetched(x * 2), x), TRANSFORMS[name](lambda x: x * 2, x))


def test_vmap_of_what_is_not_batched():
    t = torch.ones(2)
    assert vmap(lambda x: fetched(t) + x)(torch.zeros(3, 2)).shape == (3, 2)


def test_vmap_fetches_the_batch_as_one():
    with torch.profiler.profile() as profile:
        vmap(fetched)(torch.ones(100, 2))
    assert [e.name for e in profile.events() if e.name == "dtorch::get_start"].count(
        "dtorch::get_start"
    ) <= 2  # the transform shows itself, too


def test_a_module_under_functional_call():
    module = torch.nn.Linear(2, 2)
    parameters = dict(module.named_parameters())

    def loss(parameters):
        return fetched(functional_call(module, parameters, (torch.ones(1, 2),))).sum()

    assert grad(loss)(parameters)["bias"].tolist() == [1, 1]


# ---- An accelerator -----------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("size", [4, 1 << 19])
@on_fake("its tasks are steered one by one")
def test_the_copy_runs_beside_what_stands_between(size, frozen):
    pair = dtorch_ops.functional
    x = torch.ones(size, device="fake:0")
    fake.drain("fake:0")
    fake.reset_counters()
    with everything_held(0) as others:
        transfer = pair.get_start(x, "cpu", frozen=frozen)
        y = x * 2
        if not frozen:
            x.zero_()
        assert fake.counters().my_syncs() == {}
        # The copy is held, and all that was queued is done.
        run_all("fake:0")
        assert fake.queued("fake:0") == []
        copying = [s for s in others if "copy" in fake.queued(s)]
        assert len(copying) == 1
        waiting = Worker(lambda: pair.get_wait(transfer))
        fake.until_blocked(1)
        assert waiting.is_alive()
        run_all(copying[0])
        value = waiting.finish()
    assert value.is_pinned() and value.min() == value.max() == 1
    assert fake.counters().copies == (1 if frozen else 2)  # the clone, on the device
    assert y.sum().item() == 2 * size


@on_fake("its tasks are steered one by one")
def test_a_frozen_source_in_pinned_memory_is_copied_once():
    pair = dtorch_ops.functional
    for make, copies in ((lambda: pinned(4, value=3), 0), (lambda: torch.full((4,), 3.0), 1)):
        x = make()
        pinned_before = fake.pinned_memory().allocations
        transfer = pair.get_start(x, "fake:0", frozen=True)
        assert fake.pinned_memory().allocations - pinned_before == copies
        assert pair.get_wait(transfer).cpu().tolist() == [3] * 4


@on_fake("its tasks are steered one by one")
def test_what_is_written_to_the_source_of_an_accelerator_is_not_seen():
    pair = dtorch_ops.functional
    for device in ("cpu", "fake:0", "fake:1"):
        for size in (4, 1 << 19):
            x = torch.ones(size, device="fake:0")
            transfer = pair.get_start(x, device)
            x.add_(1)
            value = pair.get_wait(transfer)
            assert value.device == torch.device(device)
            assert value.cpu().min() == value.cpu().max() == 1
    x = torch.ones(4)
    transfer = pair.get_start(x, "fake:0")
    x.add_(1)
    assert pair.get_wait(transfer).cpu().tolist() == [1] * 4


@on_fake("its tasks are steered one by one")
def test_the_error_of_an_accelerator_is_raised_by_the_wait():
    pair = dtorch_ops.functional
    x = torch.ones(4, device="fake:0")
    fake.drain("fake:0")
    with everything_held(0):
        fake.fail_next("copy", "the copy has failed")
        transfer = pair.get_start(x, "cpu", frozen=True)
    for _ in range(2):
        assert "the copy has failed" in str(error_of(lambda: pair.get_wait(transfer)))


@on_fake("its tasks are steered one by one")
def test_the_gradient_goes_back_to_an_accelerator():
    pair = dtorch_ops.functional
    x = torch.ones(4, device="fake:0", requires_grad=True)
    (pair.get_wait(pair.get_start(x, "cpu")) * 3).sum().backward()
    assert x.grad.device == x.device and x.grad.cpu().tolist() == [3] * 4


@on_fake("its tasks are steered one by one")
def test_ctrl_c_ends_a_wait_which_can_be_waited_for_again():
    from pathlib import Path

    pair = dtorch_ops.functional
    x = torch.ones(4, device="fake:0")
    fake.drain("fake:0")
    with everything_held(0):
        transfer = pair.get_start(x, "cpu")
        stat = Path(f"/proc/self/task/{threading.get_native_id()}/stat")

        def interrupt():
            for _ in range(3):  # it may have slept for want of the interpreter lock
                until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")
            os.kill(os.getpid(), signal.SIGINT)

        try:
            Worker(interrupt)
            pair.get_wait(transfer)
            raise AssertionError("it was not interrupted")
        except KeyboardInterrupt:
            pass
    assert pair.get_wait(transfer).tolist() == [1] * 4


@on_fake("its tasks are steered one by one")
def test_a_forked_child_is_told_that_a_pending_transfer_is_its_parents():
    pair = dtorch_ops.functional
    x = torch.ones(4, device="fake:0")
    fake.drain("fake:0")
    with everything_held(0):
        transfer = pair.get_start(x, "cpu")
        child = forked(lambda link: link.send(str(error_of(lambda: pair.get_wait(transfer)))))
        assert "fork" in child.hear()
        child.end()
    assert pair.get_wait(transfer).tolist() == [1] * 4


@on_fake("its tasks are steered one by one")
def test_a_start_during_a_capture_is_refused():
    pair = dtorch_ops.functional
    for x, device in ((torch.ones(4, device="fake:0"), "cpu"), (torch.ones(4), "fake:0")):
        with fake.capturing("fake:0") as capture:
            error = error_of(lambda x=x, device=device: pair.get_start(x, device))
        assert "get_start: expected a call outside of graph capture" in str(error)
        assert capture.intact


def test_a_dtensor_is_refused_with_what_to_call_instead():
    check_python(
        """
        import torch.distributed as dist
        from torch.distributed.tensor import distribute_tensor, init_device_mesh
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        t = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))
        try:
            dtorch_ops.functional.get_start(t)
        except TypeError as error:
            assert ".to_local()" in str(error) and ".full_tensor()" in str(error), error
        else:
            raise AssertionError("no error")
        dist.destroy_process_group()
        """,
        prelude="import warnings\nwarnings.simplefilter('ignore')\nimport torch, dtorch_ops\n",
    )


def test_the_names():
    assert functional.__all__ == ["Transfer", "get_start", "get_wait"]
