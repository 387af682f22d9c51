"""Narrow rows, of which a warp has several; rows and vectors whose columns do not come by four."""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.cuda.encode import Machine
from magjit_dvm.cuda.forms import FLAT, LANES, NORMS, WHOLE, form_of
from magjit_dvm.cuda.warps import WARPS, most_threads, part_of_warp
from magjit_dvm.cuda.words import WARP, Image
from magjit_dvm.instructions import DType
from magjit_dvm.program import Node, NodeKind, Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda.checking import check_words
from tests.dvm_cuda.test_broadcasts import binary
from tests.dvm_cuda.test_encoder import layer_norm, log_softmax, masked_rms_norm, softmax, values
from tests.dvm_cuda.test_row_words import quick_softmax, special_rows

F16, BF16, F32, U8, I32 = DType.F16, DType.BF16, DType.F32, DType.U8, DType.I32
ONE = Machine(multiprocessors=1)


def part(cols: int) -> tuple[int, int]:
    """Form and R."""
    found = part_of_warp(cols)
    assert found is not None
    return found


def many(cols: int, multiprocessors: int = 1) -> int:
    """Rows for two tiles of each block, and some of a third."""
    form, each = part(cols)
    return 2 * WARPS[each] * (WARP // LANES[form]) * multiprocessors + 6


WIDTHS = (17, 31, 49, 64, 65, 96, 100, 128, 129, 192, 197, 222, 254, 255, 256, 301, 384, 480)


def narrow(program: Program, given: list[torch.Tensor], each: int = 0) -> Image:
    """The image of a program whose rows share warps."""
    image = check_words(program, given, ONE)
    form = form_of(image) if image is not None else -1
    assert image is not None and LANES.get(form, 32) == image.lanes < 32, "rows have whole warps"
    assert image.group == 1 and image.cols <= image.lanes * image.each
    assert image.rows_of_tile == 32 // image.lanes * image.warps
    assert image.threads <= most_threads(image.each, form) and each in (0, image.each)
    return image


def masked_softmax(dtype: DType) -> Program:
    """Of scores (batch, head, row, column) and a mask that a batch has of its columns."""
    nodes = (
        *(load(0, dtype), cast(F32, 0), load(1, dtype), cast(F32, 2), compute("add", F32, 1, 3)),
        *(reduce("max", F32, 4, 3), compute("sub", F32, 4, 5), compute("exp", F32, 6)),
        *(reduce("sum", F32, 7, 3), compute("div", F32, 7, 8), cast(dtype, 9)),
    )
    if dtype is F32:
        nodes = (
            *(load(0, F32), load(1, F32), compute("add", F32, 0, 1), reduce("max", F32, 2, 3)),
            *(compute("sub", F32, 2, 3), compute("exp", F32, 4), reduce("sum", F32, 5, 3)),
            compute("div", F32, 5, 6),
        )
    inputs = tensor(dtype, 0, 1, 2, 3), tensor(dtype, 0, 3)
    return Program(4, inputs, nodes, (output(len(nodes) - 1, 0, 1, 2, 3),))


def sums_and_scaled(dtype: DType = F32) -> Program:
    """Results that have one number for a row, beside one that has all; a number for each row."""
    nodes = (
        *(load(0, dtype), load(1, F32), reduce("sum", F32, 0, 1), compute("mul", F32, 0, 1)),
        compute("sub", F32, 3, 2),
    )
    inputs = tensor(dtype, 0, 1), tensor(F32, 0)
    return Program(2, inputs, nodes, (output(2, 0), output(4, 0, 1)))


@pytest.mark.parametrize("cols", WIDTHS)
def test_norms_and_softmaxes(cols: int) -> None:
    for dtype in (F16, F32):
        x, weight = values(dtype, many(cols), cols), values(dtype, cols)
        _, each = part(cols)
        narrow(softmax(dtype), [x], each)
        narrow(layer_norm(dtype), [x + 4, weight, weight], each)
        narrow(masked_rms_norm(dtype), [x, weight], each)


@pytest.mark.parametrize(
    "offset", [1, 6, *(pytest.param(one, marks=pytest.mark.slow) for one in (2, 3))]
)
def test_rows_from_any_place(offset: int) -> None:
    """Each of a warp's rows begins otherwise, to be read and to be written."""
    for dtype in (F16, BF16, F32):
        for cols in (33, 62, 127, 196):
            rows = many(cols)
            whole = values(dtype, rows * cols + offset)[offset:].view(rows, cols)
            narrow(quick_softmax(dtype), [whole])
            narrow(log_softmax(dtype), [whole])


@pytest.mark.parametrize("dtype", [F16, BF16], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [24, 63, 250])
def test_special_rows(dtype: DType, cols: int) -> None:
    """What one row has of infinities and NaN is not another's of the same warp."""
    narrow(quick_softmax(dtype), [special_rows(dtype, many(cols), cols)])


@pytest.mark.parametrize("cols", [20, 61, 77, 197, 256])
def test_masks(cols: int) -> None:
    """Vectors that some rows share come by addresses of their own."""
    for dtype in (F16, F32):
        mask = values(dtype, 2, cols)
        image = narrow(
            masked_softmax(dtype), [values(dtype, 2, 5, many(cols) // 10 + 1, cols), mask]
        )
        ways = {word.first.split(".")[1] for word in image.words if word.first[:2] == "lt"}
        assert ("e" if cols % 4 else "v") in ways


@pytest.mark.parametrize("cols", [30, 64, 141])
def test_numbers_of_rows(cols: int) -> None:
    image = narrow(
        sums_and_scaled(), [values(F32, many(cols), cols), values(F32, many(cols), seed=1)]
    )
    assert {"s.in", "s.st.32"} <= {word.first for word in image.words}


def test_what_is_saved() -> None:
    """Scratch memory is as large as R has become."""
    norm = layer_norm(F16)
    nodes = (*norm.nodes[:-1], compute("tanh", F32, 18), compute("mul", F32, 19, 12))
    nodes = (*nodes, compute("add", F32, 20, 1), cast(F16, 21))
    program = Program(2, norm.inputs, nodes, (output(22, 0, 1),))
    for cols in (60, 130, 250):
        weights = [values(F16, cols)] * 2
        image = narrow(program, [values(F16, many(cols), cols), *weights])
        assert image.scratch >= 1


def test_few_rows_and_wide_ones_have_whole_warps() -> None:
    """A launch of few tiles may be one of a stack, whose kernel has no rows within warps."""
    for rows, cols in ((200, 64), (70, 481), (70, 1024)):
        image = check_words(softmax(F16), [values(F16, rows, cols)], ONE)
        assert image is not None and form_of(image) in (NORMS, WHOLE) and image.lanes == 32


def test_functions_without_a_case_have_whole_warps() -> None:
    nodes = (*softmax(F32).nodes, compute("asin", F32, len(softmax(F32).nodes) - 1))
    program = Program(2, (tensor(F32, 0, 1),), nodes, (output(len(nodes) - 1, 0, 1),))
    image = check_words(program, [values(F32, many(64), 64)], ONE)
    assert image is not None and form_of(image) == WHOLE


@pytest.mark.parametrize("cols", [65, 129, 1022, 1023])
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda one: one.text)
def test_vectors_make_rows(dtype: DType, cols: int) -> None:
    """Where columns do not come by four: a row's elements are side by side."""
    rows = -(-(1 << 17) // cols) + 3
    program = binary(dtype, ((0, 1), (1,)), 2)
    image = check_words(program, [values(dtype, rows, cols), values(dtype, cols)], ONE)
    assert image is not None and image.by_rows and image.cols == cols and image.weights == 1
    assert (image.lanes < 32) == (cols <= 480)


@pytest.mark.parametrize(
    ("shape", "offset"), [((2100, 64), 0), ((3000, 63), 0), ((100, 1023), 0), ((200, 1023), 1)]
)
def test_vectors_that_make_none(shape: tuple[int, int], offset: int) -> None:
    """By four, narrow, few, or from an odd place."""
    x, vector = values(F16, *shape), values(F16, shape[1] + offset)[offset:]
    image = check_words(binary(F16, ((0, 1), (1,)), 2), [x, vector], ONE)
    assert image is not None and not image.by_rows
    assert shape[1] % 4 or form_of(image) == FLAT


def test_vectors_of_two_dimensions() -> None:
    """The fewest columns that a vector has make the row; the other is seen through a descriptor."""
    program = binary(F16, ((0, 1, 2), (2,), (1, 2)), 3)
    given = [values(F16, 50, 41, 67), values(F16, 67), values(F16, 41, 67)]
    image = check_words(program, given, ONE)
    assert image is not None and (image.rows, image.cols) == (2050, 67)
    image = check_words(binary(F16, ((0, 1, 2), (1, 2)), 3), given[::2], ONE)
    assert image is not None and (image.rows, image.cols) == (50, 41 * 67)


def test_ints_and_bytes_of_odd_rows() -> None:
    """What has one byte or four an element is stored in aligned places, too."""
    for dtype in (U8, I32):
        given = [values(dtype, 2000, 67), values(F16, 67)]
        nodes = (
            *(load(0, dtype), load(1, F16), cast(F32, 1), cast(F32, 0)),
            *(compute("gt", DType.BOOL, 3, 2), Node(NodeKind.CONSTANT, dtype, number=3)),
            *(compute("select", dtype, 4, 0, 5),),
        )
        program = Program(2, (tensor(dtype, 0, 1), tensor(F16, 1)), nodes, (output(6, 0, 1),))
        image = check_words(program, given, ONE)
        assert image is not None and image.by_rows
