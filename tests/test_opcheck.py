"""``torch.library.opcheck``, all its parts, on every operator of the namespace.

Where a part cannot apply, the reason stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import schema_check_mode
from torch.testing._internal.optests.generate_tests import ALL_TEST_UTILS

import dtorch_ops

# test_schema and test_faketensor look at this attribute of a copy, which is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

ops = torch.ops.dtorch
CPU, META = torch.device("cpu"), torch.device("meta")

PARTS = tuple(ALL_TEST_UTILS)
GRAPHS = ("test_aot_dispatch_static", "test_aot_dispatch_dynamic")

#: The parts that cannot apply to an operator, and why.
NO_GRAPH = dict.fromkeys(
    GRAPHS, "a graph cannot hold a future, which is what get_start and get_wait are for"
)
NO_DATA = dict.fromkeys(
    GRAPHS, "a gradient that comes back from meta has no data, as that of t.to('meta')"
)
NO_ELEMENTS = NO_GRAPH | {
    "test_schema": "the copy is made above the operator, where autograd records it, so that what "
    "this part would compare has no data"
}

SOURCES: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(2, 3),
    "transposed": lambda: torch.randn(2, 3).t(),
    "requires grad": lambda: torch.randn(2, 3, requires_grad=True),
    "conjugate": lambda: torch.randn(2, 3, dtype=torch.complex64).conj(),
    "integers": lambda: torch.arange(3),
    "scalar": lambda: torch.tensor(1.5),
    "empty": lambda: torch.randn(0, 5),
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}

#: The operator, what makes its arguments, its options, and what does not apply.
Case = tuple[Any, Callable[[], tuple[Any, ...]], dict[str, Any], dict[str, str]]


def future() -> torch.futures.Future[torch.Tensor]:
    return ops.get_tensor_async(torch.ones(2))  # type: ignore[no-any-return]


def _cases() -> Iterator[tuple[str, Case]]:
    tensor_promise, void_promise = dtorch_ops.TensorPromise, dtorch_ops.VoidPromise
    for source, make in SOURCES.items():
        grad = source == "requires grad"
        for options in ({}, {"copy": True}, {"device": CPU}, {"device": META}):
            excluded = NO_ELEMENTS if grad and options == {"device": META} else NO_GRAPH
            case = (ops.get_tensor_async.default, lambda m=make: (m(),), options, excluded)
            yield f"{source}, {options}", case
            several = (ops.get_tensors_async.default, lambda m=make: ([m(), m()],), options)
            yield f"{source}, {options}", (*several, excluded)
        for options in ({}, {"device": CPU}, {"device": META}, {"frozen": True}):
            yield (
                f"{source}, {options}",
                (ops.get_start.default, lambda m=make: (m(),), options, {}),
            )
        for device in (None, CPU, META):

            def started(make=make, device=device):
                t = make()
                return ops.get_start(t, device=device), t

            excluded = NO_DATA if grad and device == META else {}
            yield (
                f"{source}, {device}",
                (ops.get_wait.default, started, {"device": device}, excluded),
            )

        def promised(make=make):
            return make(), tensor_promise()

        yield source, (ops.get_tensor.default, promised, {}, {})
        for copy in (False, True):
            yield f"{source}, {copy}", (ops.get_tensor.copy, promised, {"copy": copy}, {})
    yield "", (ops.get_future.default, lambda: (tensor_promise(),), {}, NO_GRAPH)
    yield "", (ops.get_future.void, lambda: (void_promise(),), {}, NO_GRAPH)
    for devices in (None, [], [CPU]):
        yield str(devices), (ops.sync.default, lambda d=devices: (d,), {}, NO_GRAPH)
        yield str(devices), (ops.sync.promise, lambda d=devices: (void_promise(), d), {}, {})
        yield (
            str(devices),
            (ops.sync.devices_promise, lambda d=devices: (d, void_promise()), {}, {}),
        )
    for operator in (ops.collect_all.default, ops.collect_any.default):
        yield "", (operator, lambda: ([future(), future()],), {}, NO_GRAPH)
    yield "", (ops.wait_all.default, lambda: ([future(), future()],), {}, {})
    yield "", (ops.is_ready.default, lambda: (future(),), {}, {})
    yield "", (ops.wait_for.default, lambda: (future(), 1000), {}, {})


CASES = [(f"{case[0]}({label})", case) for label, case in _cases()]


def test_every_operator_is_checked():
    registered = {
        f"{schema.name.removeprefix('dtorch::')}.{schema.overload_name or 'default'}"
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("dtorch::")
    }
    assert registered == {str(case[0]).removeprefix("dtorch.") for _, case in CASES}


def fresh(value: object) -> object:
    if not isinstance(value, torch.ScriptObject):
        return value
    name = value._type().qualified_name().rpartition(".")[2]
    return getattr(dtorch_ops, name)()


@pytest.fixture
def _promises_for_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part calls the operator more than once, and a promise takes one value."""
    for operator in {case[0] for _, case in CASES}:

        def call(*arguments, run=operator._op, **options):
            return run(*map(fresh, arguments), **options)

        if any(isinstance(a.type, torch.ClassType) for a in operator._schema.arguments):
            monkeypatch.setattr(operator, "_op", call)
    # test_schema asks every script object for its length, which a promise has not.
    is_iterable = schema_check_mode.is_iterable_of_tensors
    monkeypatch.setattr(
        schema_check_mode,
        "is_iterable_of_tensors",
        lambda value: not isinstance(value, torch.ScriptObject) and is_iterable(value),
    )


@pytest.mark.usefixtures("_promises_for_every_call")
@pytest.mark.parametrize("case", [c for _, c in CASES], ids=[label for label, _ in CASES])
def test_opcheck(case):
    operator, arguments, options, excluded = case
    parts = tuple(part for part in PARTS if part not in excluded)
    torch.library.opcheck(operator, arguments(), options, test_utils=parts)


EXCLUDED = {(str(c[0]), part, reason): c for _, c in CASES for part, reason in c[3].items()}


@pytest.mark.usefixtures("_promises_for_every_call")
@pytest.mark.parametrize("operator, part, reason", EXCLUDED)
def test_what_is_excluded_does_fail(operator, part, reason):
    """Else the exclusion is out of date."""
    overload, arguments, options, _ = EXCLUDED[operator, part, reason]
    says = (
        "Found <class 'torch.Future'> in output|a graph cannot hold a future"
        if "future" in reason
        else "meta tensor"
    )
    with pytest.raises(torch.testing._internal.optests.OpCheckError, match=says):
        torch.library.opcheck(overload, arguments(), options, test_utils=part)
