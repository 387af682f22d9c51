"""Every instruction for every dtype of its row, over shapes and strides of all kinds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from magjit_dvm.instructions import DTYPES, INSTRUCTIONS, DType, Instruction, Kind
from magjit_dvm.program import INDEXED, ONE, Input, InputKind, Node, NodeKind, Program
from tests.dvm.checking import (
    MEDIUM,
    SMALL,
    cast,
    check_program,
    compute,
    in_turn,
    load,
    machine,
    output,
    reduce,
    results_of,
    same,
    scan,
    tensor,
)

F32, F64, I64, BOOL = DType.F32, DType.F64, DType.I64, DType.BOOL
FLOATS = (DType.F32, DType.F64, DType.F16, DType.BF16)
SETTINGS = {"cache": None, "small": SMALL, "medium": MEDIUM}


@pytest.fixture(params=list(SETTINGS))
def settings(request: pytest.FixtureRequest) -> Iterator[str]:
    with machine(SETTINGS[request.param]):
        yield request.param


# -- values --


def special_values(dtype: DType) -> torch.Tensor:
    """What goes wrong first: ends of the range, signs, denormals, halves, NaN."""
    if dtype is BOOL:
        return torch.tensor([False, True])
    if dtype not in FLOATS:
        limits = torch.iinfo(dtype.torch)
        values = [0, 1, 2, 3, 7, 100, limits.max, limits.max - 1, limits.min]
        values += [] if dtype is DType.U8 else [-1, -2, -7, -100, limits.min + 1]
        return torch.tensor(values, dtype=dtype.torch)
    limits = torch.finfo(dtype.torch)
    ends = [limits.max, limits.tiny, limits.smallest_normal * limits.eps, limits.tiny / 2]
    usual = [0.0, 0.25, 0.5, 1.0, 1.5, 2.5, 3.0, 0.1, 0.7, 1e-3, 10.0, 88.0, 104.0, 1000.0, 6e4]
    values = [*usual, *ends, math.inf, math.pi, math.e, 1 + limits.eps, 1 - limits.eps]
    values = [*values, *(-one for one in values), math.nan]
    return torch.tensor(values, dtype=torch.float64).to(dtype.torch)


def ordinary(dtype: DType, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    if dtype is BOOL:
        return torch.randint(0, 2, shape, generator=made).bool()
    if dtype not in FLOATS:
        low = 0 if dtype is DType.U8 else -50
        return torch.randint(low, 50, shape, generator=made).to(dtype.torch)
    return (torch.randn(shape, generator=made, dtype=torch.float64) * 2).to(dtype.torch)


# -- shapes: each operand's dims and how it lies in memory --

Layout = Callable[[DType, tuple[int, ...], int], torch.Tensor]


def contiguous(dtype: DType, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return ordinary(dtype, shape, seed)


def transposed(dtype: DType, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return ordinary(dtype, shape[::-1], seed).permute(*reversed(range(len(shape))))


def sliced(dtype: DType, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    whole = ordinary(dtype, tuple(3 * n + 2 for n in shape), seed)
    return whole[tuple(slice(2, 2 + 3 * n, 3) for n in shape)]


def shifted(dtype: DType, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    whole = ordinary(dtype, tuple(n + 1 for n in shape), seed)
    return whole[tuple(slice(1, 1 + n) for n in shape)]


def expanded(dtype: DType, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return ordinary(dtype, (1, *shape[1:]), seed).expand(shape)


def overlapping(dtype: DType, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return ordinary(dtype, (sum(shape) + 1,), seed).as_strided(shape, [1] * len(shape))


LAYOUTS: tuple[Layout, ...] = (contiguous, transposed, sliced, shifted, expanded, overlapping)

LINES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 1000, 2100, 5003)
SHAPES = ((3, 5), (5, 40), (64, 33), (1, 70), (70, 1), (2, 1100), (300, 3), (0, 4), (4, 0))
CUBES = ((3, 4, 5), (2, 33, 40), (5, 1, 7), (2, 3, 129), (40, 3, 2))
ROW, COLUMN, NUMBER = (1,), (0,), ()


def operand_dims(count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Full operands, and each one as a row, a column and an element."""
    yield ((0, 1),) * count
    for at, dims in itertools.product(range(count), (ROW, COLUMN, NUMBER)):
        if count > 1:
            yield tuple(dims if k == at else (0, 1) for k in range(count))
    if count > 1:
        yield (ROW, *((COLUMN,) * (count - 1)))
    if count > 2:
        yield ((0, 1), ROW, COLUMN)
        yield (NUMBER, (0, 1), NUMBER)


