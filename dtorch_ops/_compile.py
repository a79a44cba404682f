"""What ``torch.compile`` and ``torch.export`` are told of us; all their private names."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from operator import getitem
from typing import Any, TypeVar

import torch
from torch._C import DispatchKey
from torch._C._dynamo import eval_frame
from torch._library import fake_class_registry
from torch._library.effects import EffectType
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils import _pytree as pytree

from . import _C, _ops
from .promise import TensorPromise, VoidPromise

F = TypeVar("F", bound=Callable[..., Any])

#: Why a graph breaks at a future or a promise.
REASON = (
    "a graph cannot hold a future: in a compiled region use dtorch_ops.functional.get_start and "
    "get_wait, or dtorch_ops.to_torch, which becomes these two; a promise from outside is "
    "fulfilled there by torch.ops.dtorch.get_tensor(tensor, promise) or torch.ops.dtorch.sync("
    "devices, promise), and by no method"
)


def is_traced(input: object) -> bool:
    """Whether ``input`` stands for a tensor of a graph, but for Dynamo's, which look like one."""
    return isinstance(input, (FakeTensor, FunctionalTensor))


# ---- Effects ------------------------------------------------------------------------------------


def _keep_effects() -> None:
    """None of the operators is merged with another one, moved past one, or dropped from a graph."""
    for overload in _ops.EFFECTS:
        torch.library._register_effectful_op(overload, EffectType.ORDERED)


# ---- Promises -----------------------------------------------------------------------------------


class _FakePromise:
    """A promise while a graph is traced: nothing is known of it but its class."""

    promise = True  # what __obj_flatten__ of a real one says

    @classmethod
    def __obj_unflatten__(cls, contents: object) -> _FakePromise:
        return cls()

    def _refuse(*arguments: object) -> None:
        raise NotImplementedError(REASON)

    set_value = set_exception = cancel = token = empty = _refuse


def is_fake_promise(promise: object) -> bool:
    return isinstance(promise, FakeScriptObject) and isinstance(promise.wrapped_obj, _FakePromise)


def _stand_in_of(kind: type[TensorPromise] | type[VoidPromise]) -> TensorPromise | VoidPromise:
    return kind(mode="memory")  # a fork does not have to see to it


class _TensorStandIn(TensorPromise):
    """A promise of nobody's, for where torch keeps one that a graph was traced with.

    Such a promise were not broken when its holder drops it, and a saved program would have its
    token, which leads nowhere when that is loaded.
    """

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _stand_in_of, (_TensorStandIn,)


class _VoidStandIn(VoidPromise):
    __slots__ = ()

    def __reduce__(self) -> Any:
        return _stand_in_of, (_VoidStandIn,)


_STAND_INS = {"TensorPromise": _TensorStandIn, "VoidPromise": _VoidStandIn}
_PREFIX = "__torch__.torch.classes.dtorch."


def _is_promise(value: object) -> bool:
    if is_fake_promise(value):
        return True
    return isinstance(value, torch.ScriptObject) and _stand_in(value) is not value


def _stand_in(value: torch.ScriptObject) -> torch.ScriptObject:
    """For a promise of ours; anything else is its own."""
    kind = _STAND_INS.get(value._type().qualified_name().removeprefix(_PREFIX))
    return value if kind is None else _stand_in_of(kind)


def _is_packaging() -> bool:
    """Whether AOTInductor makes a package, with the token of a promise that a module has."""
    virtualized = sys.modules.get("torch._inductor.virtualized")
    return virtualized is not None and bool(virtualized.V.aot_compilation)


def _keep_no_promise_of_compiled() -> None:
    make = fake_class_registry.maybe_to_fake_obj

    def of_stand_in(fake_mode: Any, value: Any) -> Any:
        if isinstance(value, torch.ScriptObject) and not _is_packaging():
            value = _stand_in(value)
        return make(fake_mode, value)

    fake_class_registry.maybe_to_fake_obj = of_stand_in  # type: ignore[assignment]


