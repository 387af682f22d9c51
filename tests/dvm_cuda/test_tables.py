"""Positions along dimensions, what is looked up at positions, and int64 that 32 bits hold."""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.cuda.encode import Machine
from magjit_dvm.cuda.long_ranges import NOT_HELD
from magjit_dvm.cuda.words import Image
from magjit_dvm.instructions import DType
from magjit_dvm.program import INDEXED, Input, InputKind, Node, NodeKind, Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda import checking
from tests.dvm_cuda.agreeing import check_encoders
from tests.dvm_cuda.checking import BIG, SMALL, check_words
from tests.dvm_cuda.test_encoder import values

pytestmark = pytest.mark.usefixtures("way")

F16, BF16, F32, I32 = DType.F16, DType.BF16, DType.F32, DType.I32
I64, U8, BOOL = DType.I64, DType.U8, DType.BOOL
FEW = Machine(multiprocessors=2)
REFUSED = f"refused: {NOT_HELD}"


def index(aux: int, dtype: DType, position: int) -> Node:
    return Node(NodeKind.INDEX, dtype, (position,), aux=aux)


def iota(dim: int) -> Node:
    return Node(NodeKind.IOTA, I64, aux=dim)


def number(value: float, dtype: DType = I64) -> Node:
    return Node(NodeKind.CONSTANT, dtype, number=value)


def words_of(image: Image | None) -> set[str]:
    assert image is not None
    return {word.first for word in image.words}


def positions(bound: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, bound, shape, generator=torch.Generator().manual_seed(len(shape)))


def embedding(dtype: DType) -> Program:
    """(batch, length) of a (vocabulary, width), negated."""
    nodes = [load(1, I64), index(0, dtype, 0)]
    if dtype in (F16, BF16):
        nodes += [cast(F32, 1), compute("neg", F32, 2), cast(dtype, 3)]
    elif dtype is not BOOL and dtype is not I64:
        nodes.append(compute("neg", dtype, 1))
    else:
        nodes.append(cast(F32, 1) if dtype is BOOL else compute("eq", BOOL, 1, 0))
    inputs = tensor(dtype, INDEXED, 2), tensor(I64, 0, 1)
    return Program(3, inputs, tuple(nodes), (output(len(nodes) - 1, 0, 1, 2),))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda one: one.text)
@pytest.mark.parametrize("width", [8, 63, 64, 100, 768, 1030, 5000])
def test_rows_of_a_table(dtype: DType, width: int) -> None:
    """A row's columns share its position: read by fours where the table allows it."""
    table, at = values(dtype, 40, width), positions(40, 3, 5)
    found = words_of(check_words(embedding(dtype), [table, at], FEW))
    by_rows = width >= 64 and width % 4 == 0
    assert f"lt.row.{dtype.text.replace('f32', '32')}" in found if by_rows else True
    assert by_rows or f"at.{dtype.text.replace('f32', '32')}" in found
    whole = values(dtype, 40, 2 * width)
    check_words(embedding(dtype), [whole[:, 1 : width + 1], at], FEW)
    check_words(embedding(dtype), [whole[:, ::2], at], FEW)
    check_words(embedding(dtype), [table.t().contiguous().t(), at.t().contiguous().t()], FEW)
    check_words(embedding(dtype), [table, at[:1, :1]], FEW)


@pytest.mark.parametrize("dtype", [I32, U8, BOOL], ids=lambda one: one.text)
def test_tables_of_ints(dtype: DType) -> None:
    for width in (5, 200):
        check_words(embedding(dtype), [values(dtype, 40, width), positions(40, 3, 5)], FEW)


def test_positions_from_a_table() -> None:
    """Which a register has the nearest int32 of: good enough to look up with."""
    nodes = (load(2, I64), index(0, I64, 0), index(1, F16, 1))
    inputs = tensor(I64, INDEXED), tensor(F16, INDEXED, 1), tensor(I64, 0)
    program = Program(2, inputs, nodes, (output(2, 0, 1),))
    found = check_words(program, [positions(9, 30), values(F16, 9, 128), positions(30, 7)], FEW)
    assert {"at.i64s", "lt.row.f16"} <= words_of(found)


