"""Kernels for rows with factors of their own, and pairs of instructions that one pass computes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magjit
import magjit_dvm
from magjit_dvm.instructions import INSTRUCTIONS, DType
from magjit_dvm.program import Node, Program
from tests.dvm.checking import (
    MEDIUM,
    SMALL,
    check_program,
    compute,
    in_turn,
    load,
    machine,
    output,
    reduce,
    tensor,
)

F32 = DType.F32
NAMES = [one.name for one in INSTRUCTIONS]
SETTINGS = {"cache": None, "small": SMALL, "medium": MEDIUM}
WIDTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 79, 127, 128, 130, 1000, 5003)
SPECIAL = (math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, 0.0, -0.0)


@pytest.fixture(params=list(SETTINGS))
def settings(request: pytest.FixtureRequest) -> Iterator[str]:
    with machine(SETTINGS[request.param]):
        yield request.param


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_specials(rows: int, width: int) -> torch.Tensor:
    """Each special value in rows of its own, at places of all kinds."""
    x = drawn(rows, width)
    for row in range(0, rows, 2):
        x[row, (row * 37 + width - 1) % width] = SPECIAL[row // 2 % len(SPECIAL)]
    return x


def pairs_of(program: Program, *arguments: Any) -> set[tuple[str, str]]:
    """Neighbours of which the second takes the first's result: in its place, or to add it up."""
    insns = program.compiled().encode(*arguments)["insns"]
    found = set()
    for one, two in itertools.pairwise(insns):
        names = NAMES[one[1]], NAMES[two[1]]
        takes = two[7] == one[6]
        if takes and (names[0] == "sub_exp" or (names[0] == "sub_mul" and two[6] == one[6])):
            found.add(names)
    return found


def scaled(weight: tuple[int, ...], bias: tuple[int, ...] | None, turned: bool = False) -> Program:
    """((x − m)·r)·w + b for rows' m and r; w and b of some loops."""
    nodes: list[Node] = [load(number, F32) for number in range(4 if bias is None else 5)]
    first = len(nodes)
    nodes.append(compute("sub", F32, 0, 1))
    nodes.append(compute("mul", F32, first, 2))
    nodes.append(compute("mul", F32, 3, first + 1) if turned else compute("mul", F32, first + 1, 3))
    if bias is not None:
        nodes.append(compute("add", F32, first + 2, 4))
    inputs = [tensor(F32, 0, 1), tensor(F32, 0), tensor(F32, 0), tensor(F32, *weight)]
    inputs += [] if bias is None else [tensor(F32, *bias)]
    return Program(2, tuple(inputs), tuple(nodes), (output(len(nodes) - 1, 0, 1),))


LOOPS = ((1,), (0,), (), (0, 1))


@pytest.mark.parametrize("bias", [None, *LOOPS], ids=str)
@pytest.mark.parametrize("weight", LOOPS, ids=str)
def test_differences_times_factors(
    settings: str, weight: tuple[int, ...], bias: tuple[int, ...] | None
) -> None:
    for turned, width in itertools.product((False, True), WIDTHS):
        program = scaled(weight, bias, turned)
        size = (9, width)
        given = [with_specials(9, width), drawn(9, seed=1), drawn(9, seed=2)]
        for number, dims in enumerate((weight, bias)):
            if dims is not None:
                given.append(drawn(*(size[d] for d in dims), seed=3 + number))
        check_program(program, given)


def test_pairs_are_made() -> None:
    given = (drawn(9, 100), drawn(9), drawn(9), drawn(100), drawn(100))
    assert ("sub_mul", "mul_add") in pairs_of(scaled((1,), (1,)), *given)
    assert ("sub_mul", "mul_add") in pairs_of(scaled((1,), (1,), turned=True), *given)
    assert ("sub_mul", "mul") in pairs_of(scaled((1,), None), *given[:4])
    moved = normalized(compute("add", F32, 3, 5), results=(6,))
    assert ("sub_mul", "add") in pairs_of(moved, drawn(9, 100), *given[1:3], drawn(9, 100))