def operand_dtypes(one: Instruction, dtype: DType) -> tuple[DType, ...]:
    if one.name == "select":
        return (BOOL, dtype, dtype)
    return (dtype,) * one.kind.operands


def program_of(one: Instruction, dtype: DType, dims: tuple[tuple[int, ...], ...]) -> Program:
    dtypes = operand_dtypes(one, dtype)
    inputs = tuple(tensor(of, *at) for of, at in zip(dtypes, dims, strict=True))
    loads = tuple(load(k, of) for k, of in enumerate(dtypes))
    rank = max((d + 1 for at in dims for d in at), default=0)
    node = compute(one.name, one.result(dtype), *range(len(loads)))
    return Program(rank, inputs, (*loads, node), (output(len(loads), *range(rank)),))


COMPUTING = [
    (one, dtype)
    for one in INSTRUCTIONS
    if one.kind in (Kind.UNARY, Kind.BINARY, Kind.TERNARY) and one.name != "cast"
    for dtype in one.dtypes
]
COMPUTING_IDS = [f"{one.name}-{dtype.text}" for one, dtype in COMPUTING]

# Correctly rounded by definition, so that there is one answer.
_APPROXIMATE = frozenset(
    one.name
    for one in INSTRUCTIONS
    if "FN(" in one.expression.replace("FN(abs)", "")
    and one.name not in ("floor", "ceil", "trunc", "round")
) | {"floor_div"}
_ULPS = {"pow": 4.0, "tan": 4.0, "silu": 4.0, "sinh": 4.0}
_SLOPES = ("gelu_slope", "gelu_tanh_slope", "silu_slope")


_DIVIDING = ("floor_div", "trunc_div", "remainder", "fmod")


def divides(one: Instruction, dtype: DType) -> bool:
    """Whether 0 as the second operand is an error."""
    return one.name in _DIVIDING and dtype not in FLOATS


def without_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, in whose memory 0 became 3."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    whole[whole == 0] = 3
    return tensor


def check_values(one: Instruction, dtype: DType, args: list[torch.Tensor]) -> None:
    """The machine's results for flat operands against torch's, in wider arithmetic for floats."""
    (got,) = results_of(program_of(one, dtype, ((0,),) * len(args)), args)
    assert one.reference is not None
    wanted = torch.as_tensor(one.reference(*args)).to(one.result(dtype).torch)
    fine = same(got, wanted)
    if one.name in _APPROXIMATE and dtype in (F32, F64):
        wide = one.reference(*(arg.double() for arg in args))
        if one.name == "sub_exp":
            wide = (args[0] - args[1]).double().exp()
        if one.name in ("gelu", "gelu_tanh"):
            # The tail is a difference of numbers near 1, times the operand.
            fine |= (got.double() - wide).abs() <= 4 * torch.finfo(dtype.torch).eps * args[0].abs()
        if one.name in _SLOPES:  # which have zeros; torch multiplies x by 1 − tanh²
            least = 2 if dtype is F32 else 4 + 4 * args[0].abs()
            fine |= (got.double() - wide).abs() <= torch.finfo(dtype.torch).eps * least
        fine |= distance(got, wide) <= _ULPS.get(one.name, 3.0)
        # Where torch's own answer is further off than ours, ours stands.
        if dtype is F32:
            fine |= distance(got, wide) <= distance(wanted, wide)
        if dtype is F64 and one.name in ("fmod", "remainder"):
            # Where the quotient overflows, torch's own is NaN.
            fine |= (args[0] / args[1]).isinf() & got.isfinite()
    bad = (~fine).nonzero().flatten().tolist()
    rows = [(*(arg[k].item() for arg in args), got[k].item(), wanted[k].item()) for k in bad[:6]]
    assert not bad, f"{len(bad)} of {got.numel()}: operands, ours, torch's: {rows}"


