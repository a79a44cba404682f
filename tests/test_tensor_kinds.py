"""Tensors of every dtype, shape, layout and class, through the operators, in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from helpers import check_python
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import dtorch_ops

ops = torch.ops.dtorch


def through_promise(t: Tensor) -> Tensor:
    promise = dtorch_ops.TensorPromise()
    ops.get_tensor(t, promise)
    return promise.get_future().get()


def through_set_value(t: Tensor) -> Tensor:
    promise = dtorch_ops.TensorPromise()
    promise.set_value(t)
    return promise.get_future().get()


# In one process the very tensor arrives ...
SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "operator": lambda t: ops.get_tensor_async(t).wait(),
    "to_torch": dtorch_ops.to_torch,
    "get_tensor": through_promise,
    "set_value": through_set_value,
}
# ... or a copy of it.
COPY: dict[str, Callable[[Tensor], Tensor]] = {
    "operator": lambda t: ops.get_tensor_async(t, copy=True).wait(),
    "to_torch": lambda t: dtorch_ops.to_torch(t, copy=True),
}

same = pytest.mark.parametrize("fetch", SAME.values(), ids=SAME)
copied = pytest.mark.parametrize("fetch", COPY.values(), ids=COPY)
either = pytest.mark.parametrize(
    "fetch", [*SAME.values(), *COPY.values()], ids=[*SAME, *(f"{name} copy" for name in COPY)]
)


# ---- Dtypes -------------------------------------------------------------------------------------

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DENSE = [d for d in DTYPES if d not in QUANTISED]


def can_be_cloned(dtype: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=dtype).clone()
    except NotImplementedError:
        return False
    return True


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # complex32 is experimental
    CLONED = [d for d in DENSE if can_be_cloned(d)]
# Names without operators, of which torch itself can make no copy: uint1 to uint7, int1 to int7.
SHELLS = [d for d in DENSE if d not in CLONED]

experimental = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def bytes_of(t: Tensor) -> list[int]:
    return t.untyped_storage().tolist()


def patterned(dtype: torch.dtype, n: int = 4) -> Tensor:
    """A tensor whose bytes are known, NaNs and denormals included."""
    t = torch.empty(n, dtype=dtype)
    storage = t.untyped_storage()
    one = dtype == torch.bool
    storage.copy_(
        torch.arange(len(storage))
        .mul(1 if one else 37)
        .fmod(2 if one else 256)
        .byte()
        .untyped_storage()
    )
    return t


def test_the_dtypes_that_matter_are_among_those_tested():
    names = {str(d).removeprefix("torch.") for d in CLONED}
    assert names >= {
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("complex32", "complex64", "complex128", "bool", "uint16", "uint32", "uint64"),
        *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "bfloat16", "float16"),
    }


@experimental
@same
@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_every_dtype(fetch, dtype):
    t = patterned(dtype)
    assert fetch(t) is t


@experimental
@copied
@pytest.mark.parametrize("dtype", CLONED, ids=str)
def test_a_copy_of_every_dtype(fetch, dtype):
    t = patterned(dtype)
    result = fetch(t)
    assert (result.dtype, result.shape) == (t.dtype, t.shape)
    assert bytes_of(result) == bytes_of(t)
    assert result.data_ptr() != t.data_ptr()


@copied
@pytest.mark.parametrize("dtype", SHELLS, ids=str)
def test_no_copy_of_a_dtype_that_torch_cannot_copy(fetch, dtype):
    with pytest.raises(NotImplementedError, match=f"(?i){str(dtype).removeprefix('torch.')}"):
        fetch(torch.empty(1, dtype=dtype))


# ---- Shapes and views ---------------------------------------------------------------------------


def numbers(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


SHAPES: dict[str, Callable[[], Tensor]] = {
    "()": lambda: torch.tensor(3.0),
    "(0,)": lambda: numbers(0),
    "(0, 5)": lambda: numbers(0, 5),
    "(3, 0, 2)": lambda: numbers(3, 0, 2),
    "(1,)": lambda: numbers(1),
    "64-dim": lambda: numbers(*[1] * 62, 2, 3),
    "transposed": lambda: numbers(3, 4).t(),
    "strided": lambda: numbers(20)[::3],
    "offset": lambda: numbers(20)[7:],
    "expanded": lambda: numbers(3, 1).expand(3, 4),
    "expanded scalar": lambda: torch.tensor(2.0).expand(5, 2),
    "overlapping": lambda: numbers(6).as_strided((4, 3), (1, 1)),
    "channels last": lambda: numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "real of complex": lambda: torch.view_as_complex(numbers(4, 2)).real,
    "12 bytes": lambda: numbers(3),
    "4095 bytes": lambda: torch.arange(4095).to(torch.uint8),
    "4096 bytes": lambda: torch.arange(4096).to(torch.uint8),
    "4097 bytes": lambda: torch.arange(4097).to(torch.uint8),
    "view of a large storage": lambda: numbers(2**20)[5:7],
}
shapes = pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)


@same
@shapes
def test_every_shape(fetch, make):
    t = make()
    assert fetch(t) is t
    assert torch.equal(t, make())


@copied
@shapes
def test_a_copy_of_every_shape(fetch, make):
    t = make()
    result = fetch(t)
    assert (result.shape, result.dtype, result.numel()) == (t.shape, t.dtype, t.numel())
    assert torch.equal(result, t)
    assert result.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() or not t.numel()


def test_many_empty_ones_at_once():
    futures = [dtorch_ops.to_torch_async(torch.ones(0, i), copy=True) for i in range(1000)]
    assert [tuple(t.shape) for t in ops.wait_all(futures)] == [(0, i) for i in range(1000)]


LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "conj": lambda z: z.conj(),
    "neg": lambda z: z.conj().imag,
    "view of conj": lambda z: z.conj()[1:, :1],
    "view of neg": lambda z: z.conj().imag.t(),
    "zero": lambda z: torch._efficientzerotensor((2, 2)),
}


@pytest.mark.parametrize("make", LAZY.values(), ids=LAZY)
@either
def test_lazy_conjugation_and_negation(fetch, make):
    z = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6 + 0j]])
    expected = make(z).resolve_conj().resolve_neg().clone()
    assert torch.equal(fetch(make(z)) + 0, expected)
    assert dtorch_ops.to_torch(make(z), device="meta").shape == expected.shape


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", LAZY.values(), ids=LAZY)
@same
def test_a_lazy_tensor_is_handed_on_as_it_is(fetch, make, mode):
    """Not resolved, which would copy it: an in-place update of the source shows."""

    def laziness(t: Tensor) -> tuple[bool, bool, bool]:
        return t.is_conj(), t.is_neg(), t._is_zerotensor()

    z = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6 + 0j]])
    with mode():
        lazy = make(z)
        assert any(laziness(lazy))
        result = fetch(lazy)
        assert laziness(result) == laziness(lazy)
        assert result.data_ptr() == lazy.data_ptr()
        z.mul_(3)
        assert torch.equal(result + 0, make(z) + 0)


@copied
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", LAZY.values(), ids=LAZY)
def test_a_copy_of_a_lazy_tensor_is_a_snapshot(fetch, make, mode):
    z = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6 + 0j]])
    with mode():
        expected = make(z) + 0
        result = fetch(make(z))
        z.mul_(3)
        assert torch.equal(result + 0, expected)


# ---- Layouts and classes ------------------------------------------------------------------------


def quantised(per_channel: bool) -> Tensor:
    if per_channel:
        scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
        return torch.quantize_per_channel(numbers(2, 3), scales, zeros, 0, torch.qint8)
    return torch.quantize_per_tensor(numbers(3), 0.1, 0, torch.qint8)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "sparse_coo": lambda: torch.eye(4).to_sparse(),
    "sparse_coo uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
    "sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "sparse_csc": lambda: torch.eye(4).to_sparse_csc(),
    "sparse_bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "mkldnn": lambda: numbers(3).to_mkldnn(),
    "quantised": lambda: quantised(False),
    "quantised per channel": lambda: quantised(True),
}
layouts = pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
prototypes = pytest.mark.filterwarnings(
    "ignore:Sparse .* tensor support is in beta state",
    "ignore:Sparse invariant checks are implicitly disabled",
    "ignore:torch.quantize_per_tensor, torch.quantize_per_channel",
)


def dense(t: Tensor) -> list[object]:
    return (t.dequantize() if t.is_quantized else t.to_dense()).tolist()


@prototypes
@same
@layouts
def test_every_layout(fetch, make):
    t = make()
    assert fetch(t) is t


@prototypes
@copied
@layouts
def test_a_copy_of_every_layout(fetch, make):
    t = make()
    result = fetch(t)
    assert (result.layout, result.dtype, result.shape) == (t.layout, t.dtype, t.shape)
    assert result is not t and dense(result) == dense(t)


def masked() -> Tensor:
    return torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))


EXOTIC: dict[str, tuple[Callable[[], Tensor], str]] = {
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "(?i)nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "(?i)nested|jagged",
    ),
    "masked": (masked, "(?i)masked"),
    "uninitialised parameter": (torch.nn.UninitializedParameter, "(?i)uninitialized"),
}


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of",  # masked and nested tensors are prototypes
    "ignore:.* is not implemented in __torch_dispatch__ for MaskedTensor",
)
@either
@pytest.mark.parametrize("make, kind", EXOTIC.values(), ids=EXOTIC)
def test_other_kinds_work_or_are_refused_by_name(fetch, make, kind):
    t = make()
    try:
        result = fetch(t)
    except (TypeError, ValueError, NotImplementedError) as error:
        first_line = str(error).splitlines()[:6]
        with pytest.raises(type(error), match=kind):
            raise type(error)("\n".join(first_line)) from None
    else:
        assert type(result) is type(t) and (result is t or fetch in COPY.values())


@same
def test_a_parameter_stays_one(fetch):
    parameter = torch.nn.Parameter(torch.ones(2))
    assert fetch(parameter) is parameter
    buffer = torch.nn.Buffer(torch.ones(2))
    assert fetch(buffer) is buffer


@copied
def test_a_copy_of_a_parameter_is_an_intermediate_result(fetch):
    parameter = torch.nn.Parameter(torch.ones(2))
    result = fetch(parameter)
    assert type(result) is Tensor and result.requires_grad and not result.is_leaf
    result.sum().backward()
    assert parameter.grad.tolist() == [1, 1]


class Plain(Tensor):
    """A subclass that overrides nothing."""


@same
def test_a_subclass_arrives_as_it_is(fetch):
    t = torch.ones(2).as_subclass(Plain)
    assert fetch(t) is t


@copied
def test_a_copy_keeps_the_class_or_the_docstring_says_not(fetch):
    """As ``clone()`` keeps it."""
    t = torch.ones(2).as_subclass(Plain)
    result = fetch(t)
    assert result.tolist() == [1, 1]
    documented = "subclass" in dtorch_ops.to_torch_async.__doc__
    assert type(result) is type(t.clone()) or documented


class Seen:
    """What an override was called with."""

    def __init__(self) -> None:
        self.functions: list[object] = []

    def names(self) -> list[str]:
        return [str(f).removesuffix(".default") for f in self.functions if "dtorch" in str(f)]


seen = Seen()


@pytest.fixture(autouse=True)
def _nothing_seen():
    seen.functions.clear()


class Overriding(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        seen.functions.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapping(Tensor):
    """Holds another tensor, as DTensor and the quantised tensors of torchao do."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False):
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=requires_grad
        )

    def __init__(self, inner: Tensor, requires_grad: bool = False) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        seen.functions.append(func)
        inner_args, inner_kwargs = tree_map_only(Wrapping, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapping, func(*inner_args, **inner_kwargs))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.functions.append(func)
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.functions.append(func)
        return func(*args, **(kwargs or {}))


