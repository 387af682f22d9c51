"""A torch functions mode sees what the annotations call an operator, and only that.

Each function is called with arguments made from the signatures of the operators of its name, under
a mode that stops it before it computes anything: a call that ends without having met the mode is
one that a recorder would miss.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import magjit.annotations as annotations
from magjit.annotations import Kind, Rule, default_database

SEEN_KINDS = (Kind.OP, Kind.METADATA, Kind.VALUE_READ)
TENSOR = torch.ones(2, 2)
INDICES = torch.zeros(2, 2, dtype=torch.int64)


class Met(BaseException):
    """The call has met the mode."""


class Stop(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise Met


# Arguments for functions whose signature no operator of ATen has.
BY_HAND: tuple[tuple[Any, ...], ...] = (
    (),
    (TENSOR,),
    (TENSOR, TENSOR),
    (TENSOR, TENSOR, TENSOR),
    (TENSOR, 1),
    (TENSOR, 1, 1),
    (TENSOR, 2, [2, 1]),
    (TENSOR, [1]),
    ([TENSOR],),
    ([TENSOR, TENSOR],),
    (2,),
    ([2],),
    (1, 3),
    (1, 3, 2),
    ([TENSOR, TENSOR], 1),
    ("ij,jk->ik", [TENSOR, TENSOR]),
    (TENSOR, [2, 2], [1, 1]),
    (torch.float32, torch.int32),
    (TENSOR, torch.Tensor),
    (TENSOR, TENSOR, TENSOR, *(2, 1), *(TENSOR,) * 2, None, None, False, 0.0, TENSOR, TENSOR),
)
BY_TYPE: dict[str, Any] = {
    "Tensor": TENSOR,
    "number": 1.0,
    "Scalar": 1.0,
    "int": 1,
    "SymInt": 1,
    "float": 1.0,
    "bool": True,
    "str": "sum",
    "Device": torch.device("cpu"),
    "List[Tensor]": [TENSOR],
    "List[Optional[Tensor]]": [INDICES],
    "List[int]": [1],
    "List[SymInt]": [1],
    "List[float]": [1.0],
    "List[bool]": [True],
    "List[number]": [1.0],
    "ScalarType": torch.float32,
    "Generator": torch.default_generator,
}


def from_schema(schema: Any) -> tuple[Any, ...] | None:
    """The required positional arguments of an operator."""
    values = []
    for argument in schema.arguments:
        if argument.has_default_value() or argument.kwarg_only:
            break
        kind = str(argument.type)
        if kind.startswith("Optional["):
            kind = kind.removeprefix("Optional[").removesuffix("]")
        if argument.name in ("index", "indices") and kind == "Tensor":
            values.append(INDICES)
        elif argument.name == "dtype":
            values.append(torch.float32)
        elif kind not in BY_TYPE:
            return None
        else:
            values.append(BY_TYPE[kind])
    return tuple(values)


@cache
def schemas_of(name: str) -> tuple[tuple[Any, ...], ...]:
    packet = getattr(torch.ops.aten, name, None) if not name.startswith("__") else None
    if packet is None:
        return ()
    found = [from_schema(getattr(packet, overload)._schema) for overload in packet.overloads()]
    return tuple(arguments for arguments in found if arguments is not None)


def meets_the_mode(function: Any, names: list[str]) -> bool | None:
    """None when no arguments at hand are accepted."""
    tries = [arguments for name in names for arguments in schemas_of(name)]
    for arguments in (*tries, *BY_HAND):
        try:
            with Stop():
                result = function(*arguments)
        except Met:
            return True
        except Exception:
            continue
        if result is not NotImplemented:
            return False
    return None


def names_in_aten(name: str) -> list[str]:
    area, _, last = name.rpartition(".")
    return [last, f"{area.rpartition('.')[2]}_{last}", last.removesuffix("_")]


def operators() -> Iterator[tuple[Rule, Any]]:
    for name, rule in default_database().rules.items():
        if not name.startswith("torch.") or name.startswith("torch.ops.") or name.endswith(".*"):
            continue
        if rule.kind in SEEN_KINDS and not name.endswith(("__get__", "__set__", "__delete__")):
            place = annotations._find(name)
            if place is not None:
                yield rule, annotations._unwrapped(place[2])


# Metadata of a tensor that torch's own Python code asks for without a torch function.
ASKED_DIRECTLY = (
    "torch._C._dispatch_keys",
    "torch._C._functorch.",
)
# Argument lists of these are not worth writing down; torch's own tests check them.
HARD_TO_CALL = 12


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_a_mode_sees_every_operator() -> None:
    unseen, not_called, count = [], [], 0
    for rule, function in operators():
        if rule.name.startswith(ASKED_DIRECTLY):
            continue
        met = meets_the_mode(function, names_in_aten(rule.name))
        count += 1
        if met is None:
            not_called.append(rule.name)
        elif not met:
            unseen.append(rule.name)
    assert not unseen
    assert len(not_called) <= HARD_TO_CALL, not_called
    assert count > 1300


@pytest.mark.parametrize(
    "name", ["_VariableFunctions", "_nn", "_linalg", "_fft", "_special", "_sparse", "_nested"]
)
def test_a_mode_sees_every_generated_binding(name: str) -> None:
    namespace, unseen, not_called, count = getattr(torch._C, name), [], [], 0
    for attribute in dir(namespace):
        function = getattr(namespace, attribute)
        rule = default_database().lookup(function)
        if attribute.startswith("__") or rule is None or rule.kind not in SEEN_KINDS:
            continue
        met = meets_the_mode(function, [attribute])
        count += 1
        if met is None:
            not_called.append(attribute)
        elif not met:
            unseen.append(attribute)
    assert not unseen
    assert len(not_called) <= 0.05 * count + 1, not_called


def test_a_mode_sees_every_attribute_of_a_tensor() -> None:
    parameter = torch.nn.Parameter(TENSOR)
    wrong = []
    for name, rule in default_database().rules.items():
        if not name.startswith("torch.Tensor.") or not name.endswith(".__get__"):
            continue
        if name in ATTRIBUTES_READ_DIRECTLY:
            continue
        descriptor = annotations._find(name)[2]
        try:
            with Stop():
                descriptor.__get__(parameter, torch.nn.Parameter)
        except Met:
            continue
        wrong.append((name, rule.kind))
    assert not wrong


ATTRIBUTES_READ_DIRECTLY = {
    "torch.Tensor.__class__.__get__",
    "torch.Tensor._has_symbolic_sizes_strides.__get__",
    "torch.Tensor._python_dispatch.__get__",
}


def test_a_mode_does_not_see_what_is_called_unseen() -> None:
    import numpy

    calls = {
        "torch.Tensor": (2,),
        "torch.FloatTensor": (2,),
        "torch.Tensor._make_subclass": (torch.nn.Parameter, TENSOR),
        "torch.from_numpy": (numpy.ones(2),),
        "torch.frombuffer": (bytearray(8),),
        "torch.range": (1, 2),
    }
    for name, arguments in calls.items():
        function = annotations._unwrapped(annotations._find(name)[2])
        rule = default_database().lookup(function)
        assert rule.kind is (Kind.SPECIAL if name == "torch.from_numpy" else Kind.UNSEEN), name
        kwargs = {"dtype": torch.float32} if name == "torch.frombuffer" else {}
        with Stop():
            function(*arguments, **kwargs)


def test_a_mode_sees_an_operator_of_torch_ops() -> None:
    for operator in (torch.ops.aten.relu, torch.ops.aten.relu.default, torch.ops.prims.sin):
        assert default_database().lookup(operator).kind is Kind.OP
        with pytest.raises(Met), Stop():
            operator(TENSOR)


def test_a_mode_sees_python_functions_of_torch_as_one_operator() -> None:
    for function in (F.relu, F.dropout, F.softmax, torch.norm, torch.Tensor.split):
        assert default_database().lookup(function).kind is Kind.OP
        with pytest.raises(Met), Stop():
            function(TENSOR, 1)
