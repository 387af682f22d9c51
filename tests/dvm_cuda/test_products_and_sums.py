"""A product by a number and a sum with one are one word, and a sign is that of the factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from magjit_dvm.instructions import DType
from magjit_dvm.program import Node, NodeKind, Program
from tests.dvm.checking import cast, compute, load, output, tensor
from tests.dvm_cuda.checking import check_words, simulated
from tests.dvm_cuda.test_encoder import values

pytestmark = pytest.mark.usefixtures("way")

F32, F16, I32 = DType.F32, DType.F16, DType.I32


def number(value: float, dtype: DType = F32) -> Node:
    return Node(NodeKind.CONSTANT, dtype, number=value)


def program(*nodes: Node, results: tuple[int, ...] = (), dtype: DType = F32) -> Program:
    """Node 0 is x, 1 and 2 are 1.5 and 0.25; what comes last is a result, with those named."""
    first = load(0, dtype), number(1.5), number(0.25)
    outputs = tuple(output(one, 0) for one in (*results, len(nodes) + 2))
    return Program(1, (tensor(dtype, 0),), (*first, *nodes), outputs)


def seconds(made: Program, x: torch.Tensor) -> list[Any]:
    """What words do, without where memory is; the results are the reference's."""
    image = check_words(made, [x])
    assert image is not None
    kept = [(one.first, one.second, one.w2, one.w3) for one in image.words]
    return [one for one in kept if one[0].startswith(("f", "i")) or one[1] != "nop"]


HALF, QUARTER = 0x3FC00000, 0x3E800000  # 1.5 and 0.25
SIGN = 1 << 31
MUL = compute("mul", F32, 0, 1)
CASES: dict[str, tuple[tuple[Node, ...], Any]] = {
    "x m + c": ((MUL, compute("add", F32, 3, 2)), ("fk.mad", HALF, QUARTER)),
    "c + x m": ((MUL, compute("add", F32, 2, 3)), ("fk.mad", HALF, QUARTER)),
    "x m - c": ((MUL, compute("sub", F32, 3, 2)), ("fk.mad", HALF, QUARTER | SIGN)),
    "c - x m": ((MUL, compute("sub", F32, 2, 3)), ("fk.mad", HALF | SIGN, QUARTER)),
    "-x m": (
        (compute("neg", F32, 0), compute("mul", F32, 3, 1)),
        ("fk.mul", HALF | SIGN, 0),
    ),
    "c - -x m": (
        (compute("neg", F32, 0), compute("mul", F32, 1, 3), compute("sub", F32, 2, 4)),
        ("fk.mad", HALF, QUARTER),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_word(name: str) -> None:
    nodes, (word, w2, w3) = CASES[name]
    x = torch.cat([values(F32, 300), torch.tensor([0.0, -0.0, torch.inf, torch.nan, -1 / 6])])
    assert seconds(program(*nodes), x) == [(word, "nop", w2, w3)]


def test_halves() -> None:
    """Loads and stores convert; nothing is between the two operators."""
    wide = cast(F32, 0), compute("mul", F32, 3, 1), compute("add", F32, 4, 2), cast(F16, 5)
    made = program(*wide, dtype=F16)
    assert seconds(made, values(F16, 700)) == [("fk.mad", "nop", HALF, QUARTER)]


def test_a_product_that_is_asked_for_is_made() -> None:
    """As a result, or by another operator: then something is done with it between the words."""
    x = values(F32, 300)
    asked = [one[0] for one in seconds(program(MUL, compute("add", F32, 3, 2), results=(3,)), x)]
    assert "fk.mad" not in asked and {"fk.mul", "fk.add"} <= {*asked}
    twice = MUL, compute("add", F32, 3, 2), compute("mul", F32, 3, 4)
    asked = [one[0] for one in seconds(program(*twice), x)]
    assert "fk.mad" not in asked


def test_ints_have_no_such_word() -> None:
    x = values(I32, 300)
    nodes = compute("mul", I32, 0, 1), compute("add", I32, 3, 2)
    first = load(0, I32), number(3, I32), number(7, I32)
    made = Program(1, (tensor(I32, 0),), (*first, *nodes), (output(4, 0),))
    assert [one[0] for one in seconds(made, x)] == ["ik.mul", "ik.add"]


def test_it_is_rounded_once() -> None:
    """1.5 · (1 + 2^-23) - 1.5 is 1.5 · 2^-23, not the 2^-22 of a product that has been rounded."""
    x = torch.full((40,), 1 + 2.0**-23)
    nodes = (load(0, F32), number(1.5), MUL, compute("sub", F32, 2, 1))
    (found,) = simulated(Program(1, (tensor(F32, 0),), nodes, (output(3, 0),)), [x])[1]
    assert torch.equal(found, torch.full((40,), 1.5 * 2.0**-23))