def distance(got: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """How many units in the last place of ``got``'s dtype lie between it and ``wide``."""
    narrow = wide.to(got.dtype)
    infinite = torch.full_like(narrow, math.inf)
    unit = (torch.nextafter(narrow.abs(), infinite) - narrow.abs()).double()
    apart = (got.double() - wide.double()).abs() / unit
    limit = torch.finfo(got.dtype).max
    over = (wide.abs() > limit) & (got == narrow)
    return torch.where(over | (got == narrow), 0.0, apart).nan_to_num(math.inf, math.inf)


@pytest.mark.parametrize(("one", "dtype"), COMPUTING, ids=COMPUTING_IDS)
def test_special_values(one: Instruction, dtype: DType) -> None:
    dtypes = operand_dtypes(one, dtype)
    grids = torch.meshgrid(*(torch.arange(len(special_values(of))) for of in dtypes), indexing="ij")
    args = [special_values(of)[at.flatten()] for of, at in zip(dtypes, grids, strict=True)]
    if divides(one, dtype):
        args = [arg[args[1] != 0] for arg in args]
    check_values(one, dtype, args)


@pytest.mark.parametrize(("one", "dtype"), COMPUTING, ids=COMPUTING_IDS)
def test_ordinary_values(one: Instruction, dtype: DType) -> None:
    dtypes = operand_dtypes(one, dtype)
    for seed, scale in enumerate((1, 1, 8, 40)):
        args = [ordinary(of, (4099,), seed * 9 + k) for k, of in enumerate(dtypes)]
        if dtype in (F32, F64):
            args = [arg if arg.dtype is torch.bool else arg * scale for arg in args]
        if divides(one, dtype):
            without_zeros(args[1])
        check_values(one, dtype, args)


@pytest.mark.parametrize(
    ("one", "dtype", "settings"), in_turn(SETTINGS, COMPUTING, COMPUTING_IDS), indirect=["settings"]
)
def test_shapes(one: Instruction, dtype: DType, settings: str) -> None:
    dtypes = operand_dtypes(one, dtype)
    exact = one.name not in _APPROXIMATE

    def check(dims: tuple[tuple[int, ...], ...], shape: tuple[int, ...], first: int) -> None:
        args = []
        for k, (of, at) in enumerate(zip(dtypes, dims, strict=True)):
            layout = LAYOUTS[(first + k) % len(LAYOUTS)] if at else contiguous
            args.append(layout(of, tuple(shape[d] for d in at), first + k))
        if divides(one, dtype):
            without_zeros(args[1])
        # One bytecode in three is interpreted in Python too: it costs milliseconds.
        bytecode = (first + len(shape)) % 3 == 0 and settings != "cache"
        check_program(program_of(one, dtype, dims), args, exact=exact, bytecode=bytecode)

    for first, length in enumerate(LINES):
        check(((0,),) * len(dtypes), (length,), first)
    everything = itertools.product(operand_dims(len(dtypes)), SHAPES)
    for first, (dims, shape) in enumerate(everything):
        # Another broadcast operand's size 0 would be one that nothing has.
        if all(0 not in shape or len(at) == 2 for at in dims):
            check(dims, shape, first)
    for first, shape in enumerate(CUBES):
        check(((0, 1, 2),) * len(dtypes), shape, first)
        if len(dtypes) > 1:
            check(((1, 2), *(((0, 1, 2),) * (len(dtypes) - 1))), shape, first)
            check(((0, 2), *(((1,),) * (len(dtypes) - 1))), shape, first)


@pytest.mark.parametrize("name", _DIVIDING)
@pytest.mark.parametrize("dtype", [I64, DType.I32, DType.U8], ids=lambda one: one.text)
def test_zero_divides_nothing(name: str, dtype: DType, settings: str) -> None:
    """One 0 anywhere is an error, as a tile, a row, a column and an element."""
    for shape, dims in itertools.product(((1, 1), (3, 70), (300, 3), (2, 5000)), ((0, 1), ROW)):
        nodes = (load(0, dtype), load(1, dtype), compute(name, dtype, 0, 1))
        inputs = (tensor(dtype, 0, 1), tensor(dtype, *dims))
        program = Program(2, inputs, nodes, (output(2, 0, 1),))
        divisor = torch.full([shape[d] for d in dims], 2, dtype=dtype.torch)
        given = ordinary(dtype, shape, 1)
        check_program(program, [given, divisor], exact=True, bytecode=False)
        divisor.view(-1)[divisor.numel() // 2] = 0
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            program.compiled()(given, divisor)


# -- casts --

PAIRS = list(itertools.product(DTYPES, DTYPES))


def in_range(values: torch.Tensor, to: DType) -> torch.Tensor:
    """Those that torch defines the cast of: an int cannot hold other floats."""
    if to in FLOATS or to is BOOL or not values.dtype.is_floating_point:
        return values
    limits = torch.iinfo(to.torch)
    wide = values.double()
    return values[(wide > limits.min - 1.0) & (wide < limits.max + 1.0) & (wide.abs() < 2.0**62)]


@pytest.mark.parametrize(("of", "to"), PAIRS, ids=[f"{a.text}-{b.text}" for a, b in PAIRS])
def test_casts(of: DType, to: DType) -> None:
    values = torch.cat([special_values(of), ordinary(of, (4099,), 3)])
    if of in FLOATS:
        wide = torch.randn(4099, dtype=torch.float64).mul(11).exp2()
        values = torch.cat([values, wide.to(of.torch), halfway(of)])
    values = in_range(values, to)
    for inputs in (values, values[1:], values.repeat_interleave(2)[::2]):
        program = Program(1, (tensor(of, 0),), (load(0, of), cast(to, 0)), (output(1, 0),))
        (got,) = results_of(program, [inputs])
        wanted = inputs.to(to.torch)
        bad = (~same(got, wanted)).nonzero().flatten().tolist()
        rows = [(inputs[k].item(), got[k].item(), wanted[k].item()) for k in bad[:5]]
        assert not bad, f"{len(bad)}: value, ours, torch's: {rows}"
        if to in FLOATS:
            zero = wanted == 0
            assert torch.equal(got[zero].signbit(), wanted[zero].signbit())


def halfway(of: DType) -> torch.Tensor:
    """Floats between two neighbours of half precision, and on both sides of the middle."""
    found = []
    for narrow in (torch.float16, torch.bfloat16):
        bits = torch.arange(0, 1 << 16, 7, dtype=torch.int32).to(torch.int16)
        low = bits.view(narrow)
        low = low[low.isfinite()]
        high = torch.nextafter(low.float(), torch.tensor(math.inf))
        middle = (low.double() + high.to(narrow).double()) / 2
        found += [low.double(), middle, middle * (1 + 2.0**-22), middle * (1 - 2.0**-22)]
    return torch.cat(found).to(of.torch)


@pytest.mark.parametrize("narrow", [DType.F16, DType.BF16], ids=lambda one: one.text)
def test_every_half(narrow: DType) -> None:
    """All 65,536 bit patterns there and back; what lies halfway rounds to even."""
    given = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(narrow.torch)
    nodes = (load(0, narrow), cast(F32, 0), cast(narrow, 1))
    program = Program(1, (tensor(narrow, 0),), nodes, (output(1, 0), output(2, 0)))
    wide, back = results_of(program, [given])
    assert bool(same(wide, given.float()).all())
    assert torch.equal(back.isnan(), given.isnan())
    fine = ~given.isnan()
    assert torch.equal(back.view(torch.int16)[fine], given.view(torch.int16)[fine])
    values = halfway(F32)
    program = Program(1, (tensor(F32, 0),), (load(0, F32), cast(narrow, 0)), (output(1, 0),))
    (rounded,) = results_of(program, [values])
    assert bool(same(rounded, values.to(narrow.torch)).all())


# -- reductions --

REDUCING = [(one, dtype) for one in INSTRUCTIONS if one.kind is Kind.REDUCE for dtype in one.dtypes]
REDUCED: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    *(((length,), (0,)) for length in LINES),
    *(((3, length), (1,)) for length in LINES),
    *(((length, 3), (0,)) for length in LINES),
    *(((length, 65), (0,)) for length in (2, 9, 64, 700)),
    *(((length, 70), (1,)) for length in (2, 9, 64, 700)),
    ((1, 40), (0,)),
    ((40, 1), (1,)),
    ((33, 40), (0, 1)),
    ((4, 5, 6), (0,)),
    ((4, 5, 6), (1,)),
    ((4, 5, 6), (2,)),
    ((4, 5, 6), (0, 2)),
    ((40, 5, 60), (0, 2)),
    ((4, 50, 60), (0, 1)),
    ((4, 50, 60), (1, 2)),
    ((7, 1, 200), (0, 2)),
    ((5, 130, 3), (1,)),
    ((3, 4, 5, 6), (1, 3)),
    ((3, 4, 5, 6), (0, 2)),
    ((3, 4, 5, 6), (0, 1, 2, 3)),
    ((2, 3, 2, 3, 2), (0, 2, 4)),
    ((2, 3, 2, 3, 2), (1, 3)),
)


@pytest.mark.parametrize(
    ("one", "dtype"), REDUCING, ids=[f"{one.name}-{dtype.text}" for one, dtype in REDUCING]
)
def test_reductions(one: Instruction, dtype: DType, settings: str) -> None:
    layouts = (contiguous, transposed, sliced, shifted, expanded)
    for number, (shape, dims) in enumerate(REDUCED):
        rank = len(shape)
        kept = [d for d in range(rank) if d not in dims]
        program = Program(
            rank,
            (tensor(dtype, *range(rank)),),
            (load(0, dtype), reduce(one.name, dtype, 0, *dims)),
            (output(1, *(d if d in kept else ONE for d in range(rank))), output(1, *kept)),
        )
        given = layouts[number % len(layouts)](dtype, shape, number)
        if one.name == "prod" and dtype in FLOATS:
            given = (given * 0.02 + 1).to(dtype.torch)
        exact = one.name in ("max", "min") or dtype not in FLOATS
        check_program(program, [given], exact=exact, bytecode=number % 3 == 0)


SCANS = [(one, dtype) for one in INSTRUCTIONS if one.kind is Kind.SCAN for dtype in one.dtypes]


@pytest.mark.parametrize(
    ("one", "dtype"), SCANS, ids=[f"{one.name}-{dtype.text}" for one, dtype in SCANS]
)
def test_running_results(one: Instruction, dtype: DType, settings: str) -> None:
    """Along each dimension, beside a reduction of it, and again of what that gives."""
    layouts = (contiguous, transposed, sliced, shifted)
    cases = [(shape, dims[0]) for shape, dims in REDUCED if len(dims) == 1]
    for number, (shape, dim) in enumerate(cases):
        dims = range(len(shape))
        kept = [d for d in dims if d != dim]
        nodes = (
            load(0, dtype),
            scan(one.name, dtype, 0, dim),
            reduce("max", dtype, 1, dim),
            compute("sub", dtype, 1, 2),
            scan("cumsum", dtype, 3, dim),
        )
        given = layouts[number % len(layouts)](dtype, shape, number)
        if one.name == "cumprod" and dtype in FLOATS:
            given = (given * 0.02 + 1).to(dtype.torch)
        outputs = (output(1, *dims), output(4, *dims), output(2, *kept))
        program = Program(len(shape), (tensor(dtype, *dims),), nodes, outputs)
        check_program(program, [given], bytecode=number % 3 == 0)
        simple = Program(len(shape), (tensor(dtype, *dims),), nodes[:2], (output(1, *dims),))
        (got,) = check_program(simple, [given], exact=True, bytecode=number % 3 == 1)
        wanted = getattr(torch, one.name)(given, dim)
        assert bool(same(got, wanted).all()), "not in eager's order"


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=lambda one: one.text)
def test_reductions_of_special_values(op: str, axis: int, dtype: DType) -> None:
    """NaN and infinities at every place of lines longer than a vector, and than a step."""
    for length in (1, 3, 64, 129, 1500):
        for value in (math.nan, math.inf, -math.inf, -0.0):
            lines = torch.zeros(13, length, dtype=dtype.torch)
            places = torch.linspace(0, length - 1, 13).long()
            lines[torch.arange(13), places] = value
            given = lines.t().contiguous() if axis == 0 else lines
            program = Program(
                2,
                (tensor(dtype, 0, 1),),
                (load(0, dtype), reduce(op, dtype, 0, axis)),
                (output(1, 1 - axis),),
            )
            with machine(SMALL):
                check_program(program, [given], exact=True, bytecode=length < 100)


