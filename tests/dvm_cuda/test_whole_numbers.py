"""Quotients, remainders, powers, sums and running sums, of floats and of whole numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magjit_dvm.cuda.encode import Machine, encode
from magjit_dvm.cuda.functions import elementwise
from magjit_dvm.cuda.ptx import evaluate
from magjit_dvm.cuda.words import BY, Image
from magjit_dvm.instructions import DType
from magjit_dvm.program import Node, NodeKind, Program
from magjit_dvm.vm import NotEncodable
from tests.dvm.checking import cast, compute, load, output, reduce, scan, tensor
from tests.dvm_cuda.agreeing import check_encoders
from tests.dvm_cuda.checking import check_words

F32, F16, BF16, I64, I32, U8, BOOL = (
    *(DType.F32, DType.F16, DType.BF16),
    *(DType.I64, DType.I32, DType.U8, DType.BOOL),
)
DIVIDE = ("floor_div", "trunc_div", "remainder", "fmod")
FEW = Machine(multiprocessors=3)
SHAPES = ((5, 256), (4, 300), (3, 1030), (2, 5000), (2, 40), (3, 33), (1, 7))
"""A warp a row and several, tails, elements that no four are aligned of."""


def number(value: float, dtype: DType = I64) -> Node:
    return Node(NodeKind.CONSTANT, dtype, number=value)


def positions(d: int) -> Node:
    return Node(NodeKind.IOTA, I64, aux=d)


def run(program: Program, *given: torch.Tensor) -> Image:
    check_encoders(program, list(given), FEW)
    image = check_words(program, list(given), FEW)
    assert image is not None
    return image


def firsts(image: Image) -> list[str]:
    return [one.second if one.first == "by" else one.first for one in image.words]


# -- functions --


def applied(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    kind = "f" if a.dtype == np.float32 else "i"
    operands = {"a": a.view(np.uint32), "t": b.view(np.uint32)}
    return evaluate(elementwise(name, kind).lines, operands)["a"].view(a.dtype)


def any_floats(seed: int, count: int = 100_000) -> np.ndarray:
    """Of all exponents, and the special ones."""
    drawn = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint64)
    return drawn.astype(np.uint32).view(np.float32)


SPECIAL = np.array(
    [0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 3.5, -3.5, 1e-45, -1e-45, 3.4e38, -3.4e38, 1e-40],
    np.float32,
)


def pairs_of_floats() -> tuple[np.ndarray, np.ndarray]:
    left, right = np.meshgrid(SPECIAL, SPECIAL)
    near = np.random.default_rng(2).normal(size=(2, 20_000)).astype(np.float32)
    a = np.concatenate([any_floats(0), left.ravel(), 100 * near[0]])
    return a, np.concatenate([any_floats(1), right.ravel(), near[1]])


def equal(found: np.ndarray, wanted: np.ndarray) -> bool:
    """To the bit, but for NaN."""
    same = found.view(np.uint32) == wanted.view(np.uint32)
    return bool((same | (np.isnan(found) & np.isnan(wanted))).all())


def test_fmod_is_exact() -> None:
    """Also of quotients of 277 bits."""
    a, b = pairs_of_floats()
    with np.errstate(all="ignore"):
        assert equal(applied("fmod", a, b), np.fmod(a, b))


def test_remainders_have_the_divisors_sign() -> None:
    a, b = pairs_of_floats()
    with np.errstate(all="ignore"):
        rest = np.fmod(a, b)
        other = (rest != 0) & ((rest < 0) != (b < 0)) & ~np.isnan(rest)
        assert equal(applied("remainder", a, b), np.where(other, rest + b, rest))


def test_floors_of_quotients_are_eagers() -> None:
    a, b = pairs_of_floats()
    wanted = torch.div(torch.from_numpy(a), torch.from_numpy(b), rounding_mode="floor")
    assert equal(applied("floor_div", a, b), wanted.numpy())


@pytest.mark.parametrize("name", DIVIDE)
def test_ints_divide(name: str) -> None:
    drawn = np.random.default_rng(3)
    a = drawn.integers(-(1 << 31), 1 << 31, 50_000).astype(np.int32)
    small = drawn.integers(-50, 50, 25_000)
    b = np.concatenate([small, drawn.integers(1, 1 << 31, 25_000)]).astype(np.int32)
    b[b == 0] = 7
    a[:2], b[:2] = (-(1 << 31), (1 << 31) - 1), -1
    wide, by = torch.from_numpy(a).long(), torch.from_numpy(b).long()
    if name.endswith("div"):
        wanted = torch.div(wide, by, rounding_mode=name.removesuffix("_div"))
    else:
        wanted = getattr(torch, name)(wide, by)
    assert (applied(name, a, b) == wanted.numpy().astype(np.int32)).all()


def test_powers_of_ints() -> None:
    drawn = np.random.default_rng(4)
    a = drawn.integers(-(1 << 31), 1 << 31, 50_000).astype(np.int32)
    a[:20_000] = drawn.integers(-3, 4, 20_000)
    b = drawn.integers(-3, 40, 50_000).astype(np.int32)
    wanted = torch.pow(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    assert (applied("pow", a, b) == wanted).all()


# -- words --


@pytest.mark.parametrize("name", [one for one in BY if one[2:] in DIVIDE])
def test_words(name: str, way: str) -> None:
    """With tensors, with a number on either side, with itself."""
    kind, _, op = name.partition(".")
    dtype = F32 if kind == "f" else I32
    drawn = torch.Generator().manual_seed(5)
    x, y = (torch.randint(1, 90, (3, 70), generator=drawn).to(dtype.torch) for _ in range(2))
    x[0] *= -1
    inputs = tensor(dtype, 0, 1), tensor(dtype, 0, 1)
    nodes = [load(0, dtype), load(1, dtype), number(7, dtype)]
    pairs = ((0, 1), (1, 0), (0, 2), (2, 1), (0, 0))
    nodes += [compute(op, dtype, *pair) for pair in pairs]
    outputs = tuple(output(3 + k, 0, 1) for k in range(len(pairs)))
    image = run(Program(2, inputs, tuple(nodes), outputs), x, y)
    assert firsts(image).count(name) == len(pairs)


@pytest.mark.parametrize("op", DIVIDE)
def test_positions_divide(op: str, way: str) -> None:
    """As blocks of positions are numbered."""
    nodes = (positions(1), number(16), compute(op, I64, 0, 1), load(0, F32), cast(F32, 2))
    nodes = (*nodes, compute("add", F32, 3, 4))
    outputs = output(5, 0, 1), output(2, 1)
    given = torch.randn(3, 100)
    image = run(Program(2, (tensor(F32, 0, 1),), nodes, outputs), given)
    assert f"i.{op}" in firsts(image)


@pytest.mark.parametrize("op", ["shift_left", "shift_right"])
def test_positions_shift(op: str) -> None:
    nodes = (positions(0), number(3), compute(op, I64, 0, 1), load(0, I32), cast(I64, 3))
    nodes = (*nodes, compute("add", I64, 2, 4), cast(I32, 2))
    program = Program(1, (tensor(I32, 0),), nodes[:3] + nodes[3:4] + nodes[6:], (output(4, 0),))
    run(program, torch.ones(300, dtype=torch.int32))


@pytest.mark.parametrize(("low", "high"), [(0, 5), (-3, 0), (-2, 7)])
def test_a_divisor_that_may_be_0_is_atens(low: int, high: int) -> None:
    """Of int64, whatever eager mode makes of it."""
    nodes = [positions(0), number(low), number(high - low)]
    nodes += [compute("minimum", I64, 0, 2), compute("add", I64, 3, 1)]
    nodes += [number(100), compute("floor_div", I64, 5, 4), cast(F32, 6), load(0, F32)]
    nodes += [compute("add", F32, 7, 8)]
    program = Program(1, (tensor(F32, 0),), tuple(nodes), (output(9, 0),))
    check_encoders(program, [torch.randn(50)], FEW)
    with pytest.raises(NotEncodable, match="32 bits"):
        encode(program, [torch.randn(50)], FEW)


# -- sums of ints --


def counted(dtype: DType, over: int = 1) -> Program:
    """How much there is of each row, and what that is a part of."""
    nodes = [load(0, dtype), cast(I64, 0), reduce("sum", I64, 1, over), load(1, F32)]
    nodes += [cast(F32, 2), compute("add", F32, 3, 4)]
    inputs = tensor(dtype, 0, 1), tensor(F32, 0, 1)
    return Program(2, inputs, tuple(nodes), (output(2, 1 - over), output(5, 0, 1)))


@pytest.mark.parametrize("dtype", [BOOL, U8])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 40_000)])
def test_counts(shape: tuple[int, int], dtype: DType, way: str) -> None:
    drawn = torch.Generator().manual_seed(sum(shape))
    most = 2 if dtype is BOOL else 256
    given = torch.randint(0, most, shape, generator=drawn).to(dtype.torch)
    image = run(counted(dtype), given, torch.randn(shape))
    assert {"row.i.sum", "red.i.sum"} & set(firsts(image))


def test_sums_that_32_bits_may_not_hold() -> None:
    given = torch.ones(2, 300, dtype=torch.int32), torch.randn(2, 300)
    check_encoders(counted(I32), list(given), FEW)
    with pytest.raises(NotEncodable, match="32 bits"):
        encode(counted(I32), list(given), FEW)


@pytest.mark.parametrize("op", ["max", "min"])
def test_the_largest_of_int64(op: str, way: str) -> None:
    """Where it is compared with a number, it need not be held."""
    nodes = [load(0, I64), reduce(op, I64, 0, 1), number(9), compute("gt", BOOL, 1, 2)]
    program = Program(2, (tensor(I64, 0, 1),), tuple(nodes), (output(3, 0),))
    drawn = torch.Generator().manual_seed(6)
    given = torch.randint(-(1 << 62), 1 << 62, (9, 70), generator=drawn)
    given[::2] = torch.randint(-20, 20, (5, 70), generator=drawn)
    run(program, given)
    stored = Program(2, program.inputs, program.nodes, (output(1, 0),))
    check_encoders(stored, [given], FEW)
    with pytest.raises(NotEncodable, match="32 bits"):
        encode(stored, [given], FEW)


# -- running results --


def running(op: str, dtype: DType, along: int = 1) -> Program:
    """With what a row makes of it in the end."""
    wide = F32 if dtype in (F32, F16, BF16) else I64
    nodes = [load(0, dtype), cast(wide, 0), scan(op, wide, 1, along)]
    nodes += [cast(dtype if wide is F32 else I64, 2)]
    return Program(2, (tensor(dtype, 0, 1),), tuple(nodes), (output(3, 0, 1),))


@pytest.mark.parametrize("dtype", [F32, F16, BF16, BOOL, U8])
@pytest.mark.parametrize("shape", SHAPES)
def test_running_sums(shape: tuple[int, int], dtype: DType, way: str) -> None:
    drawn = torch.Generator().manual_seed(sum(shape))
    if dtype in (BOOL, U8):
        given = torch.randint(0, 2 if dtype is BOOL else 256, shape, generator=drawn)
    else:
        given = torch.randint(-4, 5, shape, generator=drawn) / 4
    image = run(running("cumsum", dtype), given.to(dtype.torch))
    kind = "i" if dtype in (BOOL, U8) else "f"
    assert f"row.{kind}.cumsum" in firsts(image)


@pytest.mark.parametrize("shape", SHAPES)
def test_running_products(shape: tuple[int, int], way: str) -> None:
    drawn = torch.Generator().manual_seed(sum(shape))
    given = 1 + torch.randint(-1, 2, shape, generator=drawn) / 1024
    image = run(running("cumprod", F32), given)
    assert "row.f.cumprod" in firsts(image)


def test_running_sums_of_columns(way: str) -> None:
    run(running("cumsum", F32, along=0), torch.randint(-4, 5, (70, 9)) / 4)


def test_running_sums_are_used_further(way: str) -> None:
    """What is behind the middle of a row's sum, of the row normalized by it."""
    nodes = [load(0, F32), scan("cumsum", F32, 0, 1), reduce("sum", F32, 0, 1)]
    nodes += [compute("div", F32, 1, 2), number(0.5, F32), compute("gt", BOOL, 3, 4)]
    nodes += [compute("mul", F32, 3, 0)]
    outputs = output(5, 0, 1), output(6, 0, 1)
    program = Program(2, (tensor(F32, 0, 1),), tuple(nodes), outputs)
    run(program, torch.randint(1, 3, (5, 256)).float())


def test_of_one_element_they_are_it() -> None:
    image = run(running("cumsum", F32), torch.randn(30, 1))
    assert not any("cum" in one for one in firsts(image))


def test_of_nothing_there_is_nothing() -> None:
    for shape in ((3, 0), (0, 3)):
        given = torch.empty(shape)
        assert encode(running("cumsum", F32), [given], FEW).image is None
        check_encoders(running("cumsum", F32), [given], FEW)


def test_running_results_of_long_rows_are_atens() -> None:
    given = torch.randn(1, 60_000)
    check_encoders(running("cumsum", F32), [given], FEW)
    with pytest.raises(NotEncodable, match="long row"):
        encode(running("cumsum", F32), [given], FEW)


def test_running_products_of_ints_are_atens() -> None:
    given = torch.ones(3, 40, dtype=torch.bool)
    check_encoders(running("cumprod", BOOL), [given], FEW)
    with pytest.raises(NotEncodable):
        encode(running("cumprod", BOOL), [given], FEW)
