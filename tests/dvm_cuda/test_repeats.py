"""Rows that come again for outer dimensions, as of a mask, and come with tiles."""

from __future__ import annotations

import pytest

from magjit_dvm.cuda.encode import Machine
from magjit_dvm.cuda.forms import NORMS, form_of
from magjit_dvm.cuda.words import Image
from magjit_dvm.instructions import DType
from magjit_dvm.program import ACROSS, Node, NodeKind, Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda.checking import check_words
from tests.dvm_cuda.test_encoder import values

by_lines_too = pytest.mark.usefixtures("way")

F16, F32, BOOL = DType.F16, DType.F32, DType.BOOL
ONE, FEW = Machine(1), Machine(2)


def masked(rank: int = 3) -> Program:
    """The softmax of rows, of which a mask that is the same for outer dimensions takes parts."""
    last = rank - 1
    nodes = (
        *(load(0, F16), cast(F32, 0), load(1, BOOL), Node(NodeKind.CONSTANT, F32, number=-1e4)),
        *(compute("select", F32, 2, 3, 1), reduce("max", F32, 4, last), compute("sub", F32, 4, 5)),
        *(compute("exp", F32, 6), reduce("sum", F32, 7, last), compute("div", F32, 7, 8)),
        cast(F16, 9),
    )
    inputs = tensor(F16, *range(rank)), tensor(BOOL, rank - 2, last)
    return Program(rank, inputs, nodes, (output(10, *range(rank)),))


def sums(dtype: DType, *dims: int) -> Program:
    """The sum of each row of x + y, y without the outermost dimension."""
    nodes = [load(0, dtype), load(1, dtype)]
    if dtype is not F32:
        nodes = [load(0, dtype), cast(F32, 0), load(1, dtype), cast(F32, 2)]
    x, y = (0, 1) if dtype is F32 else (1, 3)
    total = len(nodes) + 1
    nodes += [compute("add", F32, x, y), reduce("sum", F32, total - 1, 2)]
    inputs = tensor(dtype, 0, 1, 2), tensor(dtype, *dims)
    return Program(3, inputs, tuple(nodes), (output(total, 0, 1),))


def staged(image: Image | None) -> list[int]:
    assert image is not None
    return [argument for argument, *_ in image.inputs]


@by_lines_too
@pytest.mark.parametrize("cols", [480, 1000, 1024])
def test_masks_come_with_tiles(cols: int) -> None:
    x, mask = values(F16, 3, 40, cols), values(BOOL, 40, cols)
    image = check_words(masked(), [x, mask], ONE)
    assert staged(image) == [0, 1] and image is not None and image.repeats == [40]
    assert form_of(image) == NORMS or cols == 480
    assert image.rows_of_tile == 1 or 40 % image.rows_of_tile, "tiles with both ends of it"


@by_lines_too
@pytest.mark.parametrize("dtype", [F16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [32, 64, 200, 700])
def test_several_rows_of_a_warp(dtype: DType, cols: int) -> None:
    """More of them are in a tile than come again."""
    x = values(dtype, 12, 33 if cols % 8 == 0 else 36, cols)
    y = values(dtype, *x.shape[1:])
    image = check_words(sums(dtype, 1, 2), [x, y], ONE)
    assert staged(image) == [0, 1] and image is not None and image.repeats == [x.shape[1]]


def test_what_has_outer_dimensions_between() -> None:
    """Of the same mask for all heads and images, but not of one for each image."""
    x = values(F16, 2, 3, 40, 512)
    image = check_words(masked(4), [x, values(BOOL, 40, 512)], ONE)
    assert staged(image) == [0, 1]
    image = check_words(sums(F16, 0, 2), [x[0], values(F16, 3, 512)], ONE)
    assert staged(image) == [0]


@pytest.mark.parametrize("why", ["offset", "odd", "few", "apart", "long", "column"])
def test_others_do_not(why: str) -> None:
    cols = {"odd": 1001, "long": 31_000}.get(why, 1024)
    rows = 20 if why == "few" else 34 if why == "long" else 39
    x, mask = values(F16, 3, rows, cols), values(BOOL, rows, cols)
    if why == "offset":
        mask = values(BOOL, rows * cols + 1)[1:].view(rows, cols)
    elif why == "apart":
        mask = values(BOOL, rows, 2 * cols)[:, :cols]
    elif why == "column":
        mask = mask[:, :1].expand(rows, cols)
    image = check_words(masked(), [x, mask], FEW)
    assert image is not None and not image.repeats and 1 not in staged(image)


def test_sums_across_rows_go_without() -> None:
    """Their kernels know nothing of it."""
    nodes = (
        *(load(0, F32), load(1, F32), compute("mul", F32, 0, 1)),
        Node(NodeKind.REDUCE, F32, (2,), "sum", aux=ACROSS, dims=frozenset({0, 1})),
        *(reduce("max", F32, 2, 2), compute("sub", F32, 2, 4)),
    )
    inputs, outputs = (tensor(F32, 0, 1, 2), tensor(F32, 1, 2)), (output(3, 2), output(5, 0, 1, 2))
    program = Program(3, inputs, nodes, outputs)
    image = check_words(program, [values(F32, 4, 40, 512), values(F32, 40, 512)], FEW)
    assert image is not None and image.sums and not image.repeats