@pytest.mark.parametrize("shape", [(4096, 2), (2, 4096), (100_000, 3), (3, 100_000), (700, 700)])
def test_sums_are_as_exact_as_torchs(shape: tuple[int, int]) -> None:
    """A constant is the worst case: every rounding goes the same way."""
    for axis, dtype in itertools.product((0, 1), (F32, F64)):
        program = Program(
            2,
            (tensor(dtype, 0, 1),),
            (load(0, dtype), reduce("sum", dtype, 0, axis)),
            (output(1, 1 - axis),),
        )
        for given in (torch.full(shape, 0.1), torch.rand(shape)):
            given = given.to(dtype.torch)
            (got,) = results_of(program, [given])
            wanted = given.double().sum(axis)
            limit = 1.3e-6 if dtype is F32 else 1e-12
            assert float(((got.double() - wanted) / wanted).abs().max()) <= limit


# -- positions, numbers and look-ups --


def test_numbers_and_sizes(settings: str) -> None:
    """Constants, numbers of the call and sizes, as every dtype that computes."""
    for dtype in (F32, F64, I64, DType.I32, DType.U8, BOOL):
        nodes = [
            load(0, dtype),
            Node(NodeKind.CONSTANT, dtype, number=1),
            Node(NodeKind.SCALAR, dtype, aux=1),
            Node(NodeKind.NUMEL, dtype, dims=frozenset({0, 1})),
            compute("maximum", dtype, 0, 1),
            compute("maximum", dtype, 4, 2),
            compute("minimum", dtype, 5, 3),
        ]
        inputs = (tensor(dtype, 0, 1), Input(InputKind.INT, I64))
        program = Program(2, inputs, tuple(nodes), (output(6, 0, 1),))
        for shape in ((3, 5), (1, 4), (70, 3), (1, 1)):
            check_program(program, [ordinary(dtype, shape, 1), 3], exact=True)


