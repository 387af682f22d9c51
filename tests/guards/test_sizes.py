"""Conditions on sizes without Python: the same answers as Python gives, or a refusal."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import magjit
from magjit import _C
from magjit.guards import emit as guard_emit
from magjit.guards.sizes import size_program
from magjit.plugin import ShapeGuard

SIZES = (1, 2, 3, 4, 7)
TENSORS = [
    (torch.randn(n, m), torch.randn(2, n, m).transpose(0, 2)[..., 1:])
    for n, m in itertools.product(SIZES, SIZES)
]


def check(expression: str, count: int = 2) -> Any:
    """A guard program that has only this condition on its arguments."""
    places = tuple(range(count))
    program = size_program(ShapeGuard(expression, places), {i: i for i in places})
    assert program is not None, expression
    roots = [("argc", count, ()), *[("arg", i, i) for i in places]]
    return _C.GuardProgram([*roots, ("sizes", places, program)], count)


def in_python(expression: str, *tensors: torch.Tensor) -> bool:
    try:
        return bool(ShapeGuard(expression, (0, 1)).predicate()(tensors))
    except ZeroDivisionError:
        return False


CONDITIONS = [
    "inputs[0].size()[0] == inputs[1].size()[0]",
    "inputs[0].size()[0] != 3",
    "2 <= inputs[0].size()[0] <= 4",
    "1 < inputs[0].size()[0] < inputs[1].size()[0] < 9",
    "inputs[0].size()[0] % 2 == 0 and inputs[0].size()[1] > 2",
    "inputs[0].size()[0] % 2 == 0 or inputs[0].size()[1] > 2",
    "not (inputs[0].size()[0] >= 3)",
    "(inputs[0].size()[0] * 6) // (inputs[0].size()[1] // 2) != inputs[0].size()[0]",
    "(2 - inputs[0].size()[0]) // 2 == -1",
    "(2 - inputs[0].size()[0]) % 3 == 1",
    "(inputs[0].size()[0] - 3) // (inputs[0].size()[1] - 3) > 0",
    "(inputs[0].size()[0] - 3) % (inputs[0].size()[1] - 3) > 0",
    "-inputs[0].size()[0] < -3",
    "min(6, inputs[0].size()[0], inputs[0].size()[1]) <= 2",
    "max(inputs[0].size()[0], inputs[0].size()[1]) == 7",
    "inputs[1].stride()[2] == inputs[0].size()[0]*inputs[0].size()[0]",
    "inputs[1].stride()[0] == 1 and inputs[1].storage_offset() == 9",
    "inputs[1].storage_offset() % 4 == 0",
]


@pytest.mark.parametrize("expression", CONDITIONS)
def test_conditions_are_as_in_python(expression: str) -> None:
    program = check(expression)
    found = [(program.check(pair), in_python(expression, *pair)) for pair in TENSORS]
    assert [mine for mine, _ in found] == [theirs for _, theirs in found]
    assert len({theirs for _, theirs in found}) == 2, "the condition tells nothing"


REFUSED = [
    "inputs[0].size()[0] / 2 == 1",
    "inputs[0].size()[0] ** 2 == 4",
    "math.floor(inputs[0].size()[0]) == 4",
    "inputs[0] == 4",
    "inputs[5].size()[0] == 4",
    "inputs[0].size()[-1] == 4",
    "inputs[0].size() == 4",
    "inputs[0].numel() == 4",
    "inputs[0].size()[0] == 2.0",
    "inputs[0].size()[0] == True",
    "(inputs[0].size()[0] or 3) == 3",
    f"inputs[0].size()[0] == {2**63}",
    "min() == 1",
    "max(inputs[0].size()[0], default=1) == 1",
    "inputs[0].size()[0] in (1, 2)",
    "x" * 3,
    "+".join(["(inputs[0].size()[0]"] * 40) + ")" * 40 + " == 1",
    "inputs[0].size(",
]


@pytest.mark.parametrize("expression", REFUSED, ids=lambda one: one[:40])
def test_what_only_python_can_tell_is_refused(expression: str) -> None:
    assert size_program(ShapeGuard(expression, (0,)), {0: 0, 1: 1}) is None


def expressions() -> st.SearchStrategy[str]:
    leaves = st.one_of(
        st.integers(-9, 9).map(str),
        st.sampled_from(["inputs[0].size()[0]", "inputs[0].size()[1]", "inputs[1].stride()[2]"]),
    )

    def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        binary = st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner)
        called = st.tuples(st.sampled_from(["min", "max"]), inner, inner)
        return st.one_of(
            binary.map(lambda t: f"({' '.join(t)})"),
            called.map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
            inner.map(lambda text: f"(-{text})"),
        )

    values = st.recursive(leaves, grown, max_leaves=8)
    compared = st.tuples(values, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), values)
    truths = compared.map(lambda t: f"({' '.join(t)})")
    joined = st.tuples(truths, st.sampled_from(["and", "or"]), truths).map(" ".join)
    return st.one_of(truths, joined, truths.map(lambda text: f"not {text}"))


@settings(max_examples=400, deadline=None)
@given(expressions(), st.sampled_from(TENSORS))
def test_any_condition_is_as_in_python(expression: str, pair: Any) -> None:
    mine, theirs = check(expression).check(pair), in_python(expression, *pair)
    if mine != theirs:
        # Python does not look at what decides nothing; a division by zero there fails the guard.
        assert theirs and ("//" in expression or "%" in expression)
        assert " and " in expression or " or " in expression or "not" in expression


def test_results_of_more_than_64_bits_fail() -> None:
    big = f"inputs[0].size()[0] * {2**62} * 4 > 0"
    assert not check(big).check((torch.ones(4, 4), torch.ones(1)))
    lowest = f"({1 - 2**63} - inputs[0].size()[0]) // -1 > 0"
    assert not check(lowest).check((torch.ones(1), torch.ones(1)))


def test_what_is_no_plain_tensor_fails() -> None:
    program = check("inputs[0].size()[1] == inputs[0].size()[1]")
    one = torch.ones(2, 2)
    assert program.check((one, one))
    assert not program.check((3, one))
    assert not program.check((torch.ones(2), one))
    assert not program.check((torch.nested.nested_tensor([one, torch.ones(3, 2)]), one))
    strided = check("inputs[0].stride()[0] == inputs[0].stride()[0]")
    assert strided.check((one, one))
    assert not strided.check((one.to_sparse(), one))


BAD: list[Any] = [
    (("const", 1),),
    (("holds",),),
    (("const", 1), ("add",), ("holds",)),
    (("size", 2, 0), ("holds",)),
    (("size", -1, 0), ("holds",)),
    (("size", 0, 256), ("holds",)),
    (("size", 0), ("holds",)),
    (("offset", 0, 0), ("holds",)),
    (("const", 2**64), ("holds",)),
    (("const", 1.0), ("holds",)),
    (("nothing",), ("holds",)),
    ((), ("holds",)),
    ("const", 1),
    (*[("const", 1)] * 33, *[("add",)] * 32, ("holds",)),
    [("const", 1), ("holds",)],
    5,
]


@pytest.mark.parametrize("steps", BAD, ids=lambda one: repr(one)[:50])
def test_bad_programs_are_errors(steps: Any) -> None:
    roots = [("argc", 2, ()), ("arg", 0, 0), ("arg", 1, 1)]
    with pytest.raises(ValueError, match="instruction 3 \\(sizes\\)"):
        _C.GuardProgram([*roots, ("sizes", [0, 1], steps)], 2)


def test_an_empty_condition_holds() -> None:
    program = _C.GuardProgram([("argc", 1, ()), ("arg", 0, 0), ("sizes", [0], ())], 1)
    assert program.check((3,))


def test_records_of_changing_shapes_run_no_python(monkeypatch) -> None:
    instructions: list[Any] = []
    emit = guard_emit.GuardCode.emit
    monkeypatch.setattr(
        guard_emit.GuardCode,
        "emit",
        lambda code, *instruction: (instructions.append(instruction), emit(code, *instruction)),
    )

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.cat([x, y]).reshape(-1, 2)
        return z + 1 if x.shape[0] * 3 > y.shape[0] + 4 else z.view(x.shape[0] + 1, -1)

    compiled = magjit.compile(program, backend="eager")
    for n in (6, 8, 10, 4, 2, 12):
        x, y = torch.randn(n, 6), torch.randn(n + 2, 6)
        assert torch.equal(compiled(x, y), program(x, y))
    found = {instruction[0] for instruction in instructions}
    assert "sizes" in found
    assert "predicate" not in found