CALLS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "packet": (ops.get_tensor_async, "dtorch.get_tensor_async"),
    "overload": (ops.get_tensor_async.default, "dtorch.get_tensor_async"),
    "to_torch_async": (dtorch_ops.to_torch_async, "dtorch.get_tensor_async"),
    "to_torch": (dtorch_ops.to_torch, "dtorch.get_tensor_async"),
    "method": (lambda t: t.to_torch(), "dtorch.get_tensor_async"),
    "method_async": (lambda t: t.to_torch_async(), "dtorch.get_tensor_async"),
    "copy": (lambda t: dtorch_ops.to_torch(t, copy=True), "dtorch.get_tensor_async"),
    "get_tensor": (through_promise, "dtorch.get_tensor"),
}
calls = pytest.mark.parametrize("call, name", CALLS.values(), ids=CALLS)


@calls
def test_torch_function_of_a_subclass_sees_the_operator(call, name):
    call(torch.ones(2).as_subclass(Overriding))
    assert seen.names() == [name]


@calls
def test_torch_dispatch_of_a_subclass_sees_the_operator(call, name):
    call(Wrapping(torch.ones(2)))
    assert seen.names() == [name]


@pytest.mark.parametrize("mode", [FunctionMode, DispatchMode])
@calls
def test_a_mode_sees_the_operator(mode, call, name):
    with mode():
        call(torch.ones(2))
    assert name in seen.names()
    assert set(seen.names()) <= {name, "dtorch.get_future"}


