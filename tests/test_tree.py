"""``to_torch_async`` of trees, and the operator below: one process, the CPU."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import re
import threading
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from futures import READ_ONLY
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.futures import Future
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dtorch_ops

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),
]

ops = torch.ops.dtorch

Pair = namedtuple("Pair", "first second")


class Named(NamedTuple):
    tensor: Any
    other: Any


@dataclasses.dataclass
class Registered:
    tensor: Any
    other: Any


_pytree.register_dataclass(Registered)


@dataclasses.dataclass
class Unregistered:
    tensor: Any


class OwnDict(dict):
    pass


@dataclasses.dataclass(frozen=True)
class Constant:
    number: int


_pytree.register_constant(Constant)


def t(value: float = 1.0) -> Tensor:
    return torch.full((2,), float(value))


#: Makes a tree of what it is given three tensors of.
TREES: dict[str, Any] = {
    "list": lambda a, b, c: [a, b, c],
    "tuple": lambda a, b, c: (a, b, c),
    "dict": lambda a, b, c: {"b": a, "a": b, 3: c},
    "namedtuple": lambda a, b, c: Pair(a, [b, c]),
    "NamedTuple": lambda a, b, c: Named(a, Named(b, c)),
    "OrderedDict": lambda a, b, c: OrderedDict(z=a, y=b, x=c),
    "defaultdict": lambda a, b, c: defaultdict(list, k=[a, b], l=c),
    "deque": lambda a, b, c: deque([a, b, c], maxlen=5),
    "dataclass": lambda a, b, c: Registered(a, {"x": (b, c)}),
    "structseq": lambda a, b, c: torch.return_types.max((a, b)),
    "nested": lambda a, b, c: {"a": [a, (b, {"c": [c]})], "e": [], "f": (), "g": {}},
    "mixed": lambda a, b, c: [a, 1, None, "s", 2.5, b, True, torch.float32, (c, 7), b"x", 1j],
    "empty in it": lambda a, b, c: [[], (), {}, [[]], a, [b], c],
    "the same": lambda a, b, c: [a, a, {"x": a, "y": b}, b, c],
    "one": lambda a, b, c: [a],
    "parameters": lambda a, b, c: [torch.nn.Parameter(a), b, c],
    "constant": lambda a, b, c: [Constant(3), a, b, c],
    "empty list": lambda a, b, c: [],
    "empty tuple": lambda a, b, c: (),
    "empty dict": lambda a, b, c: {},
    "no tensor": lambda a, b, c: {"a": [1, None], "b": "s"},
    "objects": lambda a, b, c: [a, range(3), {1, 2}, OwnDict(x=1), Unregistered(3)],
}

trees = pytest.mark.parametrize("name", TREES)


def same(tree: Any, other: Any) -> bool:
    """The same structure and leaves; tensors by identity."""
    leaves, spec = _pytree.tree_flatten(tree)
    others, other_spec = _pytree.tree_flatten(other)
    return (
        spec == other_spec
        and type(tree) is type(other)
        and len(leaves) == len(others)
        and all(a is b for a, b in zip(leaves, others, strict=True))
    )


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


# ---- Structure ----------------------------------------------------------------------------------


@trees
def test_the_value_has_the_structure_and_the_tensors_of_the_tree(name):
    tree = TREES[name](t(1), t(2), t(3))
    future = dtorch_ops.to_torch_async(tree)
    assert type(future) is dtorch_ops.TreeFuture and isinstance(future, torch._C.Future)
    assert future.is_ready() and future.done()
    value = future.get()
    # A fetch of a Parameter is that Parameter, as for a single one.
    assert same(value, tree)
    assert same(dtorch_ops.to_torch(tree), tree)
    assert value is not tree or value == ()


@trees
def test_a_copy_has_the_structure_of_tree_map(name):
    tree = TREES[name](t(1), t(2), t(3))
    value = dtorch_ops.to_torch(tree, copy=True)
    expected = _pytree.tree_map_only(Tensor, Tensor.clone, tree)
    leaves, spec = _pytree.tree_flatten(value)
    expected_leaves, expected_spec = _pytree.tree_flatten(expected)
    assert spec == expected_spec
    of_tree = {id(leaf) for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}
    for leaf, other in zip(leaves, expected_leaves, strict=True):
        if isinstance(leaf, Tensor):
            assert leaf.equal(other) and id(leaf) not in of_tree
        else:
            assert leaf is other
    for node in _pytree.tree_leaves(tree):
        if isinstance(node, Tensor):
            node.detach().zero_()
    assert all(leaf.all() for leaf in leaves if isinstance(leaf, Tensor))


def test_a_shape_stays_one():
    """Pytree's functions make it a tuple."""
    value = dtorch_ops.to_torch([t(), t().shape])
    assert value[1] == torch.Size([2]) and type(value[1]) is torch.Size


