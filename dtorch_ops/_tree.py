"""Trees of tensors, as ``torch.utils._pytree`` knows them: taken apart, and put together again."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from . import _C
from ._compile import is_traced
from .functional import Device, fetch_each
from .future import TreeFuture

# Makes a part of a tree of the values of all its tensors.
Make = Callable[[list[Any]], Any]

_TENSORS = {Tensor, torch.nn.Parameter}
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}

_NO_TREE = (
    "input: expected a torch.Tensor, or a list, tuple, dict or another tree of them as "
    "torch.utils._pytree knows it, got "
)

# What an operator's error says of where it happened: csrc/dtorch/device/places.h.
_PLACES = re.compile(r"at (?:one of )?self\[\d+\](?:, self\[\d+\])*(?: and \d+ more)?(?=\)?\s*$)")


def _take_apart(node: Any, tensors: list[Tensor], others: list[Any]) -> Make:
    """Add the leaves of ``node`` to the lists.

    As ``_pytree.tree_flatten`` does, which takes as long as all the rest does for a thousand of
    them. What is returned keeps no tensor.
    """
    kind = type(node)
    children: list[Any] | tuple[Any, ...]
    if kind is list or kind is tuple:
        children = node
    elif kind is dict:
        children = tuple(node.values())
    elif kind in _PLAIN:
        return lambda _: node
    elif kind in _TENSORS or isinstance(node, Tensor):
        tensors.append(node)
        return itemgetter(len(tensors) - 1)
    else:
        children, spec = _pytree.tree_flatten(node, is_leaf=lambda below: below is not node)
        if spec.is_leaf():
            others.append(node)
            return lambda _: node
    make = _take_children_apart(children, tensors, others)
    if kind is list:
        return make
    if kind is tuple:
        return lambda values: tuple(make(values))
    if kind is dict:
        keys = tuple(node)
        return lambda values: dict(zip(keys, make(values), strict=True))
    return lambda values: _pytree.tree_unflatten(make(values), spec)


def _take_children_apart(
    children: list[Any] | tuple[Any, ...], tensors: list[Tensor], others: list[Any]
) -> Make:
    if _TENSORS.issuperset(map(type, children)):  # the usual case, at the speed of C
        start = len(tensors)
        tensors.extend(children)
        return itemgetter(slice(start, len(tensors)))
    makes = [_take_apart(child, tensors, others) for child in children]
    return lambda values: [make(values) for make in makes]


def _hidden_in(leaf: object, seen: frozenset[int] = frozenset()) -> str | None:
    """What of ``leaf``, which is passed through, the user will miss; None if nothing."""
    if isinstance(leaf, Tensor):
        return "a tensor"
    if isinstance(leaf, torch._C.Future):
        return "a future"
    if id(leaf) in seen:  # it is in itself
        return None
    parts: Any = ()
    if isinstance(leaf, Mapping):
        parts = leaf.values()
    elif isinstance(leaf, (list, tuple, set, frozenset)):
        parts = leaf
    elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        parts = (getattr(leaf, field.name, None) for field in dataclasses.fields(leaf))
    seen |= {id(leaf)}
    return next(filter(None, (_hidden_in(part, seen) for part in parts)), None)


def _refused(leaf: object, hidden: str) -> TypeError:
    return TypeError(
        "input: expected tensors, and what holds none, as the leaves of a tree, got "
        f"{type(leaf).__name__} with {hidden} in it: register the class with "
        "torch.utils._pytree.register_pytree_node, or pass its parts; await a future first"
    )


class Tree:
    """The structure of a tree: makes one of the values of its tensors. Holds none of them."""

    __slots__ = ("_count", "_make")

    def __init__(self, make: Make, count: int) -> None:
        self._make, self._count = make, count

    def __call__(self, values: list[Any]) -> Any:
        return self._make(values)

    def add_note(self, error: BaseException) -> None:
        """Have an error of the operator, which names places in a list, name them in the tree."""
        found = _PLACES.search(str(error))
        if found is None:
            return
        paths = self._paths()
        note = re.sub(r"self\[(\d+)\]", lambda match: paths[int(match[1])], found[0])
        _add_note(error, note)

    def _paths(self) -> list[str]:
        marks = [object() for _ in range(self._count)]
        try:
            found = _pytree.tree_leaves_with_path(self._make(marks))
        except Exception:  # of a class that cannot tell the names of its parts
            return [f"tensor {i} of the tree" for i in range(self._count)]
        paths = {id(leaf): _pytree.keystr(path) for path, leaf in found}
        return [paths.get(id(m), f"tensor {i} of the tree") for i, m in enumerate(marks)]


def _add_note(error: BaseException, note: str) -> None:
    # As BaseException.add_note, which Python 3.10 lacks.
    error.__dict__.setdefault("__notes__", []).append(note)


def take_apart(input: Any) -> tuple[list[Tensor], Tree]:
    """The tensors of a tree, and its structure.

    Raises:
        TypeError: no tree, or one with a leaf that has a tensor or a future in it.
    """
    tensors: list[Tensor] = []
    others: list[Any] = []
    make = _take_apart(input, tensors, others)
    if type(input) in _PLAIN or (others and others[0] is input):
        raise TypeError(_NO_TREE + type(input).__name__)
    for leaf in others:
        if hidden := _hidden_in(leaf):
            error = _refused(leaf, hidden)
            _add_note(error, f"at {_path_of(leaf, input)}")
            raise error
    return tensors, Tree(make, len(tensors))


def _path_of(leaf: object, tree: Any) -> str:
    try:
        found = _pytree.tree_leaves_with_path(tree)
        return next(_pytree.keystr(path) for path, each in found if each is leaf)
    except Exception:
        return "a leaf of the tree"


def fetch(input: Any, device: Device | None, copy: bool) -> TreeFuture[Any]:
    """``dtorch_ops.to_torch_async`` of what is no tensor."""
    return _fetch(*take_apart(input), device, copy)


def _fetch(tensors: list[Tensor], tree: Tree, device: Device | None, copy: bool) -> TreeFuture[Any]:
    try:
        return _C.fetch_tensors(tensors, tree, device, copy)
    except Exception as error:
        tree.add_note(error)
        raise


def fetch_now(input: Any, device: Device | None, copy: bool) -> Any:
    """``dtorch_ops.to_torch`` of what is no tensor."""
    tensors, tree = take_apart(input)
    if any(is_traced(tensor) for tensor in tensors):
        return tree(fetch_each(tensors, device, copy))
    return _fetch(tensors, tree, device, copy).get()


def fetch_in_graph(input: Any, device: Device | None, copy: bool) -> Any:
    """``dtorch_ops.to_torch`` where Dynamo traces, which knows torch's own functions for trees."""
    leaves, spec = _pytree.tree_flatten(input)
    if spec.is_leaf() and not isinstance(input, Tensor):
        raise TypeError(_NO_TREE + type(input).__name__)
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif hidden := _hidden_in(leaf):
            raise _refused(leaf, hidden)
    values = iter(fetch_each(tensors, device, copy))
    leaves = [next(values) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return _pytree.tree_unflatten(leaves, spec)