@pytest.mark.parametrize("mode", [FunctionMode, DispatchMode])
@pytest.mark.parametrize(
    "call",
    [ops.sync, dtorch_ops.sync, dtorch_ops.sync_future, lambda: ops.sync(dtorch_ops.VoidPromise())],
    ids=["operator", "sync", "sync_future", "promise"],
)
def test_a_mode_sees_sync(mode, call):
    with mode():
        call()
    assert [n.removesuffix(".promise") for n in seen.names()] == ["dtorch.sync"]


@pytest.mark.parametrize("kwargs", [{}, {"copy": True}, {"device": "cpu", "copy": True}], ids=str)
@pytest.mark.parametrize("call", [ops.get_tensor_async, dtorch_ops.to_torch_async])
def test_gradients_are_recorded_under_a_dispatch_mode(call, kwargs):
    """Counting flops, say, or selective checkpointing, changes no gradient."""
    leaf = torch.ones(2, requires_grad=True)
    with DispatchMode():
        (call(leaf, **kwargs).wait() * 3).sum().backward()
    assert leaf.grad.tolist() == [3, 3]


@pytest.mark.parametrize("call", [ops.get_tensor_async, dtorch_ops.to_torch_async])
def test_an_override_has_the_last_word(call):
    class Elsewhere(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return ops.get_tensor_async(torch.full((2,), 7.0)) if "dtorch" in str(func) else None

    assert call(torch.ones(2).as_subclass(Elsewhere)).wait().tolist() == [7, 7]


# ---- Meta and fake tensors ----------------------------------------------------------------------


@same
@pytest.mark.parametrize("shape", [(), (0, 5), (2, 3)], ids=str)
def test_meta_tensors(fetch, shape):
    t = torch.empty(shape, device="meta", dtype=torch.float16)
    assert fetch(t) is t


@copied
def test_a_copy_of_a_meta_tensor(fetch):
    t = torch.empty(4, 3, device="meta").t()
    result = fetch(t)
    assert (result.device.type, result.shape, result.stride()) == ("meta", (3, 4), t.stride())
    assert result is not t


def fake(device: str, **kwargs: object) -> tuple[FakeTensorMode, FakeTensor]:
    mode = FakeTensorMode()
    with mode:
        return mode, torch.empty(2, 3, device=device, **kwargs)


@pytest.mark.parametrize("inside", [True, False], ids=["in the mode", "outside of it"])
@pytest.mark.parametrize("device", ["cpu", "cuda:0", "meta"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"copy": True},
        {"device": "cpu"},
        {"device": "cuda:0"},
        {"device": "cuda:0", "copy": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "call, kind",
    [(ops.get_tensor_async, torch._C.Future), (dtorch_ops.to_torch_async, dtorch_ops.TensorFuture)],
    ids=["operator", "to_torch_async"],
)
def test_fake_tensors(call, kind, kwargs, device, inside):
    """A fake tensor says what a real one would do, where no such device is present."""
    mode, t = fake(device, dtype=torch.int16)
    if inside:
        with mode:
            future = call(t, **kwargs)
    else:
        future = call(t, **kwargs)
    assert isinstance(future, kind) and future.done()
    result = future.wait()
    assert isinstance(result, FakeTensor)
    assert str(result.device) == kwargs.get("device", device)
    assert (result.shape, result.dtype) == ((2, 3), torch.int16)
    unchanged = "copy" not in kwargs and kwargs.get("device", device) == device
    assert (result is t) == unchanged


def test_a_real_tensor_in_a_fake_mode_becomes_fake():
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(ops.get_tensor_async(torch.ones(2)).wait(), FakeTensor)


def test_fake_tensors_keep_gradients():
    _, t = fake("cpu", requires_grad=True)
    assert ops.get_tensor_async(t).wait().requires_grad
    assert ops.get_tensor_async(t * 2, copy=True).wait().requires_grad


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_fake_tensor_through_a_promise(device):
    _, t = fake(device)
    assert through_promise(t) is t
    assert through_set_value(t) is t


# ---- DTensor ------------------------------------------------------------------------------------


def test_a_dtensor_is_refused_with_what_to_call_instead():
    out = check_python(
        """
        import torch.distributed as dist
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        t = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
        leaf = t.detach().requires_grad_()
        ops = torch.ops.dtorch
        promise = dtorch_ops.TensorPromise()
        calls = [
            lambda: ops.get_tensor_async(t),
            lambda: ops.get_tensor_async.default(t),
            lambda: ops.get_tensor_async(t, copy=True),
            lambda: ops.get_tensor_async(t, device="cpu"),
            lambda: ops.get_tensor_async(leaf),
            lambda: ops.get_tensor(t, promise),
            lambda: ops.get_tensor.default(t, promise),
            lambda: dtorch_ops.to_torch_async(t),
            lambda: dtorch_ops.to_torch(t),
            lambda: t.to_torch_async(),
            lambda: t.to_torch(copy=True),
        ]
        contexts = [torch.enable_grad, torch.no_grad, torch.inference_mode,
                    torch._C.DisableTorchFunctionSubclass]
        for context in contexts:
            for i, call in enumerate(calls):
                try:
                    with context():
                        call()
                except TypeError as error:
                    assert "DTensor" in str(error), error
                    assert ".to_local()" in str(error), error
                    assert ".full_tensor()" in str(error), error
                else:
                    sys.exit(f"call {i} was not refused")
        assert promise.is_pending()
        # What the message names works.
        assert dtorch_ops.to_torch(t.to_local()).tolist() == [1, 1]
        assert dtorch_ops.to_torch(t.full_tensor()).tolist() == [1, 1]
        dist.destroy_process_group()
        print("refused")
        """
    )
    assert out == "refused\n"