def test_the_structure_is_that_of_the_call():
    tree = {"a": [t(), 1], "b": {"c": t()}}
    future = dtorch_ops.to_torch_async(tree)
    tree["a"].append(2)
    tree["b"]["d"] = 3
    del tree["a"][0]
    value = future.value()
    assert list(value) == ["a", "b"] and len(value["a"]) == 2 and list(value["b"]) == ["c"]
    value["a"].clear()  # every read makes another one
    assert len(future.value()["a"]) == 2


def test_without_a_copy_memory_is_shared():
    tensor = torch.zeros(2)
    (value,) = dtorch_ops.to_torch([tensor])
    tensor.add_(1)
    assert value.tolist() == [1, 1]


@pytest.mark.parametrize("kwargs", [{"copy": True}, {"device": "meta"}], ids=str)
def test_a_tensor_that_is_there_twice_is_fetched_once(kwargs):
    tensor, other = t(1), t(2)
    value = dtorch_ops.to_torch([tensor, {"x": tensor}, other, tensor], **kwargs)
    assert value[0] is value[1]["x"] is value[3]
    assert value[2] is not value[0] and value[0] is not tensor


def test_what_is_no_tree_is_refused():
    for input in (
        None,
        3,
        "abc",
        2.5,
        torch.float32,
        object(),
        {1, 2},
        iter([t()]),
        Unregistered(1),
    ):
        for call in (dtorch_ops.to_torch_async, dtorch_ops.to_torch):
            with pytest.raises(TypeError, match=r"expected a torch\.Tensor, or a list.*got "):
                call(input)


HIDING: dict[str, Any] = {
    "set": lambda: {t()},
    "frozenset": lambda: frozenset([t()]),
    "own dict": lambda: OwnDict(x=t()),
    "dataclass": lambda: Unregistered(t()),
    "deep": lambda: Unregistered({"x": [{t()}]}),
    "future": lambda: dtorch_ops.to_torch_async(t()),
    "stock future": lambda: torch.futures.Future(),
    "futures": lambda: OwnDict(x=torch.futures.Future()),
}


@pytest.mark.parametrize("name", HIDING)
def test_a_leaf_that_hides_a_tensor_is_refused_with_its_path(name):
    tree = {"a": [t(), HIDING[name]()]}
    with pytest.raises(TypeError, match="register_pytree_node") as caught:
        dtorch_ops.to_torch_async(tree)
    assert notes_of(caught.value) == ["at ['a'][1]"]


@pytest.mark.parametrize(
    "arguments",
    [{"copy": 1}, {"device": 2.5}, {"device": "nonsense"}, {"device": "cuda:77"}],
    ids=str,
)
@pytest.mark.parametrize("tree", [[], [torch.ones(1)]], ids=["empty", "one"])
def test_arguments_are_checked_as_for_one_tensor(tree, arguments):
    with pytest.raises((TypeError, ValueError)) as of_one:
        dtorch_ops.to_torch_async(torch.ones(1), **arguments)
    with pytest.raises(type(of_one.value)) as of_tree:
        dtorch_ops.to_torch_async(tree, **arguments)
    text = str(of_one.value).replace("get_tensor_async", "get_tensors_async")
    assert str(of_tree.value) == text


# ---- Errors -------------------------------------------------------------------------------------


def test_a_refused_leaf_is_named_by_its_path():
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(TypeError, match="jagged") as of_leaf:
        dtorch_ops.to_torch_async(jagged)
    said = str(of_leaf.value).replace("get_tensor_async", "get_tensors_async")
    for path, tree in {
        "['a'][1]['b']": {"a": [t(), {"b": jagged}]},
        "[2]": [t(), None, jagged],
        ".second[0]": Pair(t(), [jagged]),
        ".other": Registered(t(), jagged),
    }.items():
        for call in (dtorch_ops.to_torch_async, dtorch_ops.to_torch):
            with pytest.raises(TypeError) as of_tree:
                call(tree)
            assert notes_of(of_tree.value) == [f"at {path}"]
            assert str(of_tree.value).startswith(said)


