"""Words of the GPU's encoder mean what the program means, for all shapes and strides."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from magjit_dvm.cuda.encode import Machine, encode
from magjit_dvm.cuda.functions import FLOATS, INTS
from magjit_dvm.cuda.words import divisor
from magjit_dvm.instructions import INSTRUCTIONS, DType, Kind
from magjit_dvm.program import Input, InputKind, Node, NodeKind, Program
from magjit_dvm.vm import NotEncodable
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm.test_fuzz import check_seed
from tests.dvm_cuda.checking import BIG, SMALL, check_words

F32, F16, BF16, I32 = DType.F32, DType.F16, DType.BF16, DType.I32
U8, BOOL, I64 = DType.U8, DType.BOOL, DType.I64


def values(dtype: DType, *shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    if dtype is BOOL:
        return torch.randint(0, 2, shape, generator=made).bool()
    if dtype in (I32, U8, I64):
        low = 0 if dtype is U8 else -90
        return torch.randint(low, 90, shape, generator=made).to(dtype.torch)
    return (torch.randn(shape, generator=made) * 2).to(dtype.torch)


def softmax(dtype: DType = F32) -> Program:
    nodes = [load(0, dtype)]
    if dtype is not F32:
        nodes.append(cast(F32, 0))
    x = len(nodes) - 1
    nodes += [
        reduce("max", F32, x, 1),
        compute("sub", F32, x, x + 1),
        compute("exp", F32, x + 2),
        reduce("sum", F32, x + 3, 1),
        compute("div", F32, x + 3, x + 4),
    ]
    if dtype is not F32:
        nodes.append(cast(dtype, x + 5))
    last = output(len(nodes) - 1, 0, 1)
    return Program(2, (tensor(dtype, 0, 1),), tuple(nodes), (last, output(x + 4, 0)))


def log_softmax(dtype: DType = F16) -> Program:
    """The logarithm of ``softmax``; for float32 the differences from the largest too."""
    nodes = [load(0, dtype)]
    if dtype is not F32:
        nodes.append(cast(F32, 0))
    x = len(nodes) - 1
    nodes += [
        reduce("max", F32, x, 1),
        compute("sub", F32, x, x + 1),
        compute("exp", F32, x + 2),
        reduce("sum", F32, x + 3, 1),
        compute("log", F32, x + 4),
        compute("sub", F32, x + 2, x + 5),
    ]
    outputs = [output(x + 6, 0, 1)]
    if dtype is not F32:
        nodes.append(cast(dtype, x + 6))
        outputs = [output(x + 7, 0, 1)]
    else:
        outputs.append(output(x + 2, 0, 1))
    return Program(2, (tensor(dtype, 0, 1),), tuple(nodes), tuple(outputs))


def layer_norm(dtype: DType = F16) -> Program:
    def number(value: float) -> Node:
        return Node(NodeKind.CONSTANT, F32, number=value)

    nodes = (
        load(0, dtype),
        cast(F32, 0),
        reduce("sum", F32, 1, 1),
        Node(NodeKind.NUMEL, F32, dims=frozenset({1})),
        compute("div", F32, 2, 3),
        compute("sub", F32, 1, 4),
        compute("mul", F32, 5, 5),
        reduce("sum", F32, 6, 1),
        compute("div", F32, 7, 3),
        number(1e-5),
        compute("add", F32, 8, 9),
        compute("rsqrt", F32, 10),
        compute("mul", F32, 5, 11),
        load(1, dtype),
        cast(F32, 13),
        compute("mul", F32, 12, 14),
        load(2, dtype),
        cast(F32, 16),
        compute("add", F32, 15, 17),
        cast(dtype, 18),
    )
    inputs = (tensor(dtype, 0, 1), tensor(dtype, 1), tensor(dtype, 1))
    return Program(2, inputs, nodes, (output(19, 0, 1), output(4, 0), output(11, 0)))


def _instructions() -> Iterator[tuple[str, DType]]:
    for one in INSTRUCTIONS:
        if one.kind not in (Kind.UNARY, Kind.BINARY, Kind.TERNARY) or one.name == "cast":
            continue
        for dtype in (F32, I32, U8, BOOL):
            known = FLOATS if dtype is F32 else INTS
            if dtype in one.dtypes and (one.name in known or one.name == "select"):
                yield one.name, dtype


_DIVIDING = ("floor_div", "trunc_div", "remainder", "fmod")
"""Of an int by 0, GPUs make anything, and no error."""


@pytest.mark.parametrize(("name", "dtype"), list(_instructions()))
def test_instructions(name: str, dtype: DType) -> None:
    (row,) = (one for one in INSTRUCTIONS if one.name == name)
    count = row.kind.operands
    dtypes = [BOOL, dtype, dtype] if name == "select" else [dtype] * count
    given = [values(one, 5, 700, seed=k) for k, one in enumerate(dtypes)]
    if name.startswith("shift"):
        given[1] = given[1] % 7
    divides = name in _DIVIDING and dtype is not F32
    if divides:
        given[1] = given[1].masked_fill(given[1] == 0, 3)
    # One operand contiguous, one of a row, one transposed; then numbers for all but one.
    given[-1] = given[-1][0] if count > 1 else given[-1]
    if count == 3:
        given[1] = given[1].t().contiguous().t()
    dims = [(1,) if one.dim() == 1 else (0, 1) for one in given]
    inputs = tuple(tensor(one, *d) for one, d in zip(dtypes, dims, strict=True))
    nodes = [load(k, one) for k, one in enumerate(dtypes)]
    nodes.append(compute(name, row.result(dtype), *range(count)))
    check_words(Program(2, inputs, tuple(nodes), (output(count, 0, 1),)), given)
    for place in range(count):
        scalars = [Input(InputKind.FLOAT if one is F32 else InputKind.INT, one) for one in dtypes]
        inputs = tuple(
            tensor(one, 0, 1) if k == place else scalars[k] for k, one in enumerate(dtypes)
        )
        nodes = [
            load(k, one) if k == place else Node(NodeKind.SCALAR, one, aux=k)
            for k, one in enumerate(dtypes)
        ]
        nodes.append(compute(name, row.result(dtype), *range(count)))
        arguments: list[Any] = [1.25 if one is F32 else 1 for one in dtypes]
        arguments[place] = values(dtypes[place], 3, 401)
        if divides and place == 1:
            arguments[place] = arguments[place].masked_fill(arguments[place] == 0, 3)
        program = Program(2, inputs, tuple(nodes), (output(count, 0, 1),))
        if count > 1 and name != "select":
            check_words(program, arguments)


def test_casts() -> None:
    for of in (F32, F16, BF16, I32, U8, BOOL, I64):
        for to in (F32, F16, BF16, I32, U8, BOOL, I64):
            given = values(of, 3, 301)
            if to is U8 and of is not BOOL:
                given = given.abs()
            program = Program(
                2, (tensor(of, 0, 1),), (load(0, of), cast(to, 0)), (output(1, 0, 1),)
            )
            if of is I64 and to in (I64, F16, BF16, U8):
                with pytest.raises(NotEncodable):
                    encode(program, [given], BIG)
                continue
            check_words(program, [given])
            if to in (F16, BF16):  # rounded, and used as such
                nodes = (load(0, of), cast(to, 0), cast(F32, 1))
                if of not in (to, I64):
                    check_words(Program(2, program.inputs, nodes, (output(2, 0, 1),)), [given])


SHAPES = ((1, 1), (3, 1), (1, 3), (4, 7), (5, 64), (2, 255), (3, 256), (2, 1024), (2, 1500))


@pytest.mark.parametrize("machine", [BIG, SMALL], ids=["big", "small"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda one: one.text)
def test_rows(dtype: DType, machine: Machine) -> None:
    for shape in SHAPES:
        x, weight = values(dtype, *shape), values(dtype, shape[1])
        check_words(softmax(dtype), [x], machine)
        check_words(log_softmax(dtype), [x], machine)
        check_words(layer_norm(dtype), [x, weight, weight], machine)


def masked_rms_norm(dtype: DType = F16) -> Program:
    """Of what is positive, with a weight; and the squares' sum."""
    nodes = (
        load(0, dtype),
        cast(F32, 0),
        Node(NodeKind.CONSTANT, F32, number=0.0),
        compute("gt", BOOL, 1, 2),
        compute("select", F32, 3, 1, 2),
        compute("mul", F32, 4, 4),
        reduce("sum", F32, 5, 1),
        Node(NodeKind.NUMEL, F32, dims=frozenset({1})),
        compute("div", F32, 6, 7),
        compute("rsqrt", F32, 8),
        compute("mul", F32, 4, 9),
        load(1, dtype),
        cast(F32, 11),
        compute("mul", F32, 10, 12),
        cast(dtype, 13),
    )
    inputs = (tensor(dtype, 0, 1), tensor(dtype, 1))
    return Program(2, inputs, nodes, (output(14, 0, 1), output(6, 0)))