def rms_norm(dtype: DType) -> Program:
    """Of what is looked up, beside itself."""
    nodes = (
        load(1, I64),
        index(0, dtype, 0),
        cast(F32, 1),
        compute("mul", F32, 2, 2),
        reduce("sum", F32, 3, 1),
        Node(NodeKind.NUMEL, F32, dims=frozenset({1})),
        compute("div", F32, 4, 5),
        number(1e-5, F32),
        compute("add", F32, 6, 7),
        compute("rsqrt", F32, 8),
        compute("mul", F32, 2, 9),
        cast(dtype, 10),
    )
    inputs = tensor(dtype, INDEXED, 1), tensor(I64, 0)
    return Program(2, inputs, nodes, (output(11, 0, 1), output(1, 0, 1)))


@pytest.mark.parametrize("width", [24, 512, 1027, 15_500])
def test_a_norm_of_rows(width: int) -> None:
    for machine in (FEW, SMALL):
        image = check_words(rms_norm(F16), [values(F16, 30, width), positions(30, 5)], machine)
        assert image is not None and image.by_rows and not image.inputs
        assert "s.ld.i64s" in words_of(image)


def loss(dtype: DType = F16) -> Program:
    """The logarithm of a softmax at a row's class, 0 where that is −100, and both gradients."""
    nodes = (
        *(load(0, dtype), cast(F32, 0), reduce("max", F32, 1, 1), compute("sub", F32, 1, 2)),
        *(compute("exp", F32, 3), reduce("sum", F32, 4, 1), compute("log", F32, 5)),
        *(load(1, I64), number(-100), compute("ne", BOOL, 7, 8), number(0)),
        *(compute("select", I64, 9, 7, 10), index(2, dtype, 11), cast(F32, 12)),
        *(compute("sub", F32, 13, 2), compute("sub", F32, 14, 6), number(0.0, F32)),
        *(compute("select", F32, 9, 15, 16), iota(1), compute("eq", BOOL, 18, 7)),
        *(compute("sub", F32, 3, 6), compute("select", F32, 19, 20, 16)),
    )
    inputs = tensor(dtype, 0, 1), tensor(I64, 0), tensor(dtype, 0, INDEXED)
    return Program(2, inputs, nodes, (output(17, 0), output(21, 0, 1)))


@pytest.mark.parametrize("classes", [10, 400, 15_500])
def test_losses_of_classes(classes: int) -> None:
    rows = 6 if classes < 1000 else 3  # long rows take the PTX machine long
    x, at = values(F16, rows, classes), positions(classes, rows)
    at[2] = -100
    found = words_of(check_words(loss(), [x, at, x], FEW))
    assert {"s.at.f16", "s.by", "lt.col.at", "s.in"} <= found
    check_words(loss(), [x, at, x.t().contiguous().t()], FEW)


def gather(dtype: DType = F32) -> Program:
    """Along the last dimension, at positions of their own."""
    nodes = load(1, I64), index(0, dtype, 0), compute("abs", F32, 1)
    inputs = tensor(dtype, 0, INDEXED), tensor(I64, 0, 1)
    return Program(2, inputs, nodes, (output(2, 0, 1),))


@pytest.mark.parametrize("shape", [(3, 5), (7, 100), (2, 3000)])
def test_each_element_has_a_position(shape: tuple[int, int]) -> None:
    x, at = values(F32, shape[0], 50), positions(50, *shape)
    assert "at.32" in words_of(check_words(gather(), [x, at], FEW))
    check_words(gather(), [x.t().contiguous().t(), at], FEW)
    check_words(gather(), [x, at.t().contiguous().t()], FEW)
    check_words(gather(), [x, torch.stack([at, at], 2)[:, :, 1]], FEW)


@pytest.mark.parametrize("at", [-1, 50, 1 << 31, (1 << 32) + 3, -(1 << 40)])
def test_positions_beyond_a_table(at: int) -> None:
    """The launch ends, as eager mode's does; whatever the low 32 bits of the position are."""
    for program, table, shape in (
        (gather(), values(F32, 1, 50), (1, 3)),
        (embedding(F16), values(F16, 50, 64), (1, 3)),
        (loss(), values(F16, 3, 50), (3,)),
    ):
        given = positions(50, *shape)
        given.view(-1)[1] = at
        tables = [table, given, table] if program == loss() else [table, given]
        with pytest.raises(IndexError):
            checking.simulated(program, tables, FEW)