def test_float_arguments() -> None:
    nodes = (load(0, F32), Node(NodeKind.SCALAR, F32, aux=1), compute("mul", F32, 0, 1))
    inputs = (tensor(F32, 0), Input(InputKind.FLOAT, F64))
    program = Program(1, inputs, nodes, (output(2, 0),))
    for number in (0.1, -0.0, math.inf, math.nan, 1e300, 3):
        check_program(program, [ordinary(F32, (9,), 0), number], exact=True)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_positions(dim: int, settings: str) -> None:
    nodes = (load(0, I64), Node(NodeKind.IOTA, I64, aux=dim), compute("mul", I64, 0, 1))
    program = Program(3, (tensor(I64, 0, 1, 2),), nodes, (output(2, 0, 1, 2),))
    for shape in ((2, 3, 4), (1, 3, 70), (5, 40, 40), (300, 2, 3), (2, 1, 1)):
        for layout in (contiguous, transposed, sliced):
            check_program(program, [layout(I64, shape, 0)], exact=True)


@pytest.mark.parametrize("of", [I64, DType.I32], ids=lambda one: one.text)
@pytest.mark.parametrize(
    "dtype", [F32, F64, I64, DType.I32, DType.U8, BOOL], ids=lambda one: one.text
)
def test_look_ups(of: DType, dtype: DType, settings: str) -> None:
    nodes = (load(0, of), Node(NodeKind.INDEX, dtype, (0,), aux=1), compute("copy", dtype, 1))
    program = Program(
        3, (tensor(of, 0, 1), tensor(dtype, INDEXED, 2)), nodes, (output(2, 0, 1, 2),)
    )
    for shape, width in (((3, 4), 5), ((1, 7), 33), ((40, 2), 1), ((2, 3), 1500), ((9, 1), 64)):
        for layout in (contiguous, transposed, sliced):
            at = layout(of, shape, 1).abs() % 11
            check_program(program, [at, layout(dtype, (11, width), 2)], exact=True)


