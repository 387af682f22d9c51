"""Sums and squared deviations from the mean in one pass: as exact as two passes are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magjit
from magjit_dvm.instructions import INSTRUCTIONS, DType
from magjit_dvm.program import Node, NodeKind, Program
from tests.dvm.checking import (
    MEDIUM,
    SMALL,
    cast,
    check_program,
    compute,
    load,
    machine,
    output,
    reduce,
    results_of,
    tensor,
)

F32, F64 = DType.F32, DType.F64
NAMES = [one.name for one in INSTRUCTIONS]
SETTINGS = {"cache": None, "small": SMALL, "medium": MEDIUM}
WIDTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 127, 129, 1000, 2100, 5003)


@pytest.fixture(params=list(SETTINGS))
def settings(request: pytest.FixtureRequest) -> Iterator[str]:
    with machine(SETTINGS[request.param]):
        yield request.param


def moments(dims: tuple[int, ...], over: tuple[int, ...], dtype: DType = F32) -> Program:
    """Sums of x, and of its squared deviations from the mean, over some loops."""
    nodes = (
        load(0, dtype),
        reduce("sum", dtype, 0, *over),
        Node(NodeKind.NUMEL, dtype, dims=frozenset(over)),
        compute("div", dtype, 1, 2),
        compute("sub", dtype, 0, 3),
        compute("mul", dtype, 4, 4),
        reduce("sum", dtype, 5, *over),
    )
    kept = [d for d in dims if d not in over]
    return Program(len(dims), (tensor(dtype, *dims),), nodes, (output(1, *kept), output(6, *kept)))


def instructions(program: Program, *arguments: Any) -> list[str]:
    return [NAMES[one[1]] for one in program.compiled().encode(*arguments)["insns"]]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def squares_of(x: torch.Tensor) -> torch.Tensor:
    """Exact for float32: squared deviations of the last dimension."""
    wide = x.double()
    return (wide - wide.mean(-1, keepdim=True)).square().sum(-1)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows(settings: str, width: int) -> None:
    for rows in (1, 3, 40):
        x = drawn(rows, width) + 2
        check_program(moments((0, 1), (1,)), (x,))
        assert "moments" in instructions(moments((0, 1), (1,)), x) or width == 1


@pytest.mark.parametrize("layout", ["steps", "expanded", "strided", "transposed", "sliced"])
def test_layouts(settings: str, layout: str) -> None:
    x = {
        "steps": drawn(3, 5, 70).transpose(0, 1),
        "expanded": drawn(4, 1, 33).expand(4, 5, 33),
        "strided": drawn(4, 5, 66)[..., ::2],
        "transposed": drawn(33, 5, 4).permute(2, 1, 0),
        "sliced": drawn(4, 9, 70)[:, 2:7, 3:60],
    }[layout]
    check_program(moments((0, 1, 2), (1, 2)), (x,))
    check_program(moments((0, 1, 2), (0, 1, 2)), (x,))
    check_program(moments((0, 1, 2), (0, 2)), (x,))


def test_of_what_is_computed(settings: str) -> None:
    """The value has other users, among them one that reads it in the next phase."""
    nodes = (
        load(0, DType.F16),
        cast(F32, 0),
        compute("exp", F32, 1),
        reduce("sum", F32, 2, 1),
        Node(NodeKind.NUMEL, F32, dims=frozenset({1})),
        compute("div", F32, 3, 4),
        compute("sub", F32, 2, 5),
        compute("mul", F32, 6, 6),
        reduce("sum", F32, 7, 1),
        reduce("max", F32, 2, 1),
        compute("mul", F32, 6, 8),
        compute("add", F32, 10, 9),
    )
    program = Program(2, (tensor(DType.F16, 0, 1),), nodes, (output(11, 0, 1), output(8, 0)))
    x = drawn(7, 200).half()
    assert "moments" in instructions(program, x)
    check_program(program, (x,))


def test_other_sums_stay_what_they_are() -> None:
    x = drawn(5, 40)
    assert "moments" not in instructions(moments((0, 1), (1,), F64), x.double())
    assert "moments" not in instructions(moments((0, 1), (0,)), x)  # along rows
    good = moments((0, 1), (1,)).nodes
    for at, other in (
        (2, Node(NodeKind.CONSTANT, F32, number=39.0)),  # not the number of elements
        (5, compute("mul", F32, 4, 0)),  # not a square
        (4, compute("sub", F32, 3, 0)),  # mean − x
    ):
        nodes = (*good[:at], other, *good[at + 1 :])
        program = Program(2, (tensor(F32, 0, 1),), nodes, (output(1, 0), output(6, 0)))
        assert "moments" not in instructions(program, x)
        check_program(program, (x,))


def far() -> dict[str, torch.Tensor]:
    """Rows of which sums of squares, or of differences from any one element, say little."""
    outlier = drawn(4, 3000)
    outlier[:, 0] = 1e5
    halves = drawn(4, 6000)
    halves[:, 3000:] += 1e4
    return {
        "a large mean": drawn(4, 3000) + 1e4,
        "an outlier first": outlier,
        "two levels": halves,
        "long": drawn(2, 200_000) + 100,
        "small": drawn(4, 3000) * 1e-15 + 1e-12,
        "large": drawn(4, 3000) * 1e15,
    }


@pytest.mark.parametrize("name", far())
def test_as_exact_as_eager(settings: str, name: str) -> None:
    x = far()[name]
    _, found = results_of(moments((0, 1), (1,)), (x,))
    wanted = squares_of(x)
    error = ((found.double() - wanted) / wanted).abs().max().item()
    theirs = (x.var(-1, correction=0).double() * x.shape[1] - wanted) / wanted
    assert error <= max(2e-6, 2 * theirs.abs().max().item())


def test_equal_elements_have_no_variance(settings: str) -> None:
    for value in (0.0, 1.0, 0.1, 3e7, 1e-20, -123456.0):
        sums, squares = results_of(moments((0, 1), (1,)), (torch.full((3, 5003), value),))
        mean = sums / 5003
        assert torch.all(squares <= 5003 * (2**-23 * mean) ** 2)


def test_special_values(settings: str) -> None:
    special = [math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, 0.0]
    x = drawn(len(special), 300)
    x[torch.arange(len(special)), torch.arange(len(special)) * 40] = torch.tensor(special)
    sums, squares = results_of(moments((0, 1), (1,)), (x,))
    assert torch.equal(sums.isnan(), x.sum(-1).isnan())
    assert torch.equal(sums.isinf(), x.sum(-1).isinf())
    assert squares[:3].isnan().all() and squares[3:5].isinf().all() and squares[5:].isfinite().all()


@pytest.mark.parametrize("threads", [2, 3])
def test_cores_share_a_row(threads: int) -> None:
    before = torch.get_num_threads()
    x = drawn(2, 50_001) * torch.linspace(0, 3, 50_001) + 5
    program = moments((0, 1), (1,))
    torch.set_num_threads(threads)
    try:
        with machine((1 << 16, 8192, 16)):
            sums, squares = results_of(program, (x,))
            few = results_of(program, (drawn(1, 3),))[1]  # some cores have nothing
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(sums.double(), x.double().sum(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(squares.double(), squares_of(x), rtol=1e-6, atol=0)
    torch.testing.assert_close(few.double(), squares_of(drawn(1, 3)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_norms(dtype: torch.dtype) -> None:
    def norms(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.layer_norm(x, x.shape[-1:], weight, weight)
        return y, *torch.var_mean(x.float(), -1), F.group_norm(x, 2)

    x = (drawn(6, 4, 77) * 3 + 1).to(dtype)
    compiled = magjit.compile(norms, backend="dvm")
    with torch.no_grad():
        for got, wanted in zip(compiled(x, x[0, 0]), norms(x, x[0, 0]), strict=True):
            torch.testing.assert_close(got, wanted)
