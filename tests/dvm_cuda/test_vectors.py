"""Vectors that all rows share, without reductions: rows of them, in lanes that have something."""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.cuda import columns as rules
from magjit_dvm.cuda.forms import form_of
from magjit_dvm.instructions import DType
from magjit_dvm.program import Node, NodeKind, Program
from tests.dvm.checking import cast, compute, load, output, tensor
from tests.dvm_cuda.checking import check_words
from tests.dvm_cuda.test_columns import given, image_of, normed

F32, F16, BF16, U8 = DType.F32, DType.F16, DType.BF16, DType.U8
COLUMNS = (2,)
ONE, TWO = [(F32, COLUMNS)], [(F32, COLUMNS)] * 2


def elements(count: int, cols: int) -> tuple[int, int, int]:
    """Sizes of so many elements at least."""
    return -(-count // (2 * cols)), 2, cols


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [64, 256, 512, 1024, 1280])
def test_vectors_are_kept(dtype: DType, cols: int) -> None:
    """A batch norm's whose channels lie side by side, as much of it as the simulator bears."""
    program = normed(dtype, *TWO)
    image = image_of(program, given(program, *elements(1 << 23, cols)))
    assert image.by_rows and image.cols == cols
    assert [one.first for one in image.words].count("lt.w") == 2, "in shared memory"
    few = check_words(program, given(program, *elements(1 << 20, cols)))
    assert few is not None and few.by_rows is (cols > rules.OF_NARROW_ROWS[-1][0])


@pytest.mark.parametrize("cols", [32, 48, 64, 96, 320])
def test_several_vectors_of_narrow_rows(cols: int) -> None:
    """Also where some lanes have nothing."""
    program = normed(F16, *TWO)
    image = image_of(program, given(program, *elements(1 << 22, cols)))
    assert image.by_rows and image.lanes < 32


@pytest.mark.parametrize(
    ("cols", "rows"),
    [
        *((64, True), (96, True), (128, True), (384, True), (480, True), (512, True), (960, True)),
        *((1024, True), (1536, True), (2048, True), (3072, True), (4096, True), (8192, True)),
        *((32, False), (60, False), (72, False), (320, False), (1152, False), (1280, False)),
        (8256, False),
    ],
)
def test_one_vector_where_rows_fill_their_lanes(cols: int, rows: bool) -> None:
    """Of a function, for which memory waits."""
    program = normed(F16, *ONE, op="gelu")
    assert image_of(program, given(program, *elements(1 << 22, cols))).by_rows is rows
    assert not image_of(program, given(program, *elements(1 << 20, cols))).by_rows
    simple = normed(F16, *ONE)
    assert not image_of(simple, given(simple, *elements(1 << 22, cols))).by_rows


@pytest.mark.parametrize(
    ("program", "sizes"),
    [
        pytest.param(normed(F16, *TWO), elements((1 << 20) - 4096, 1024), id="few elements"),
        pytest.param(normed(F16, *TWO), elements((1 << 22) - 4096, 64), id="few in narrow rows"),
        pytest.param(normed(F16, *TWO), elements(1 << 22, 28), id="few columns"),
        pytest.param(normed(F16, *TWO), elements(1 << 22, 8196), id="many columns"),
        pytest.param(normed(F16, *TWO, op="log10"), elements(1 << 22, 512), id="by"),
        pytest.param(normed(F16, *[(U8, COLUMNS)] * 2), elements(1 << 22, 512), id="bytes"),
    ],
)
def test_what_is_left_without_rows(program: Program, sizes: tuple[int, ...]) -> None:
    assert not image_of(program, given(program, *sizes)).by_rows


def test_vectors_that_are_not_aligned_or_lie_otherwise() -> None:
    program = normed(F16, *TWO)
    x, *vectors = given(program, *elements(1 << 22, 512))
    assert image_of(program, [x, *vectors]).by_rows
    shifted = [torch.rand(516)[k : 512 + k] for k in (1, 2)]
    assert not image_of(program, [x, *shifted]).by_rows
    apart = [torch.rand(1024)[::2] for _ in range(2)]
    assert not image_of(program, [x, *apart]).by_rows
    across = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert image_of(program, [across, *vectors]).by_rows, "whatever the order of rows is"


def masked_gradient() -> Program:
    """dx = (y > 0 ? dy : 0) · scale + x · slope + shift."""
    nodes = (
        *(load(0, F16), load(1, F16), load(2, F16), load(3, F32), load(4, F32), load(5, F32)),
        *(cast(F32, 0), cast(F32, 1), cast(F32, 2), Node(NodeKind.CONSTANT, F32, number=0.0)),
        *(compute("gt", DType.BOOL, 8, 9), compute("select", F32, 10, 6, 9)),
        *(compute("mul", F32, 11, 3), compute("mul", F32, 7, 4), compute("add", F32, 12, 13)),
        *(compute("add", F32, 14, 5), cast(F16, 15)),
    )
    whole, vector = tensor(F16, 0, 1), tensor(F32, 1)
    return Program(2, (whole,) * 3 + (vector,) * 3, nodes, (output(16, 0, 1),))


@pytest.mark.parametrize("cols", [64, 512, 1152, 2048])
def test_gradients_of_norms(cols: int) -> None:
    program = masked_gradient()
    image = image_of(program, given(program, (1 << 23) // cols, cols))
    assert image.by_rows and sum(one.first.startswith("lt.w") for one in image.words) >= 2
    if cols > 480:
        assert check_words(program, given(program, (1 << 20) // cols + 1, cols)) is not None


@pytest.mark.parametrize(("cols", "each"), [(1152, 24), (1280, 24), (1536, 24), (1024, 32)])
def test_lanes_without_elements_are_few(cols: int, each: int) -> None:
    """R = 64 would leave a quarter to a half of them without any."""
    program = normed(F16, *TWO)
    image = image_of(program, given(program, *elements(1 << 25, cols)))
    assert image.each == each and form_of(image) is not None
    assert image.cols * 4 >= 3 * image.group * image.slice