def normalized(*more: Node, results: tuple[int, ...]) -> Program:
    """x, m, r, w; x − m as 4, times r as 5; more, and which of them are results."""
    nodes = (
        *(load(number, F32) for number in range(4)),
        compute("sub", F32, 0, 1),
        compute("mul", F32, 4, 2),
        *more,
    )
    inputs = (tensor(F32, 0, 1), tensor(F32, 0), tensor(F32, 0), tensor(F32, 0, 1))
    return Program(2, inputs, nodes, tuple(output(n, 0, 1) for n in results))


@pytest.mark.parametrize(
    ("program", "paired"),
    [
        # The second reads what the first does.
        (normalized(compute("mul", F32, 5, 0), results=(6,)), True),
        (normalized(compute("add", F32, 5, 1), results=(6,)), True),
        (normalized(compute("add", F32, 3, 5), results=(6,)), True),
        (normalized(compute("exp", F32, 0), compute("mul", F32, 5, 6), results=(7,)), True),
        # Its other operand is made in local memory, where the first must not write.
        (
            normalized(
                compute("exp", F32, 3),
                compute("mul", F32, 5, 6),
                compute("tanh", F32, 7),
                results=(8,),
            ),
            True,
        ),
        (
            normalized(
                compute("exp", F32, 3),
                compute("abs", F32, 3),
                compute("mul", F32, 6, 5),
                compute("add", F32, 8, 7),
                compute("tanh", F32, 9),
                results=(10, 7),
            ),
            True,
        ),
        # The first is read by somebody else, is a result, or both factors are it.
        (
            normalized(
                compute("mul", F32, 5, 3),
                compute("exp", F32, 5),
                compute("minimum", F32, 6, 7),
                results=(8,),
            ),
            False,
        ),
        (normalized(compute("mul", F32, 5, 3), results=(5, 6)), False),
        (normalized(compute("mul", F32, 5, 5), results=(6,)), False),
    ],
)
def test_who_else_reads(settings: str, program: Program, paired: bool) -> None:
    for width in (5, 64, 1030):
        given = with_specials(9, width), drawn(9, seed=1), drawn(9, seed=2), drawn(9, width, seed=3)
        check_program(program, given)
        # A few short rows are one long one.
        assert bool(pairs_of(program, *given)) == paired or width == 5


def exponentials(*results: int) -> Program:
    """exp(x − m), its sum over columns, and the quotient."""
    nodes = (
        load(0, F32),
        load(1, F32),
        compute("sub", F32, 0, 1),
        compute("exp", F32, 2),
        reduce("sum", F32, 3, 1),
        compute("div", F32, 3, 4),
    )
    outputs = tuple(output(n, 0, 1) if n != 4 else output(4, 0) for n in results)
    return Program(2, (tensor(F32, 0, 1), tensor(F32, 0)), nodes, outputs)


@pytest.mark.parametrize("results", [(4,), (5,), (3, 4, 5)], ids=str)
def test_exponentials_and_their_sums(settings: str, results: tuple[int, ...]) -> None:
    for width in WIDTHS:
        program = exponentials(*results)
        given = drawn(9, width), drawn(9, seed=1)
        check_program(program, given)
        wanted = ("sub_exp", "sum") in pairs_of(program, *given)
        assert wanted or width == 1 or 3 in results
        check_program(program, (with_specials(9, width), drawn(9, seed=1)))


@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes(settings: str, op: str) -> None:
    """Of each place in a row, the one where the extreme or NaN is."""
    program = Program(
        2, (tensor(F32, 0, 1),), (load(0, F32), reduce(op, F32, 0, 1)), (output(1, 0),)
    )
    for width in WIDTHS[:-2]:
        for value in (math.nan, math.inf, -math.inf, 9.0, -9.0):
            x = drawn(1, width).expand(width, width).clone()
            x.fill_diagonal_(value)
            check_program(program, (x,))
    for width in WIDTHS[-2:]:
        check_program(program, (with_specials(17, width),))
        check_program(program, (torch.full((3, width), -math.inf),))
    check_program(program, (drawn(7, 300)[:, ::2],))
    check_program(program, (drawn(7, 1).expand(7, 100),))


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def weighted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight) + 0 * bias.sum()


