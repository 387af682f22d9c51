"""Positions along dimensions: of the rows of a tile, and compared with one for each row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from magjit_dvm.instructions import DTYPES, DType
from magjit_dvm.program import INDEXED, Node, NodeKind, Program
from tests.dvm.checking import check_program, compute, load, machine, output, reduce, tensor
from tests.dvm.test_instructions import SETTINGS, contiguous, shifted, sliced, transposed

F32, I64, BOOL = DType.F32, DType.I64, DType.BOOL


@pytest.fixture(params=list(SETTINGS), autouse=True)
def settings(request: pytest.FixtureRequest) -> Iterator[None]:
    with machine(SETTINGS[request.param]):
        yield


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda one: one.text)
def test_look_ups_of_a_tile(dtype: DType, axis: int) -> None:
    """Positions of each row beside a reduction of the rows, and the row's own number."""
    kept = 1 - axis
    nodes = (
        load(0, F32),
        reduce("sum", F32, 0, axis),
        load(1, I64),
        Node(NodeKind.INDEX, dtype, (2,), aux=2),
        Node(NodeKind.IOTA, I64, aux=kept),
        compute("add", I64, 4, 2),
    )
    table = [INDEXED if d == axis else d for d in range(2)]
    inputs = (tensor(F32, 0, 1), tensor(I64, kept), tensor(dtype, *table))
    program = Program(2, inputs, nodes, (output(1, kept), output(3, kept), output(5, kept)))
    for shape in ((3, 40), (40, 3), (1, 65), (65, 1), (300, 70), (5, 3000)):
        for layout in (contiguous, transposed, sliced, shifted):
            at = layout(I64, (shape[kept],), 1).abs() % shape[axis]
            given = [layout(F32, shape, 2), at, layout(dtype, shape, 3)]
            check_program(program, given, bytecode=shape[0] < 50)
            if shape[kept] > 1:
                with pytest.raises(IndexError):
                    program.compiled()(given[0], at + (at == at.max()) * shape[axis], given[2])


@pytest.mark.parametrize("swapped", [False, True])
def test_one_hot(swapped: bool) -> None:
    """A comparison of positions, with one for each row in one pass, and with others."""
    equals = compute("eq", BOOL, *((0, 1) if swapped else (1, 0)))
    nodes = (load(0, I64), Node(NodeKind.IOTA, I64, aux=1), equals, load(1, I64))
    both = (*nodes, compute("eq", BOOL, 3, 1), compute("bitwise_or", BOOL, 2, 4))
    inputs = (tensor(I64, 0), tensor(I64, 0, 1))
    for shape in ((3, 5), (1, 70), (70, 1), (40, 65), (3, 3000), (300, 3)):
        for layout in (contiguous, transposed, sliced):
            given = [layout(I64, shape[:1], 1), layout(I64, shape, 2).abs() % 4]
            one = Program(2, (*inputs[:1], tensor(I64, 0, 1)), nodes, (output(2, 0, 1),))
            check_program(one, given, exact=True)
            check_program(Program(2, inputs, both, (output(5, 0, 1),)), given, exact=True)