def test_what_is_not_there_has_no_position() -> None:
    """Lanes beyond the end have whatever: nothing is looked up there."""
    for count in (1, 2, 3, 127, 129, 255, 257):
        nodes = load(1, I64), index(0, F32, 0)
        inputs = tensor(F32, INDEXED), tensor(I64, 0)
        program = Program(1, inputs, nodes, (output(1, 0),))
        check_words(program, [values(F32, 9), positions(9, count)], FEW)


def mask(op: str) -> Program:
    """A causal mask, or another, of positions alone, over scores."""
    nodes = (
        *(iota(0), iota(1), Node(NodeKind.SCALAR, I64, aux=1), compute("add", I64, 0, 2)),
        *(compute(op, BOOL, 1, 3), load(0, F32), number(-1e9, F32)),
        compute("select", F32, 4, 5, 6),
    )
    inputs = tensor(F32, 0, 1), Input(InputKind.INT, I64)
    return Program(2, inputs, nodes, (output(7, 0, 1),))


@pytest.mark.parametrize("op", ["le", "gt", "eq"])
@pytest.mark.parametrize("shape", [(5, 9), (12, 300), (300, 12)])
def test_masks_of_positions(op: str, shape: tuple[int, int]) -> None:
    for offset in (0, 3, -7):
        found = check_words(mask(op), [values(F32, *shape), offset], FEW)
        assert ("lt.col.at" if shape[1] > 64 else "lt.e.at") in words_of(found)
    check_words(mask(op), [values(F32, *shape).t().contiguous().t(), 1], FEW)
    assert check_encoders(mask(op), [values(F32, *shape), (1 << 31) - 2], BIG) == REFUSED
    assert check_encoders(mask(op), [values(F32, *shape), 1 << 40], BIG) == REFUSED


def loss_backward() -> Program:
    """The gradient of ``loss`` by logarithms, where a row's is given and classes may be ignored."""
    nodes = (
        *(load(0, F32), load(1, I64), load(2, F32), number(-100), compute("ne", BOOL, 1, 3)),
        *(compute("neg", F32, 2), number(0.0, F32), compute("select", F32, 4, 5, 6)),
        *(iota(1), compute("eq", BOOL, 8, 1), compute("select", F32, 9, 7, 6)),
        *(compute("exp", F32, 0), compute("mul", F32, 11, 7), compute("sub", F32, 10, 12)),
    )
    inputs = tensor(F32, 0, 1), tensor(I64, 0), tensor(F32, 0)
    return Program(2, inputs, nodes, (output(13, 0, 1),))


@pytest.mark.parametrize("classes", [10, 64, 400, 15_500])
def test_gradients_of_losses_of_classes(classes: int) -> None:
    """Without any reduction, what rows have one number of is computed once for each."""
    rows = 6 if classes < 1000 else 3
    at = positions(classes, rows)
    at[2] = -100
    given = [values(F32, rows, classes), at, values(F32, rows)]
    image = check_words(loss_backward(), given, FEW)
    assert image is not None and image.by_rows == (classes >= 64)
    turned = given[0].t().contiguous().t()
    image = check_words(loss_backward(), [turned, *given[1:]], FEW)
    assert image is not None and image.by_rows == (classes >= 64), "results lie in rows"


