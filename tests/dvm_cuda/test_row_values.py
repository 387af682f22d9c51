"""What is one number for a row: from stages, from memory, in sums and differences with tiles."""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.cuda import words
from magjit_dvm.cuda.encode import Machine
from magjit_dvm.instructions import INSTRUCTIONS, DType
from magjit_dvm.program import Node, NodeKind, Program
from tests.dvm.checking import compute, load, output, tensor
from tests.dvm_cuda.checking import check_words
from tests.dvm_cuda.test_encoder import values
from tests.dvm_cuda.test_sums import cast, drawn, row_sum

pytestmark = pytest.mark.usefixtures("way")

F16, F32, I32, I64, U8 = DType.F16, DType.F32, DType.I32, DType.I64, DType.U8
BF16, BOOL = DType.BF16, DType.BOOL
FEW = Machine(multiprocessors=2)


def with_row(dtype: DType) -> Program:
    """x less its row's sum, times a number of the row."""
    cast_too = () if dtype is F32 else (cast(3, F32),)
    nodes = (
        *(load(0, F32), row_sum(0, 1), compute("sub", F32, 0, 1), load(1, dtype), *cast_too),
        compute("mul", F32, 2, 3 + len(cast_too)),
    )
    inputs = tensor(F32, 0, 1), tensor(dtype, 0)
    return Program(2, inputs, nodes, (output(len(nodes) - 1, 0, 1),))


def first_words(program: Program, arguments: list[torch.Tensor]) -> set[str]:
    image = check_words(program, arguments, FEW)
    assert image is not None
    return {word.first for word in image.words}


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("shape", [(21, 40), (5, 300), (2, 700)])
def test_rows_from_stages(shape: tuple[int, int], first: int) -> None:
    """Wherever they begin: what is copied begins at a boundary of 16 bytes."""
    rows = drawn(F32, shape[0] + first, seed=1)[first:]
    assert "s.in" in first_words(with_row(F32), [drawn(F32, *shape), rows])
    whole = torch.arange(shape[0] + first, dtype=torch.int32)[first:]
    assert "s.in" in first_words(with_row(I32), [drawn(F32, *shape), whole])


def test_rows_from_memory() -> None:
    """Of other sizes, with space between, of a single row; of rows in chunks, from stages."""
    x = drawn(F32, 9, 64)
    assert "s.ld.f16" in first_words(with_row(F16), [x, drawn(F16, 9, seed=1)])
    assert "s.ld.32" in first_words(with_row(F32), [x, drawn(F32, 18, seed=1)[::2]])
    assert "s.in" in first_words(with_row(F32), [drawn(F32, 2, 30_000), drawn(F32, 2, seed=1)])
    assert "s.ld.32" in first_words(with_row(F32), [x[:1], drawn(F32, 1, seed=1)])
    for dtype, one in ((U8, torch.arange(9).to(torch.uint8)), (I64, (torch.arange(18) - 4)[::2])):
        assert "s.take" in first_words(with_row(dtype), [x, one])


@pytest.mark.parametrize("first", [0, 1, 3])
def test_rows_of_int64_from_stages(first: int) -> None:
    """As floats, as int32, as the nearest int32."""
    x, whole = drawn(F32, 21, 40), torch.arange(21 + first) * 1000 - 5000
    whole[first + 4] = 1 << 40
    assert "s.in" in first_words(with_row(I64), [x, whole[first:]])
    nodes = (
        *(load(0, F32), row_sum(0, 1), load(1, I64), cast(2, I32), cast(3, F32)),
        *(Node(NodeKind.CONSTANT, I64, number=3000), compute("lt", BOOL, 2, 5)),
        *(compute("select", F32, 6, 4, 1), compute("sub", F32, 0, 7)),
    )
    program = Program(2, (tensor(F32, 0, 1), tensor(I64, 0)), nodes, (output(8, 0, 1),))
    assert "s.in" in first_words(program, [x, whole[first:]])


def by_row(name: str, dtype: DType) -> Program:
    """An operator of rows' sums and another number of theirs, and of each and a number."""
    (row,) = (one for one in INSTRUCTIONS if one.name == name)
    made, count = row.result(dtype), row.kind.operands
    number = Node(NodeKind.CONSTANT, dtype, number=3)
    nodes = [load(0, F32), row_sum(0, 1), load(1, dtype), load(2, dtype), number]
    if name == "select":
        nodes += [load(3, BOOL), *(compute(name, dtype, 5, *two) for two in ((2, 3), (4, 2)))]
        results = (6, 7)
    elif count == 1:
        nodes.append(compute(name, made, 2))
        results = (5, 5)
    else:
        nodes += [compute(name, made, *two) for two in ((2, 3), (2, 4), (4, 2))]
        results = (5, 6, 7)
    inputs = tensor(F32, 0, 1), tensor(dtype, 0), tensor(dtype, 0), tensor(BOOL, 0)
    given = inputs if name == "select" else inputs[:3]
    return Program(2, given, tuple(nodes), (output(1, 0), *(output(one, 0) for one in results)))