def _keep_no_promise_of_exported(exported_program: Any) -> None:
    program = exported_program.ExportedProgram
    init = program.__init__

    @functools.wraps(init)
    def without_promises(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        signature = self.graph_signature
        inputs = set(signature.user_inputs) - set(signature.lifted_custom_objs)
        # Torch files inputs under constants, and loading a saved program looks for the names.
        self._constants = {
            name: torch.empty(0) if name in inputs and _is_promise(value) else value
            for name, value in self._constants.items()
        }
        self._example_inputs = pytree.tree_map_only(
            torch.ScriptObject, _stand_in, self._example_inputs
        )
        for node in self.graph.find_nodes(op="placeholder"):
            attribute = signature.inputs_to_lifted_custom_objs.get(node.name)
            fake = getattr(node.meta.get("val"), "fake_val", None)
            if attribute is not None and is_fake_promise(fake):
                object.__setattr__(fake, "real_obj", self._constants[attribute])

    program.__init__ = without_promises


def _keep_promises_inputs(trace: Any) -> None:
    """Have strict export trace with fake promises, as it does with fake tensors.

    With those that it was called with, tracing would fulfil them.
    """
    extract = getattr(trace, "_extract_fake_inputs", None)
    if extract is None:
        return

    def with_promises(module: torch.fx.GraphModule, *inputs: Any) -> Any:
        for node in module.graph.find_nodes(op="get_attr"):
            if is_fake_promise(getattr(module, node.target, None)):
                raise NotImplementedError(
                    "torch.export: expected a promise that is an argument, got one that is an "
                    "attribute of the module: pass it as an argument, or export with strict=False"
                )
        *inputs, fake_mode = extract(module, *inputs)

        def fake(value: torch.ScriptObject) -> object:
            return fake_class_registry.maybe_to_fake_obj(fake_mode, value)

        return *pytree.tree_map_only(torch.ScriptObject, fake, inputs), fake_mode

    trace._extract_fake_inputs = with_promises


def _snapshot(mode: FunctionalTensorMode, tensor: torch.Tensor, promise: object) -> None:
    """``get_tensor`` in a graph without updates in place: with a copy.

    The compiler of such a graph gives memory that it reads no more to other values. What a promise
    was given it does not know to be read.
    """
    with mode:
        _ops.get_tensor_copy(tensor, promise, copy=True)


def _dispatch_in_python(operator: Any) -> None:
    """With a fake promise an operator is dispatched in Python, by what stands here alone."""

    def below_subclasses(*arguments: Any, **options: Any) -> Any:
        passed = [*operator._fallthrough_keys(), DispatchKey.PythonTLSSnapshot]
        return operator._dispatch_in_python(passed, *arguments, **options)

    def in_transform(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(
            f"{operator.name()}: expected a call outside of torch.func transforms (grad, jvp, "
            "vmap), got one inside: return the tensor from the transformed function, and fulfil "
            "the promise with that"
        )

    operator.py_impl(DispatchKey.PythonTLSSnapshot)(below_subclasses)
    operator.py_impl(DispatchKey.FuncTorchDynamicLayerFrontMode)(in_transform)


def _take_promises() -> None:
    """A graph takes a promise as an input, for an operator that fulfils it."""
    for name in _STAND_INS:
        fake_class_registry.register_fake_class(f"dtorch::{name}", _FakePromise)  # type: ignore[arg-type]
    for operator in (_ops.get_tensor, _ops.get_tensor_copy):
        _dispatch_in_python(operator)
    _ops.get_tensor.py_impl(FunctionalTensorMode)(_snapshot)
    for operator in _ops.GET_FUTURE:
        operator.py_impl(FakeTensorMode)(_FakePromise._refuse)
    torch.serialization.add_safe_globals([_stand_in_of, *_STAND_INS.values()])
    _keep_no_promise_of_compiled()


def _break_at_methods(script_object: Any) -> None:
    """A method of a promise is for between two graphs: Dynamo calls it an error."""
    from torch._dynamo.variables.misc import GetAttrVariable

    names = "TorchScriptObjectVariable", "CustomClassObjectVariable"  # the latter from 2.14 on
    variable: Any = next(getattr(script_object, n) for n in names if hasattr(script_object, n))
    getter = "var_getattr" if "var_getattr" in vars(variable) else "tp_getattro_impl"
    get_attribute, call = getattr(variable, getter), variable.call_method

    def attribute(self: Any, tx: Any, name: str) -> Any:
        if not is_fake_promise(self.value):
            return get_attribute(self, tx, name)
        return GetAttrVariable(self, name)

    def call_method(self: Any, tx: Any, name: str, *arguments: Any) -> Any:
        function = call.__wrapped__ if is_fake_promise(self.value) else call  # below the error
        return function(self, tx, name, *arguments)

    setattr(variable, getter, attribute)
    variable.call_method = call_method


def _leave_overloads_to_torch(output_graph: Any) -> None:
    """Have Dynamo not look for the overload of an operator of ours, to see how it is tagged.

    It does so in C++, which knows no fake promises; calling the operator finds the overload. And
    break at ``get_future``, which could be called with a fake one, and would fail.
    """
    check = getattr(output_graph, "check_pt2_compliant_op", None)
    if check is None:
        return

    def unless_ours(graph: Any, kind: str, target: Any, *arguments: Any) -> None:
        if str(target).startswith("dtorch.get_future"):
            output_graph.unimplemented(
                gb_type="The future of a promise",
                context=str(target),
                explanation="An operator returns a future.",
                hints=[REASON],
            )
        if not (isinstance(target, torch._ops.OpOverloadPacket) and _is_ours(target)):
            check(graph, kind, target, *arguments)

    output_graph.check_pt2_compliant_op = unless_ours


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
    if is_fake_promise(value):
        return True
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
        elif node.target is getitem and node.args[0] in starts:
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
    "torch._dynamo.output_graph": _leave_overloads_to_torch,
    "torch._dynamo.variables.script_object": _break_at_methods,
    "torch.export._trace": _keep_promises_inputs,
    "torch.export.exported_program": _keep_no_promise_of_exported,
    "torch._inductor.fx_passes.post_grad": _on_post_grad,
    "torch._inductor.memory": _keep_order_for_memory,
}


def install() -> None:
    _keep_effects()
    _take_promises()
    for name, hook in _HOOKS.items():
        module = sys.modules.get(name)
        if module is not None:
            hook(module)
        else:
            sys.meta_path.insert(0, _OnImport(name, hook))


install()
