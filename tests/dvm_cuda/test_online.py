"""The largest element of a row and the sum of exponentials beyond it: found together.

Rows that are read once for such come in chunks, though registers have room for them.
"""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.cuda.encode import Machine, encode
from magjit_dvm.cuda.forms import CHUNKED, EIGHTH, NORMS, READ_ONCE, WHOLE, form_of
from magjit_dvm.cuda.warps import OF_CHUNKS, most_threads
from magjit_dvm.instructions import DType
from magjit_dvm.program import Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda.checking import check_words
from tests.dvm_cuda.test_chunks import summed
from tests.dvm_cuda.test_encoder import log_softmax, softmax, values
from tests.dvm_cuda.test_row_words import special_rows, words_of
from tests.dvm_cuda.test_tables import loss, positions

F16, F32 = DType.F16, DType.F32
ONE, BIG = Machine(1), Machine()


def of_products(dtype: DType) -> Program:
    """A log-softmax of what is computed: it is in A when it is reduced, and stays there."""
    nodes = (
        *(load(0, dtype), cast(F32, 0), compute("mul", F32, 1, 1), reduce("max", F32, 2, 1)),
        *(compute("sub", F32, 2, 3), compute("exp", F32, 4), reduce("sum", F32, 5, 1)),
        *(compute("log", F32, 6), compute("sub", F32, 4, 7), cast(dtype, 8)),
    )
    return Program(2, (tensor(dtype, 0, 1),), nodes, (output(9, 0, 1),))


def forward(dtype: DType = F16) -> Program:
    """A loss of classes, without gradients."""
    whole = loss(dtype)
    return Program(2, whole.inputs, whole.nodes[:18], whole.outputs[:1])


@pytest.mark.parametrize(
    ("cols", "form"), [(30, EIGHTH), (200, NORMS), (1000, NORMS), (1001, WHOLE)]
)
def test_log_softmaxes_meet_once(cols: int, form: int, way: str) -> None:
    rows = 400 if form == EIGHTH else 9
    image = check_words(log_softmax(F32), [values(F32, rows, cols)], ONE)
    names = words_of(image)
    assert image is not None and form_of(image) == form and len(image.first) == 1
    assert names.count("red.f.softmax") == names.count("fin.f.softmax") == 1
    assert not any(name.startswith("row.") for name in names)


def test_what_is_not_computed_is_not_saved(way: str) -> None:
    """The exponentials are nobody's; the differences are made again of what A still has."""
    for cols in (500, 6000):
        image = check_words(of_products(F16), [values(F16, 5, cols)], ONE)
        assert "red.f.softmax" in words_of(image) and "save" not in words_of(image)
        assert image is not None and image.scratch == 0


@pytest.mark.parametrize("cols", [300, 5000])
def test_special_rows(cols: int, way: str) -> None:
    x = special_rows(F32, 9, cols)
    for program in (log_softmax(F32), summed(F32)):
        image = check_words(program, [x], BIG)
        assert "fin.f.softmax" in words_of(image)


def test_where_two_words_are_better() -> None:
    """Exponentials that are asked for again; rows of a few warps, whose results have tiles."""
    names = words_of(check_words(softmax(F32), [values(F32, 9, 1000)], ONE))
    assert "row.f.max" in names and "red.f.softmax" not in names
    for cols, online in ((1024, True), (1028, False), (4096, False), (4100, True)):
        image = encode(log_softmax(F32), [values(F32, 3, cols)], BIG).image
        assert ("red.f.softmax" in words_of(image)) == online
        image = encode(summed(F32), [values(F32, 3, cols)], BIG).image
        assert "red.f.softmax" in words_of(image)


@pytest.mark.parametrize("cols", [1028, 1027, 2048])
def test_losses_are_read_once(cols: int, way: str) -> None:
    """A row a warp, its class beside it, its element looked up in the end."""
    rows = 21
    x = values(F16, rows, cols)
    image = check_words(forward(), [x, positions(cols, rows), x], ONE)
    assert image is not None and image.once and form_of(image) == CHUNKED
    assert (image.group, image.rows_of_tile, image.chunks) == (1, 11, 2)
    assert len(image.first) == 1 and image.epilogue < len(image.words)
    image = check_words(summed(F16), [x], ONE)
    assert image is not None and form_of(image) == CHUNKED and image.rows_of_tile == 11


@pytest.mark.parametrize(
    ("rows", "cols", "found"),
    [
        (65_536, 2048, (1, 19)),
        (16_384, 8192, (1, 18)),
        (8000, 16_384, (2, 9)),
        (4194, 32_000, (2, 8)),
        (2671, 50_257, (3, 6)),
        (1046, 128_256, (2, 8)),
        (600, 8192, (3, 5)),
        (132, 32_000, (16, 1)),
    ],
)
def test_how_many_rows_a_block_has(rows: int, cols: int, found: tuple[int, int]) -> None:
    """As many as there are warps for, and about as many in each tile of a block."""
    x = torch.empty(rows, cols, dtype=torch.float16)  # nobody touches it
    image = encode(summed(F16), [x], BIG).image
    batches = rows >= 32 * BIG.multiprocessors
    form = READ_ONCE if batches else CHUNKED
    assert image is not None and form_of(image) == form
    assert (image.group, image.rows_of_tile) == found
    assert image.warps <= OF_CHUNKS[32] and image.threads <= most_threads(32, form)
    tiles = -(-image.tiles // BIG.multiprocessors)
    assert tiles * image.rows_of_tile * BIG.multiprocessors < rows + (tiles + 1) * 2 * 132


def test_few_rows_and_those_with_tiles_stay_whole() -> None:
    for rows, once in ((132 * 3, False), (132 * 3 + 1, True)):
        image = encode(summed(F16), [torch.empty(rows, 8192, dtype=torch.float16)], BIG).image
        assert image is not None and (image.chunks > 1) == once
    x = torch.empty(4000, 8192, dtype=torch.float16)
    for program in (log_softmax(F16), loss()):
        given = [x] if program != loss() else [x, positions(8192, 4000), x]
        image = encode(program, given, BIG).image
        assert image is not None and not image.once and image.chunks == 1
    image = encode(summed(F16), [x[:, :1024]], BIG).image
    assert image is not None and image.chunks == 1


def test_words_of_other_kernels_fit_theirs() -> None:
    """Divided for the kernel of rows in chunks, and run by that of all."""
    nodes = (
        *(load(0, F32), compute("asin", F32, 0), reduce("max", F32, 1, 1)),
        *(compute("sub", F32, 1, 2), compute("exp", F32, 3), reduce("sum", F32, 4, 1)),
    )
    program = Program(2, (tensor(F32, 0, 1),), nodes, (output(5, 0),))
    image = check_words(program, [values(F32, 21, 1100)], ONE)
    assert image is not None and image.once and image.chunks > 1 and form_of(image) != CHUNKED
    assert image.threads <= most_threads(image.each, form_of(image))
