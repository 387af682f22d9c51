"""Long rows on a GPU, in chunks: against the reference, and in the order of any launch."""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.cuda.forms import CHUNKED, form_of
from magjit_dvm.instructions import DType
from magjit_dvm.program import Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda import test_chunks as chunks
from tests.dvm_cuda import test_online as online
from tests.dvm_cuda.test_encoder import layer_norm, log_softmax, masked_rms_norm, softmax, values
from tests.dvm_cuda.test_row_words import quick_softmax, special_rows
from tests.dvm_cuda.test_tables import positions
from tests.dvm_gpu.test_gpu import BIG, check_gpu, check_image

pytestmark = pytest.mark.gpu

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32
WIDTHS = (24_576, 30_001, 32_000, 50_257, 65_536, 128_256, 151_936)
"""Of vocabularies, and around the sizes of chunks."""
ROWS = (34, 130, 1100, 1583)
"""Fewer than blocks and nearly as many; as many as give a block several, with some left.  Fewer of
the longest are ATen's."""


def long(program: Program, given: list[torch.Tensor]) -> None:
    image = check_image(program, given, BIG)
    assert image is not None and image.chunks > 1 and form_of(image) == CHUNKED


def softmax_backward(dtype: DType) -> Program:
    """(g − Σ g · y) · y: two tensors come through the stages."""
    nodes = (
        *(load(0, dtype), cast(F32, 0), load(1, dtype), cast(F32, 2), compute("mul", F32, 1, 3)),
        *(reduce("sum", F32, 4, 1), compute("sub", F32, 1, 5), compute("mul", F32, 6, 3)),
        cast(dtype, 7),
    )
    return Program(2, (tensor(dtype, 0, 1),) * 2, nodes, (output(8, 0, 1),))


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", WIDTHS)
def test_softmaxes(cols: int, dtype: DType) -> None:
    program = softmax(F32) if dtype is F32 else quick_softmax(dtype)
    for rows in ROWS:
        if rows * cols < 1 << 26:
            long(program, [values(dtype, rows, cols)])
    long(log_softmax(dtype), [values(dtype, 300, cols)])
    long(chunks.summed(dtype), [values(dtype, 1100 if cols < 40_000 else 200, cols)])


def test_a_single_row() -> None:
    long(softmax(F32), [values(F32, 1, 50_257)])


@pytest.mark.parametrize("dtype", [F16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [24_576, 30_001, 50_260, 100_004])
def test_norms_and_gradients(cols: int, dtype: DType) -> None:
    weight = values(dtype, cols)
    for rows in (35, 1100 if cols < 40_000 else 300):
        x = values(dtype, rows, cols)
        check_gpu(layer_norm(dtype), [x + 1, weight, weight])
        check_gpu(masked_rms_norm(dtype), [x, weight])
        long(softmax_backward(dtype), [values(dtype, rows, cols, seed=3), x])


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [30_000, 50_257])
def test_special_rows(cols: int, dtype: DType) -> None:
    x = special_rows(dtype, 9, cols)
    x[0, -1] = float("inf")
    long(softmax(F32) if dtype is F32 else quick_softmax(dtype), [x])
    long(chunks.summed(dtype), [x])


@pytest.mark.parametrize("dtype", [F16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [32_000, 50_257, 128_256])
def test_losses(cols: int, dtype: DType) -> None:
    forward = online.forward(dtype)
    for rows in (37, 140, 1100 if cols < 40_000 else 300):
        x, at = values(dtype, rows, cols), positions(cols, rows)
        at[::3] = -100
        long(forward, [x, at, x])


@pytest.mark.parametrize("dtype", [F16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [1028, 1500, 2048, 4099, 8192, 16_384])
def test_rows_that_are_read_once(cols: int, dtype: DType) -> None:
    """As many a block as it has warps for; the last tile has fewer."""
    for rows in (600, 2600):
        x, at = values(dtype, rows, cols), positions(cols, rows)
        at[::3] = -100
        long(online.forward(dtype), [x, at, x])
        long(chunks.summed(dtype), [x])


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [20, 49, 200, 300, 1000, 1024, 1027, 5000, 8192, 16_384])
def test_rows_in_one_stage(cols: int, dtype: DType) -> None:
    """Log-softmaxes, whose largest and whose sum are found together."""
    for rows in (9, 3000):
        x = special_rows(dtype, rows, cols)
        check_gpu(log_softmax(dtype), [x])
        check_gpu(online.of_products(dtype), [values(dtype, rows, cols)])
        check_gpu(chunks.summed(dtype), [x])


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_rows_from_any_place(offset: int) -> None:
    for cols in (24_576, 30_001):
        x = values(F16, 200 * cols + offset)[offset:].view(200, cols)
        long(quick_softmax(F16), [x])