def test_masks_of_several_matrices() -> None:
    """Rows are those of all matrices; where columns are of two dimensions, positions are slow."""
    nodes = (
        *(iota(1), iota(2), compute("le", BOOL, 1, 0), load(0, F32), number(-1e9, F32)),
        compute("select", F32, 2, 3, 4),
    )
    program = Program(3, (tensor(F32, 0, 1, 2),), nodes, (output(5, 0, 1, 2),))
    image = check_words(program, [values(F32, 3, 5, 72)], FEW)
    assert image is not None and image.rows == 15 and "lt.col.at" in words_of(image)
    image = check_words(program, [values(F32, 3, 5, 7)], FEW)
    assert image is not None and not image.by_rows
    nodes = (load(0, F32), iota(1), cast(F32, 1), compute("add", F32, 0, 2))
    program = Program(3, (tensor(F32, 0, 1, 2),), nodes, (output(3, 0, 1, 2),))
    image = check_words(program, [values(F32, 3, 5, 72)], FEW)
    assert image is not None and image.rows == 15 and "s.ld.at" in words_of(image)
    nodes = (load(0, F32), iota(1), cast(F32, 1), compute("add", F32, 0, 2), load(1, I64))
    nodes = (*nodes, cast(F32, 4), compute("mul", F32, 3, 5))
    inputs = tensor(F32, 0, 1, 2), tensor(I64, 0)
    program = Program(3, inputs, nodes, (output(6, 0, 1, 2),))
    image = check_words(program, [values(F32, 3, 9, 8), positions(9, 3)], FEW)
    assert image is not None and not image.by_rows


def test_a_softmax_below_the_diagonal() -> None:
    """Rows' positions are in row registers."""
    nodes = (
        *(load(0, F32), iota(0), iota(1), compute("le", BOOL, 2, 1), number(-1e9, F32)),
        *(compute("select", F32, 3, 0, 4), reduce("max", F32, 5, 1), compute("sub", F32, 5, 6)),
        *(compute("exp", F32, 7), reduce("sum", F32, 8, 1), compute("div", F32, 8, 9)),
    )
    program = Program(2, (tensor(F32, 0, 1),), nodes, (output(10, 0, 1),))
    for shape in ((7, 40), (3, 1100), (2, 15_500)):
        assert "s.ld.at" in words_of(check_words(program, [values(F32, *shape)], FEW))


# -- int64 --


def longs(*nodes: Node, inputs: int = 1) -> Program:
    """Of int64 along one line."""
    return Program(1, (tensor(I64, 0),) * inputs, nodes, (output(len(nodes) - 1, 0),))


EDGES = torch.tensor(
    [
        0,
        1,
        -1,
        511,
        512,
        2**31 - 1,
        2**31 - 2,
        2**31,
        -(2**31),
        -(2**31) - 1,
        2**32,
        2**62,
        -(2**63),
    ]
)


@pytest.mark.parametrize("op", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_with_numbers(op: str) -> None:
    for value in (0, 511, -1, 2**31 - 2, -(2**31) + 1):
        for args in ((0, 1), (1, 0)):
            check_words(longs(load(0, I64), number(value), compute(op, BOOL, *args)), [EDGES], FEW)
    for value in (2**31 - 1, 2**31, -(2**31), 2**40):
        program = longs(load(0, I64), number(value), compute(op, BOOL, 0, 1))
        assert check_encoders(program, [EDGES], BIG) == REFUSED
    both = longs(load(0, I64), load(1, I64), compute(op, BOOL, 0, 1), inputs=2)
    assert check_encoders(both, [EDGES, EDGES], BIG) == REFUSED


@pytest.mark.parametrize("op", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_with_int32(op: str) -> None:
    """The largest int32 is not what is beyond it, whose nearest int32 it is."""
    inputs = tensor(I64, 0), tensor(I32, 0)
    nodes = (load(0, I64), load(1, I32), cast(I64, 1), compute(op, BOOL, 0, 2))
    program = Program(1, inputs, nodes, (output(3, 0),))
    given = [EDGES, EDGES.clamp(-(2**31), 2**31 - 1).to(torch.int32)]
    assert check_encoders(program, given, BIG) == REFUSED
    nodes = (load(1, I32), cast(I64, 0), iota(0), compute(op, BOOL, 1, 2))
    check_words(Program(1, inputs, nodes, (output(3, 0),)), given, FEW)
    nodes = (load(1, I32), cast(I64, 0), compute("bitwise_not", I64, 1), compute(op, BOOL, 1, 2))
    check_words(Program(1, inputs, nodes, (output(3, 0),)), given, FEW)


def test_whether_any_bit_is_set() -> None:
    check_words(longs(load(0, I64), compute("logical_not", BOOL, 0)), [EDGES], FEW)
    check_words(longs(load(0, I64), cast(BOOL, 0)), [EDGES], FEW)


def clamped() -> list[Node]:
    """The nearest of 0 to 511."""
    return [
        *(load(0, I64), number(0), compute("maximum", I64, 0, 1), number(511)),
        compute("minimum", I64, 2, 3),
    ]


def test_what_is_clamped_is_held() -> None:
    check_words(longs(*clamped()), [EDGES], FEW)
    check_words(longs(*clamped(), number(-3), compute("mul", I64, 4, 5)), [EDGES], FEW)
    check_words(longs(*clamped(), compute("mul", I64, 4, 4), compute("neg", I64, 5)), [EDGES], FEW)
    check_words(longs(*clamped(), cast(F32, 4)), [EDGES], FEW)
    check_words(longs(*clamped(), cast(F16, 4)), [EDGES], FEW)
    check_words(longs(*clamped(), cast(U8, 4)), [EDGES], FEW)
    check_words(longs(*clamped(), cast(I32, 4), compute("neg", I32, 5)), [EDGES], FEW)
    half = longs(load(0, I64), number(0), compute("maximum", I64, 0, 1))
    assert check_encoders(half, [EDGES], BIG) == REFUSED
    test = longs(*half.nodes, number(7), compute("gt", BOOL, 2, 3))
    check_words(test, [EDGES], FEW)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "bitwise_and", "bitwise_or", "bitwise_xor"])