WIDE = ((12, 2048), (6, 3000), (7, 4096), (3, 8190), (1, 16384), (1, 17001))


@pytest.mark.parametrize("shape", WIDE)
def test_wide_rows_in_one_stage(shape: tuple[int, int]) -> None:
    """R = 64 where too few elements are under way at once with other R."""
    one = Machine(multiprocessors=1)
    for dtype in (F16, BF16):
        x, weight = values(dtype, *shape), values(dtype, shape[1])
        image = check_words(softmax(dtype), [x], one)
        check_words(layer_norm(dtype), [x + 3, weight, weight], one)
        check_words(masked_rms_norm(dtype), [x, weight], one)
        if image is not None:
            assert image.chunks == 1 and image.each == (64 if shape[1] > 4096 else 32)


@pytest.mark.parametrize("shape", [(70, 768), (61, 700), (20, 2304)])
def test_rows_of_three_quarters(shape: tuple[int, int]) -> None:
    """R = 24 where fewest lanes are without elements then."""
    one = Machine(multiprocessors=1)
    for dtype in (F16, BF16, F32):
        x, weight = values(dtype, *shape), values(dtype, shape[1])
        softmaxes = check_words(softmax(dtype), [x], one)
        norms = check_words(layer_norm(dtype), [x + 3, weight, weight], one)
        assert softmaxes is not None and norms is not None
        assert softmaxes.each == norms.each == 24 and norms.weights == 2


