"""What ``torch.compile`` and ``torch.export`` are told of us; all their private names."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import operator
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._library.effects import EffectType
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from . import _C, _ops

F = TypeVar("F", bound=Callable[..., Any])

#: Why a graph breaks at a future or a promise.
REASON = (
    "a graph cannot hold a future: in a compiled region use dtorch_ops.functional.get_start and "
    "get_wait, or dtorch_ops.to_torch, which becomes these two"
)


def is_traced(input: object) -> bool:
    """Whether ``input`` stands for a tensor of a graph, but for Dynamo's, which look like one."""
    return isinstance(input, (FakeTensor, FunctionalTensor))


# ---- Effects ------------------------------------------------------------------------------------


def _keep_effects() -> None:
    """None of the operators is merged with another one, moved past one, or dropped from a graph."""
    for overload in _ops.EFFECTS:
        torch.library._register_effectful_op(overload, EffectType.ORDERED)


# ---- Graph breaks -------------------------------------------------------------------------------


def breaks_graph(function: F) -> F:
    """Have Dynamo call ``function`` between two graphs, and say why.

    As ``torch.compiler.disable(function, reason=...)``, which would import all of Dynamo, and cost
    time in every call.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


_CLASSES = (torch._C.Future, _C.TensorPromiseBase, _C.VoidPromiseBase)


def _is_ours(value: object) -> bool:
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(value).startswith("dtorch.")
    kind = value if isinstance(value, type) else getattr(value, "__objclass__", type(value))
    return issubclass(kind, _CLASSES)


def _stopped_at_ours(frame: types.FrameType | None) -> bool:
    """Whether the instruction that Dynamo has given up at is about one of our objects.

    A variable of Dynamo keeps in ``value`` what it stands for.
    """
    while frame is not None and frame.f_code.co_name != "step":
        names = frame.f_locals
        if _is_ours(names.get("example_value")):
            return True
        arguments = names.get("args")
        variables = [
            names.get("self"),
            *(arguments if isinstance(arguments, (list, tuple)) else ()),
        ]
        if any(_is_ours(getattr(v, "__dict__", {}).get("value")) for v in variables):
            return True
        frame = frame.f_back
    return False


class _OnImport(importlib.abc.MetaPathFinder):
    """Calls ``function(module)`` once the module has been imported, which may never happen."""

    def __init__(self, name: str, function: Callable[[Any], None]) -> None:
        self._name, self._function = name, function

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: types.ModuleType) -> None:
                execute(module)
                self._function(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _add_reason(exc: Any) -> None:
    """Have what Dynamo says of a graph break at one of our objects name the pair."""
    message = getattr(exc, "format_graph_break_message", None)
    if message is None:
        return

    def explained(gb_type: str, context: str, explanation: str, hints: list[str]) -> str:
        if _stopped_at_ours(sys._getframe(1)):
            hints = [*hints, REASON]
        return message(gb_type, context, explanation, hints)  # type: ignore[no-any-return]

    exc.format_graph_break_message = explained


# ---- Order --------------------------------------------------------------------------------------


def _keep_order_for_locality(post_grad: Any) -> None:
    """Have Inductor not move what stands in a graph with one of our operators to where it is used.

    That runs a wait right behind its start, at the cost of the overlap that the two are for; torch
    leaves the waits of its own collectives alone for the same reason.
    """
    reorder = getattr(post_grad, "reorder_for_locality", None)
    if reorder is None:
        return

    def unless_ours(graph: torch.fx.Graph) -> None:
        # An effect is an argument of a node that orders it.
        if not any(_is_ours(of) for node in graph.nodes for of in (node.target, *node.args[:2])):
            reorder(graph)

    post_grad.reorder_for_locality = unless_ours


def _keep_order_for_memory(memory: Any) -> None:
    """Nor for the sake of less memory, which does the same."""
    reorder = getattr(memory, "reorder_for_peak_memory", None)
    if reorder is None:
        return

    def unless_ours(nodes: list[Any], *arguments: Any, **options: Any) -> list[Any]:
        reordered = reorder(nodes, *arguments, **options)  # it computes what others use, too
        kernels = (kernel.node for node in nodes for kernel in node.get_nodes())
        ours = any(_is_ours(getattr(kernel, "op_overload", None)) for kernel in kernels)
        return nodes if ours else reordered  # type: ignore[no-any-return]

    memory.reorder_for_peak_memory = unless_ours


# ---- One copy -----------------------------------------------------------------------------------


def _arguments_of(node: torch.fx.Node, overload: Any) -> tuple[Any, ...] | None:
    """Those of a call of ``overload``; None if ``node`` is another one."""
    if node.target is overload:
        return node.args
    # An effect is called by a node that orders it: with a token, and the operator.
    return node.args[2:] if len(node.args) > 1 and node.args[1] is overload else None


def _freeze_sources(graph: torch.fx.Graph) -> None:
    """Have a start make no clone to keep its snapshot, if the source is as it was at its wait.

    What AOTAutograd has made writes to no tensor that it reads later. The wait reads the source, or
    what became of it, if the program writes to it between the two.
    """
    starts: dict[object, torch.fx.Node] = {}  # by their handles
    for node in graph.nodes:
        if _arguments_of(node, _ops.get_start):
            starts[node] = node
        elif node.target is operator.getitem and node.args[0] in starts:
            starts[node] = starts[node.args[0]]
        elif arguments := _arguments_of(node, _ops.get_wait):
            start = starts.get(arguments[0])
            if start is not None and _arguments_of(start, _ops.get_start) == (arguments[1],):
                start.kwargs = {**start.kwargs, "frozen": True}


def _copy_once(post_grad: Any) -> None:
    passes = getattr(post_grad, "post_grad_passes", None)
    if passes is None:
        return

    @functools.wraps(passes)
    def of_frozen(module: torch.fx.GraphModule, *arguments: Any, **options: Any) -> None:
        _freeze_sources(module.graph)
        passes(module, *arguments, **options)

    post_grad.post_grad_passes = of_frozen


def _on_post_grad(post_grad: Any) -> None:
    _keep_order_for_locality(post_grad)
    _copy_once(post_grad)


# ---- Installing ---------------------------------------------------------------------------------

_HOOKS = {
    "torch._dynamo.exc": _add_reason,
    "torch._inductor.fx_passes.post_grad": _on_post_grad,
    "torch._inductor.memory": _keep_order_for_memory,
}


def install() -> None:
    _keep_effects()
    for name, hook in _HOOKS.items():
        module = sys.modules.get(name)
        if module is not None:
            hook(module)
        else:
            sys.meta_path.insert(0, _OnImport(name, hook))


install()