def group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    channels = x.shape[1]
    return F.group_norm(x[..., None], 1, weight[:1].expand(channels), bias[:1].expand(channels))


def softmax(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def log_softmax(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, -1)


def batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x[..., None].expand(*x.shape, 66), bias, weight.abs() + 1, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6) + bias


COMPUTED = list(
    itertools.product(
        [layer_norm, weighted, group_norm, batch_norm, softmax, log_softmax, rms_norm],
        [torch.float32, torch.float64, torch.float16, torch.bfloat16],
    )
)


@pytest.mark.parametrize(
    ("function", "dtype", "settings"),
    in_turn(SETTINGS, COMPUTED, (f"{one.__name__}-{dtype}" for one, dtype in COMPUTED)),
    indirect=["settings"],
)
def test_as_eager(settings: str, function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    compiled = magjit.compile(function, backend="dvm")
    for rows, width in ((1, 64), (3, 1), (9, 77), (5, 1024), (2, 5003), (0, 64)):
        x, weight, bias = (
            one.to(dtype) for one in (drawn(rows, width), drawn(width), drawn(width, seed=1))
        )
        with torch.no_grad():
            got, wanted = compiled(x, weight, bias), function(x, weight, bias)
        # Eager multiplies out what batch norm subtracts.
        absolute = 0.02 if function is batch_norm and dtype.itemsize == 2 else None
        relative = None if absolute is None else 0.02
        torch.testing.assert_close(got, wanted, rtol=relative, atol=absolute)
        assert got.stride() == wanted.stride()


@pytest.mark.parametrize("function", [layer_norm, softmax, rms_norm])
def test_rows_of_nan_and_inf(settings: str, function: Callable[..., torch.Tensor]) -> None:
    compiled = magjit.compile(function, backend="dvm")
    for width in (64, 130, 1000):
        x, weight, bias = with_specials(17, width), drawn(width), drawn(width, seed=1)
        x[x.abs() > 1e38] = 30.0  # whose squares overflow
        with torch.no_grad():
            got, wanted = compiled(x, weight, bias), function(x, weight, bias)
        torch.testing.assert_close(got, wanted, equal_nan=True, rtol=2e-5, atol=2e-5)


def rows_far_from_zero() -> dict[str, torch.Tensor]:
    first = drawn(5, 1000)
    first[:, :64] += 1e3
    return {
        "a large mean": drawn(5, 1000) + 1e4,
        "the first ones are elsewhere": first,
        "a ramp": torch.linspace(-3, 9, 1000) * drawn(5, 1) + 100,
        "one level, then another": drawn(5, 1000) + 1e3 * (torch.arange(1000) > 500),
        "equal": torch.full((5, 1000), 0.1),
    }


@pytest.mark.parametrize("name", rows_far_from_zero())
def test_norms_far_from_zero(name: str) -> None:
    """As near to the exact result as eager is, or to a few units of the input's last place."""
    x = rows_far_from_zero()[name]
    ones, zeros = torch.ones(1000), torch.zeros(1000)
    with torch.no_grad():
        got = magjit.compile(layer_norm, backend="dvm")(x, ones, zeros).double()
        theirs = layer_norm(x, ones, zeros).double()
    exact = layer_norm(x.double(), ones.double(), zeros.double())
    spread = (x.double().var(-1, correction=0) + 1e-5).sqrt()[:, None]
    unit = 2**-23 * x.double().abs().amax(-1, keepdim=True) / spread
    allowed = torch.maximum((theirs - exact).abs().amax(-1, keepdim=True), unit) + 2e-6
    assert bool(((got - exact).abs() <= allowed).all())


def test_norms_of_large_tensors() -> None:
    """Results that are written past the caches are made in local memory first."""
    with machine((65536, 8192, 64, 1 << 16)):
        for function in (layer_norm, softmax):
            x, weight, bias = drawn(70, 1000), drawn(1000), drawn(1000, seed=1)
            compiled = magjit.compile(function, backend="dvm")
            with torch.no_grad():
                torch.testing.assert_close(compiled(x, weight, bias), function(x, weight, bias))
                text = magjit_dvm.disassemble(compiled, x, weight, bias)
            assert "written past the caches" in text