def test_exponentials_below_the_largest() -> None:
    for dtype, word in ((F16, "fk.sub_exp_small"), (BF16, "fk.sub_exp_small"), (F32, "fk.sub_exp")):
        image = check_words(softmax(dtype), [values(dtype, 3, 300) * 20])
        assert image is not None and word in [one.second for one in image.words]


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda one: one.text)
def test_differences_from_a_row_value_are_made_again(dtype: DType) -> None:
    """What an exponential and something else use is not saved, but computed where it is used."""
    cols = 1200  # not of one warp, whose exponentials would be made with the largest
    x = values(dtype, 6, cols) * 20
    x[0], x[1, 5], x[2, 7], x[3, 9] = 3.0, float("-inf"), float("nan"), float("inf")
    x[4] = torch.linspace(-11, 0, cols).to(dtype.torch)
    image = check_words(log_softmax(dtype), [x])
    assert image is not None and image.scratch == 0
    names = [one.second for one in image.words]
    assert ("fk.sub_exp" if dtype is F32 else "fk.sub_exp_small") in names
    check_words(log_softmax(dtype), [values(dtype, 2, 31001)], SMALL)


def test_a_difference_that_is_there_is_used() -> None:
    """The exponential of one that is held or saved takes it from there."""
    nodes = (
        load(0, F32),
        reduce("max", F32, 0, 1),
        compute("sub", F32, 0, 1),
        compute("tanh", F32, 2),
        compute("exp", F32, 2),
        compute("mul", F32, 3, 4),
        compute("mul", F32, 5, 2),
    )
    program = Program(2, (tensor(F32, 0, 1),), nodes, (output(2, 0, 1), output(6, 0, 1)))
    for machine in (BIG, SMALL):
        image = check_words(program, [values(F32, 3, 700)], machine)
        assert image is not None and "f.exp" in [one.first for one in image.words]


def test_older_machines_have_fewer_elements_a_lane() -> None:
    older = Machine(multiprocessors=1, shared_bytes=166912, widest=32)
    image = check_words(softmax(F16), [values(F16, 5, 4096)], older)
    assert image is not None and image.each == 32 and image.group == 4


def test_vectors_of_columns_that_are_not_aligned() -> None:
    """A weight from an odd place goes through its descriptor."""
    x, weight = values(F16, 3, 512), values(F16, 520)
    for first, last, word in ((0, 512, "lt.c.f16"), (4, 516, "lt.c.f16"), (1, 513, "lt.e.f16")):
        part = weight[first:last]
        image = check_words(masked_rms_norm(F16), [x, part])
        assert image is not None and word in [one.first for one in image.words]
    image = check_words(masked_rms_norm(F16), [values(F16, 3, 511), weight[:511]])
    assert image is not None and "lt.c.f16" in [one.first for one in image.words]


def test_tiles_stay_where_they_are() -> None:
    """Nothing is saved in scratch memory or loaded twice for a norm or softmax."""
    x, weight = values(F16, 40, 1024), values(F16, 1024)
    for program, given in (
        (softmax(F16), [x]),
        (layer_norm(F16), [x, weight, weight]),
        (masked_rms_norm(F16), [x, weight]),
    ):
        image = check_words(program, given)
        assert image is not None
        names = [one.first for one in image.words]
        kept = names.count("save") + names.count("la.scratch") + names.count("lt.scratch")
        assert image.scratch == 0 or program.nodes[4].op == "select", names
        assert kept <= 2 or program.nodes[4].op == "select", names


