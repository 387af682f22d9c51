"""Rows that do not fit shared memory with all that is saved of them: in chunks."""

from __future__ import annotations

import pytest

from magjit_dvm.cuda import columns
from magjit_dvm.cuda.forms import CHUNKED, form_of
from magjit_dvm.cuda.machine import Machine
from magjit_dvm.instructions import DType
from magjit_dvm.program import Node, NodeKind, Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda.checking import check_words
from tests.dvm_cuda.test_columns import CHANNELS, given, image_of, normed

F32, F16 = DType.F32, DType.F16


def gradient(dtype: DType, *, sums: bool) -> Program:
    """Of a SiLU behind a norm: both sums of a row, or what is made of them."""
    nodes = [
        *(load(0, dtype), load(1, F16), cast(F32, 1)),
        *(load(k, F32) for k in range(2, 8)),  # numbers of rows: 3 … 8
        Node(NodeKind.CONSTANT, F32, number=1.0),
        *(compute("sub", F32, 2, 3), compute("mul", F32, 10, 4), compute("add", F32, 11, 5)),
        *(compute("sigmoid", F32, 12), compute("sub", F32, 9, 13), compute("mul", F32, 12, 14)),
        *(compute("add", F32, 15, 9), compute("mul", F32, 13, 16)),
    ]
    dz = 0
    if dtype is F16:
        dz = len(nodes)
        nodes.append(cast(F32, 0))
    nodes.append(compute("mul", F32, dz, 17))
    g = len(nodes) - 1
    nodes.append(compute("sub", F32, 2, 6))
    away = len(nodes) - 1
    if sums:
        nodes += [reduce("sum", F32, g, 1), compute("mul", F32, g, away)]
        nodes += [reduce("sum", F32, g + 3, 1), compute("mul", F32, g + 4, 7)]
        outputs = output(g + 2, 0), output(g + 5, 0)
    else:
        nodes += [compute("mul", F32, g, 7), compute("mul", F32, away, 8)]
        nodes += [compute("add", F32, g + 2, g + 3), cast(F16, g + 4)]
        outputs = (output(g + 5, 0, 1),)
    inputs = tensor(dtype, 0, 1), tensor(F16, 0, 1), *(tensor(F32, 0) for _ in range(6))
    return Program(2, inputs, tuple(nodes), outputs)


@pytest.mark.parametrize(("dtype", "chunks"), [(F16, 1), (F32, 2)])
def test_sums_of_what_is_saved(dtype: DType, chunks: int) -> None:
    """Of float32, 16384 columns are a stage, and scratch memory, that a block has no room for."""
    program = gradient(dtype, sums=True)
    image = check_words(program, given(program, 3, 16384))
    assert image is not None and image.chunks == chunks
    assert form_of(image) == CHUNKED or chunks == 1
    image_of(program, given(program, 3, 16384))


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("cols", [16384, 65536])
def test_elementwise_rows(cols: int, dtype: DType) -> None:
    """Rows all the same: their numbers would be looked for at each four elements."""
    program = gradient(dtype, sums=False)
    arguments = given(program, (1 << 20) // cols, cols)
    machine = Machine(multiprocessors=16)
    image = image_of(program, arguments, machine)
    assert image.by_rows and image.chunks > 1
    if cols > 16384:
        assert check_words(program, arguments, machine) is not None


@pytest.mark.parametrize("numbers", [1, 2, 4])
@pytest.mark.parametrize(
    ("blocks", "filled"), [(32, True), (42, True), (43, False), (31, False), (21, True), (5, True)]
)
def test_long_rows_are_where_blocks_have_them(numbers: int, blocks: int, filled: bool) -> None:
    """32 rows: with 42 blocks three of four have one, with 31 the last one is alone."""
    cols = 2 * columns._LONG_OF_NUMBERS
    program = normed(F16, *[(F32, CHANNELS)] * numbers)
    image = image_of(program, given(program, 2, 16, cols), Machine(multiprocessors=blocks))
    assert image.by_rows is (filled and numbers > 1)