def test_look_ups_out_of_bounds() -> None:
    nodes = (load(0, I64), Node(NodeKind.INDEX, F32, (0,), aux=1))
    program = Program(2, (tensor(I64, 0), tensor(F32, INDEXED, 1)), nodes, (output(1, 0, 1),))
    table = torch.randn(5, 3)
    for wrong in (5, -1, 1 << 40, -(1 << 62)):
        for length in (1, 3, 40_000):
            at = torch.zeros(length, dtype=torch.int64)
            at[length // 2] = wrong
            with pytest.raises(IndexError):
                program.compiled()(at, table)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda one: one.text)
def test_layouts_of_copies(dtype: DType, settings: str) -> None:
    """Memory instructions alone: from every layout to results in every order."""
    for shape in ((3, 4, 5), (40, 33, 2), (2, 65, 70), (1, 9, 1), (0, 3, 2)):
        for layout, order in itertools.product(LAYOUTS, itertools.permutations(range(3))):
            nodes = (load(0, dtype), compute("copy", dtype, 0))
            outputs = (output(1, 0, 1, 2, order=order), output(1, 2, 0, 1), output(0, 0, 1, 2))
            program = Program(3, (tensor(dtype, 0, 1, 2),), nodes, outputs)
            given = layout(dtype, shape, 5)
            check_program(program, [given], exact=True, bytecode=order == (2, 0, 1))