def test_what_is_loaded_is_not_computed_with(op: str) -> None:
    program = longs(load(0, I64), number(3), compute(op, I64, 0, 1))
    assert check_encoders(program, [EDGES], BIG) == REFUSED
    nodes = (*clamped(), iota(0), compute(op, I64, 4, 5), number(-2), compute(op, I64, 6, 7))
    check_words(longs(*nodes), [EDGES], FEW)


@pytest.mark.parametrize("op", ["neg", "abs", "sign", "relu", "bitwise_not", "copy"])
def test_one_operand(op: str) -> None:
    check_words(longs(*clamped(), compute(op, I64, 4)), [EDGES], FEW)
    signed = (iota(0), number(4), compute("sub", I64, 0, 1), compute(op, I64, 2))
    check_words(longs(*signed), [EDGES], FEW)


def test_products_that_may_be_too_large() -> None:
    chain = [*clamped(), compute("mul", I64, 4, 4), compute("mul", I64, 5, 5)]
    assert check_encoders(longs(*chain), [EDGES], BIG) == REFUSED
    check_words(longs(*chain[:-1]), [EDGES], FEW)


def test_casts_to_int64() -> None:
    for dtype in (I32, U8, BOOL):
        program = Program(
            1,
            (tensor(dtype, 0),),
            (load(0, dtype), cast(I64, 0), number(5), compute("maximum", I64, 1, 2)),
            (output(1, 0), output(3, 0)),
        )
        check_words(program, [values(dtype, 700)], FEW)
    program = Program(1, (tensor(F32, 0),), (load(0, F32), cast(I64, 0)), (output(1, 0),))
    check_words(program, [values(F32, 700) * 1e6], FEW)
    nodes = (*program.nodes, number(5), compute("maximum", I64, 1, 2))
    floats = Program(1, program.inputs, nodes, (output(3, 0),))
    assert check_encoders(floats, [values(F32, 7)], BIG) == REFUSED


def test_int64_that_is_not_aligned() -> None:
    """Results of 8 bytes that do not begin at 16, sources that are read one by one."""
    whole = positions(90, 3000)
    for first in (0, 1):
        for step in (1, 2):
            nodes = (*clamped(), cast(F32, 4), compute("sqrt", F32, 5))
            check_words(longs(*nodes), [whole[first::step]], FEW)
    table = positions(90, 60, 7)
    nodes = (load(0, I64), number(7), compute("eq", BOOL, 0, 1), cast(I64, 2))
    program = Program(2, (tensor(I64, 0, 1),), nodes, (output(3, 0, 1), output(3, 1, 0)))
    check_words(program, [table], FEW)
    check_words(program, [table.t().contiguous().t()], FEW)