@pytest.mark.parametrize("dtype", [F32, I32, U8, BOOL], ids=lambda one: one.text)
def test_operators_of_rows(dtype: DType) -> None:
    """Each instruction that numbers of rows may be computed with, whether it has a word or not."""
    kind, seen = "f" if dtype is F32 else "i", set[str]()
    for row in INSTRUCTIONS:
        known = f"{kind}.{row.name}" in words.BY_ROW or row.name in ("select", *words.SCALARS)
        if row.name.startswith("shift") or not known or dtype not in row.dtypes:
            continue
        program = by_row(row.name, dtype)
        given = [drawn(F32, 30, 20), *(values(dtype, 30, seed=k) for k in range(2))]
        given += [values(BOOL, 30, seed=5)] * (len(program.inputs) - 3)
        image = check_words(program, given, FEW)
        assert image is not None
        seen |= {word.first for word in image.words}
    assert {"s.by", "sk.by"} <= seen


def test_casts_of_rows() -> None:
    """One operator each, or two."""
    for of in (F32, I32, U8, BOOL):
        for to in (F32, I32, U8, BOOL, F16, BF16):
            nodes = (load(0, F32), row_sum(0, 1), load(1, of), cast(2, to), cast(3, F32))
            outputs = output(1, 0), output(4, 0), output(3, 0)
            program = Program(2, (tensor(F32, 0, 1), tensor(of, 0)), nodes, outputs)
            given = values(of, 30) if of is not F32 else values(of, 30).abs()
            check_words(program, [drawn(F32, 30, 20), given], FEW)


@pytest.mark.parametrize("tile", ["loaded", "computed before"])
@pytest.mark.parametrize("dtype", [F16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize(
    ("op", "turned", "word"),
    [("add", False, "mad.r"), ("add", True, "mad.r"), ("sub", False, "nmad.r"), ("sub", True, "")],
)
def test_products_with_row_values(
    op: str, turned: bool, word: str, dtype: DType, tile: str
) -> None:
    """exp(x) ± t · s with t = y, or sin(y), which others ask for, too."""
    nodes = [
        *(load(0, dtype), cast(0, F32), load(1, dtype), cast(2, F32), row_sum(1, 1)),
        *(compute("exp", F32, 1), compute("sin", F32, 3)),
    ]
    nodes.append(compute("mul", F32, 4, 3 if tile == "loaded" else 6))
    nodes.append(compute(op, F32, *((7, 5) if turned else (5, 7))))
    nodes += [compute("mul", F32, 6, 6), cast(8, dtype)]
    outputs = output(10, 0, 1), output(9, 0, 1)
    program = Program(2, (tensor(dtype, 0, 1),) * 2, tuple(nodes), outputs)
    given = [drawn(dtype, 7, 300) / 8, drawn(dtype, 7, 300, seed=1)]
    image = check_words(program, given, FEW)
    assert image is not None
    found = {one.second for one in image.words} & {"mad.r", "nmad.r"}
    if tile == "loaded":
        assert found == ({word} if word else set())


def test_a_product_that_others_ask_for_is_no_part_of_a_sum() -> None:
    nodes = (
        *(load(0, F32), row_sum(0, 1), compute("mul", F32, 0, 1), compute("exp", F32, 0)),
        *(compute("add", F32, 3, 2), Node(NodeKind.COMPUTE, F32, (2,), "neg")),
    )
    outputs = output(4, 0, 1), output(5, 0, 1)
    image = check_words(Program(2, (tensor(F32, 0, 1),), nodes, outputs), [drawn(F32, 7, 64)], FEW)
    assert image is not None and not any(one.second == "mad.r" for one in image.words)


def test_scratch_memory_is_free_again_behind_a_product_with_a_row_value() -> None:
    """exp(x) waits for exp(x) + t · s and exp(x) · s; three tiles later wait, one in its place."""
    nodes = (
        *(load(0, F32), load(1, F32), row_sum(0, 1), compute("exp", F32, 0)),
        *(compute("mul", F32, 1, 2), compute("add", F32, 3, 4), compute("mul", F32, 3, 2)),
        *(compute("mul", F32, 0, 2), compute("sin", F32, 7), compute("cos", F32, 7)),
        *(compute("mul", F32, 8, 9), compute("add", F32, 8, 9), compute("mul", F32, 10, 11)),
    )
    outputs = output(5, 0, 1), output(6, 0, 1), output(12, 0, 1)
    program = Program(2, (tensor(F32, 0, 1),) * 2, nodes, outputs)
    image = check_words(program, [drawn(F32, 7, 64), drawn(F32, 7, 64, seed=1)], FEW)
    assert image is not None and any(one.second == "mad.r" for one in image.words)
    assert len({one.w1 for one in image.words if one.first == "save"}) == image.scratch
    assert image.scratch < sum(one.first == "save" for one in image.words)