class NoKeys:
    """A class whose registration says nothing of names."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


_pytree.register_pytree_node(NoKeys, lambda n: (list(n.parts), None), lambda c, _: NoKeys(*c))


def test_a_class_that_has_no_names_for_its_parts_does_no_harm():
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(TypeError) as caught:
        dtorch_ops.to_torch_async(NoKeys(t(), jagged))
    assert notes_of(caught.value) == ["at tensor 1 of the tree"]
    with pytest.raises(TypeError) as caught:
        dtorch_ops.to_torch_async(NoKeys(t(), {t()}))
    assert notes_of(caught.value) == ["at a leaf of the tree"]
    assert dtorch_ops.to_torch(NoKeys(t(4), 3)).parts[1] == 3


def test_nothing_is_copied_if_one_is_refused():
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with pytest.raises(TypeError):
            dtorch_ops.to_torch_async([t(), jagged], copy=True)
    assert not any(event.key == "aten::clone" for event in profile.key_averages())


def test_an_error_of_a_copy_names_its_leaf():
    huge = torch.empty(1).expand(1 << 50)  # whose copy no memory can hold
    with pytest.raises(RuntimeError, match="memory") as caught:
        dtorch_ops.to_torch_async([t(), {"x": huge}], copy=True)
    assert notes_of(caught.value) == ["at [1]['x']"]


# ---- The future ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [w for w in READ_ONLY if "operator" not in w and "torch" not in w])
def test_every_way_of_reading_gives_the_tree(way):
    tree = {"a": [t(), 1], "b": (t(),)}
    future = dtorch_ops.to_torch_async(tree)
    for _ in range(2):
        assert same(READ_ONLY[way](future), tree)
    assert future.valid()


def test_get_consumes_the_handle():
    future = dtorch_ops.to_torch_async([t()])
    again = dtorch_ops.Future(future)
    assert repr(future) == "<TreeFuture ready>"
    future.get()
    assert not future.valid() and repr(future) == "<TreeFuture ready, consumed>"
    with pytest.raises(dtorch_ops.FutureAlreadyRetrievedError):
        future.get()
    assert len(again.get()) == 1


def test_it_stands_in_groups_beside_others():
    promise = dtorch_ops.TensorPromise()
    tree, one = dtorch_ops.to_torch_async({"x": t()}), dtorch_ops.to_torch_async(t())
    futures = [tree, one, promise.get_future()]
    every = dtorch_ops.collect_all(futures)
    assert not every.is_ready()
    promise.set_value(t())
    assert every.get()[0] is tree
    assert list(dtorch_ops.wait_all(futures)[0]) == ["x"]
    assert {id(f) for f in dtorch_ops.as_completed(futures)} == {id(f) for f in futures}
    assert list(dtorch_ops.collect_any([tree]).get()) == ["x"]

    async def gathered() -> Any:
        return await asyncio.gather(*futures)

    assert list(asyncio.run(gathered())[0]) == ["x"]


def test_to_torch_s_own_functions_it_is_a_future_of_a_list():
    a, b = t(1), t(2)
    future = dtorch_ops.to_torch_async({"x": a, "y": (3, b)})
    for value in (
        torch.futures.wait_all([future])[0],
        torch.futures.collect_all([future]).wait()[0].wait(),
        ops.wait_all([future])[0],
        ops.wait_for(future, 100),
    ):
        assert same(value, [a, b])


def test_a_dropped_future_and_a_read_one_keep_no_tensor():
    class Watched(Tensor):
        pass

    for make in (lambda x: x, lambda x: x.as_subclass(Watched)):
        tensors = [make(t()) for _ in range(3)]
        watches = [weakref.ref(tensor) for tensor in tensors]
        future = dtorch_ops.to_torch_async(
            {"a": tensors[:2], "b": tensors[2], "c": [tensors[0], 1]}
        )
        copies = dtorch_ops.to_torch_async(tensors, copy=True)
        del tensors
        future.get()
        del future
        gc.collect()
        assert [watch() for watch in watches] == [None] * 3
        assert len(copies.get()) == 3


def test_gradients_flow_through():
    leaf, other = t(2).requires_grad_(), t(3).requires_grad_()
    for copy in (False, True):
        value = dtorch_ops.to_torch({"x": leaf * 2, "y": [other, leaf]}, copy=copy)
        leaf.grad = other.grad = None
        (value["x"] * value["y"][0] + value["y"][1]).sum().backward()
        assert leaf.grad.tolist() == [7, 7] and other.grad.tolist() == [4, 4]


def test_threads_may_read_one_at_once():
    tree = {"a": [t(), 1], "b": (t(),)}
    future = dtorch_ops.to_torch_async(tree, copy=True)
    read: list[Any] = []
    threads = [threading.Thread(target=lambda: read.append(future.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(each, read[0]) for each in read) and len(read) == 8


# ---- Subclasses, modes, transforms --------------------------------------------------------------


class Overriding(Tensor):
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapping(Tensor):
    """Holds another tensor, as quantised tensors do."""

    seen: ClassVar[list[str]] = []
    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        inner = _pytree.tree_map_only(Wrapping, lambda w: w.inner, (args, kwargs or {}))
        return _pytree.tree_map_only(Tensor, Wrapping, func(*inner[0], **inner[1]))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        Overriding.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Wrapping.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_subclasses_and_modes_see_one_operator():
    called = ["dtorch.get_tensors_async.default"]
    for cls, make in (
        (Overriding, lambda: t().as_subclass(Overriding)),
        (Wrapping, lambda: Wrapping(t())),
    ):
        tree = {"x": [t(), make()], "y": make()}
        cls.seen.clear()
        value = dtorch_ops.to_torch(tree)
        assert cls.seen == called and list(value) == ["x", "y"]
    for cls, mode in ((Overriding, FunctionMode), (Wrapping, DispatchMode)):
        tree = {"x": [t(), t()], "y": t()}
        cls.seen.clear()
        with mode():
            future = dtorch_ops.to_torch_async(tree)
        assert cls.seen == called
        assert type(future) is dtorch_ops.TreeFuture and list(future.get()) == ["x", "y"]


@pytest.mark.parametrize("kwargs", [{}, {"copy": True}, {"device": "cpu", "copy": True}], ids=str)
def test_gradients_are_recorded_under_a_dispatch_mode(kwargs):
    leaf = t().requires_grad_()
    with DispatchMode():
        value = dtorch_ops.to_torch([leaf, t(), leaf], **kwargs)
        assert value[0] is value[2]
        (value[0] * 3).sum().backward()
    assert leaf.grad.tolist() == [3, 3]


def test_fake_tensors_have_their_shapes():
    with FakeTensorMode():
        x = torch.ones(2, 3)
        for value in (
            dtorch_ops.to_torch_async({"x": [x], "y": 3}).get(),
            dtorch_ops.to_torch({"x": [x], "y": 3}, copy=True),
        ):
            assert value["x"][0].shape == (2, 3) and value["y"] == 3


def test_a_transform_refuses():
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.vmap(lambda x: dtorch_ops.to_torch_async([x]).get()[0])(torch.ones(2, 2))


# ---- The operator -------------------------------------------------------------------------------


def test_the_operator_gives_a_future_of_a_list():
    a, b = t(1), t(2)
    future = ops.get_tensors_async([a, b, a])
    assert type(future) is torch._C.Future and same(future.wait(), [a, b, a])
    assert ops.get_tensors_async([]).wait() == []
    copies = ops.get_tensors_async([a, b, a], copy=True).wait()
    assert copies[0] is copies[2] is not a and copies[1].equal(b)
    assert [
        m.device.type for m in ops.get_tensors_async([a], device=torch.device("meta")).wait()
    ] == ["meta"]


def test_its_errors_say_where_in_the_list():
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(TypeError, match=re.escape("(at self[1])")):
        ops.get_tensors_async([t(), jagged])
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        ops.get_tensors_async([t(), None])


def _scripted(tensors: list[Tensor], copy: bool) -> list[Tensor]:
    future = torch.ops.dtorch.get_tensors_async(tensors, copy=copy)
    return torch.ops.dtorch.wait_for(future, 1000)


def _script_wait(future: Future[list[Tensor]]) -> list[Tensor]:
    return torch.jit.wait(future)


def _traced(a: Tensor, b: Tensor) -> Tensor:
    future = torch.ops.dtorch.get_tensors_async([a * 2, b], copy=True)
    first, second = dtorch_ops.Future(future).get()
    return first + second


def test_it_is_there_in_torchscript():
    a, b = t(1), t(2)
    scripted = torch.jit.script(_scripted)
    assert same(scripted([a, b], False), [a, b])
    assert [x.tolist() for x in scripted([a, b], True)] == [[1, 1], [2, 2]]
    tree = dtorch_ops.to_torch_async({"x": a, "y": [b, 3]})
    assert same(torch.jit.script(_script_wait)(tree), [a, b])


def test_a_trace_records_it():
    traced = torch.jit.trace(_traced, (t(1), t(2)))
    assert "dtorch::get_tensors_async" in str(traced.graph)
    assert traced(t(5), t(7)).tolist() == [17, 17]


@pytest.mark.parametrize("kwargs", [{}, {"copy": True}, {"device": torch.device("meta")}], ids=str)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(kwargs, requires_grad):
    # As for get_tensor_async, in test_ops.py.
    parts = ["test_schema", "test_autograd_registration", "test_faketensor"]
    tensors = [torch.ones(2, 3, requires_grad=requires_grad), torch.ones(1)]
    if requires_grad and kwargs:
        parts = ["test_autograd_registration"]
    torch.library.opcheck(ops.get_tensors_async.default, (tensors,), kwargs, test_utils=parts)


def test_the_profiler_sees_it():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dtorch_ops.to_torch([t(), [t()]])
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["dtorch::get_tensors_async"] == 1


# ---- Graphs -------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _tree_in_a_graph(x: Tensor) -> tuple[Any, Tensor]:
    tree = {"a": [x * 2, None], "b": (x + 1, 3), "c": Pair(x, "s"), "d": []}
    value = dtorch_ops.to_torch(tree, copy=True)
    return value, value["a"][0] + value["b"][0]


def _calls_in(graph: torch.fx.Graph) -> list[str]:
    names = (str(node.target) for node in graph.nodes)
    return [name.split(".")[1] for name in names if name.startswith("dtorch.")]


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_graph_all_starts_come_before_all_waits(backend):
    graphs = []

    def recording(module, inputs):
        graphs.append(module.graph)
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    compiled = torch.compile(_tree_in_a_graph, fullgraph=True, backend=recording)
    for x in (t(1), t(5)):
        (value, total), (expected, expected_total) = compiled(x), _tree_in_a_graph(x)
        assert _pytree.tree_structure(value) == _pytree.tree_structure(expected)
        assert total.equal(expected_total) and value["c"].first.equal(x)
        assert value["a"][1] is None and value["b"][1] == 3 and value["c"].second == "s"
        assert value["c"].first is not x
    assert len(graphs) == 1
    assert _calls_in(graphs[0]) == ["get_start"] * 3 + ["get_wait"] * 3


@pytest.mark.usefixtures("_fresh_dynamo")
def test_without_a_copy_a_graph_gives_the_tensors_themselves():
    def fetch(x):
        return dtorch_ops.to_torch([x, {"y": x * 2}])

    compiled = torch.compile(fetch, fullgraph=True, backend="aot_eager")
    x = t(3)
    value = compiled(x)
    assert value[0] is x and value[1]["y"].tolist() == [6, 6]


@pytest.mark.usefixtures("_fresh_dynamo")
# Dynamo itself looks at this attribute of whatever lives across a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
def test_a_future_of_a_tree_breaks_the_graph_with_the_right_result():
    def fetch(x):
        value = dtorch_ops.to_torch_async({"x": [x * 2, 1]}).get()
        return value["x"][0] + value["x"][1]

    compiled = torch.compile(fetch, backend="eager")
    for value in (1.0, 5.0):
        leaf = t(value).requires_grad_()
        result = compiled(leaf)
        assert result.tolist() == [2 * value + 1] * 2
        result.sum().backward()
        assert leaf.grad.tolist() == [2, 2]


@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_leaf_that_hides_a_tensor_is_refused_in_a_graph_too():
    compiled = torch.compile(lambda x: dtorch_ops.to_torch([x, OwnDict(y=x)]), backend="eager")
    with pytest.raises(TypeError, match="register_pytree_node"):
        compiled(t())


class Fetching(torch.nn.Module):
    def forward(self, x: Tensor) -> Any:
        return dtorch_ops.to_torch({"a": [x * 2], "b": (x + 1, 3)}, copy=True)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_the_pairs(strict):
    program = torch.export.export(Fetching(), (t(),), strict=strict)
    calls = [
        n.target
        for n in program.graph.nodes
        if "dtorch" in str(n.target) or "effects" in str(n.target)
    ]
    assert len(calls) == 4, program.graph
    value = program.module()(t(4))
    assert value["a"][0].tolist() == [8, 8] and value["b"][0].tolist() == [5, 5]