def test_long_rows_come_in_chunks() -> None:
    image = check_words(softmax(F16), [values(F16, 2, 31001)], SMALL)
    assert image is not None and image.chunks > 1 and len(image.first) == 2
    image = check_words(layer_norm(F32), [values(F32, 2, 20000), *[values(F32, 20000)] * 2], SMALL)
    assert image is not None and image.chunks > 1


def test_rows_of_several_warps_share_a_stage() -> None:
    image = check_words(softmax(F32), [values(F32, 100, 3000)], Machine(8))
    assert image is not None and image.group == 3 and image.warps > 3 and image.chunks == 1


def _views(dtype: DType) -> Iterator[torch.Tensor]:
    whole = values(dtype, 24, 40)
    yield whole[:, 1:]
    yield whole[1:, 3:]
    yield whole.flatten()[1:937].view(24, 39)
    yield whole.t()
    yield whole[:, ::2]
    yield whole[::3].t()
    yield whole[:1].expand(9, 40)
    yield whole[:, :1].expand(24, 33)
    yield whole.flatten()[3:4].expand(5, 8)


@pytest.mark.parametrize("dtype", [F32, F16, BF16, I32, U8, BOOL], ids=lambda one: one.text)
def test_views(dtype: DType) -> None:
    op = "add" if dtype in (F32, I32, U8) else "copy"
    for x in _views(dtype):
        y = values(dtype, *x.shape)
        inputs = (tensor(dtype, 0, 1), tensor(dtype, 0, 1))
        nodes = [load(0, dtype), load(1, dtype)]
        nodes.append(compute(op, dtype, 0, 1) if op == "add" else compute(op, dtype, 0))
        for order in ((0, 1), (1, 0)):
            out = output(2, 0, 1, order=order)
            check_words(Program(2, inputs, tuple(nodes), (out,)), [x, y])
        if dtype in (F32, F16):
            check_words(softmax(dtype), [x])


def test_column_sums_of_views() -> None:
    nodes = (load(0, F32), reduce("sum", F32, 0, 0))
    program = Program(2, (tensor(F32, 0, 1),), nodes, (output(1, 1),))
    check_words(program, [values(F32, 60, 70)])


def test_nothing_to_compute() -> None:
    program = Program(1, (tensor(F32, 0),), (load(0, F32), compute("neg", F32, 0)), (output(1, 0),))
    encoded = encode(program, [torch.empty(0)], BIG)
    assert encoded.image is None and encoded.layouts[0].sizes == (0,)


def test_what_has_no_words() -> None:
    double = Program(1, (tensor(DType.F64, 0),), (load(0, DType.F64),), (output(0, 0),))
    with pytest.raises(NotEncodable, match="f64"):
        encode(double, [torch.zeros(3, dtype=torch.float64)], BIG)
    total = Program(1, (tensor(I64, 0),), (load(0, I64), reduce("sum", I64, 0, 0)), (output(1),))
    with pytest.raises(NotEncodable, match="an int64"):
        encode(total, [torch.zeros(3, dtype=torch.int64)], BIG)


def test_quotients_by_multiplication() -> None:
    made = random.Random(0)
    for size in (1, 2, 3, 7, 768, 1 << 20, 99991, (1 << 31) - 1):
        magic, shift = divisor(size)
        assert magic < 1 << 32
        near = [0, size - 1, size, 2 * size - 1, (1 << 31) - 1]
        for n in (*near, *(made.randrange(1 << 31) for _ in range(200))):
            if n < 1 << 31:
                assert ((n * magic >> 32) + n) >> shift == n // size
    with pytest.raises(ValueError, match="31 bits"):
        divisor(0)


@pytest.fixture
def also_as_words(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Program]]:
    """Every program that is called is also encoded for the GPU and simulated."""
    original, seen = Program.compiled, list[Program]()

    def compiled(self: Program, fallback: Any = None) -> Any:
        fused = original(self, fallback)

        def run(*arguments: Any) -> Any:
            tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
            if all(one.numel() < 3000 for one in tensors):
                try:
                    check_words(self, arguments)
                    check_words(self, arguments, SMALL)
                    seen.append(self)
                except NotEncodable:
                    pass
            return fused(*arguments)

        return run

    monkeypatch.setattr(Program, "compiled", compiled)
    monkeypatch.setattr("magjit_dvm.schedule.stacked", list)  # each is called by itself
    yield seen


@pytest.mark.parametrize(
    "part", [*range(4), *(pytest.param(one, marks=pytest.mark.slow) for one in (4, 5))]
)
def test_random_programs(part: int, also_as_words: list[Program]) -> None:
    for seed in range(part * 25, part * 25 + 25):
        check_seed(seed)
    assert len(also_as_words) > 15
