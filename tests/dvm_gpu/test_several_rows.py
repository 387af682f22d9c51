"""Narrow rows and rows of any width on a GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.cuda.launch import DeviceFused
from magjit_dvm.instructions import DType
from magjit_dvm.program import INDEXED, Output, Program
from tests.dvm.checking import cast, compute, load, output, tensor
from tests.dvm.test_joining import NUMBER
from tests.dvm_cuda import test_several_rows as rows
from tests.dvm_cuda.test_broadcasts import binary
from tests.dvm_cuda.test_encoder import layer_norm, masked_rms_norm, softmax, values
from tests.dvm_cuda.test_row_words import quick_softmax
from tests.dvm_gpu.test_gpu import BIG, check_gpu, check_image

pytestmark = pytest.mark.gpu

F16, BF16, F32, U8, I32 = DType.F16, DType.BF16, DType.F32, DType.U8, DType.I32
ANY_WIDTH = (121, 126, 127, 129, 130, 131, 255, 511, 513, 1021, 1022, 1023, 1025)

_many = rows.many


def many(cols: int) -> int:
    return _many(cols, BIG.multiprocessors)


def narrow(program: Program, given: list[torch.Tensor], each: int = 0) -> None:
    image = check_image(program, given, BIG)
    assert image is not None and image.lanes < 32 and each in (0, image.each)


@pytest.fixture(autouse=True)
def _run_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "narrow", narrow)
    monkeypatch.setattr(rows, "many", many)


@pytest.mark.parametrize("cols", rows.WIDTHS)
def test_norms_and_softmaxes(cols: int) -> None:
    rows.test_norms_and_softmaxes(cols)


@pytest.mark.parametrize("offset", [1, 2, 3, 6])
def test_rows_from_any_place(offset: int) -> None:
    rows.test_rows_from_any_place(offset)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [24, 63, 250])
def test_special_rows(dtype: DType, cols: int) -> None:
    rows.test_special_rows(dtype, cols)


@pytest.mark.parametrize("cols", [20, 61, 77, 197, 256])
def test_masks(cols: int) -> None:
    for dtype in (F16, F32):
        given = [values(dtype, 13, 16, 197, cols), values(dtype, 13, cols)]
        narrow(rows.masked_softmax(dtype), given)


def test_numbers_of_rows() -> None:
    for cols in (30, 64, 141):
        given = [values(F32, rows.many(cols), cols), values(F32, rows.many(cols), seed=1)]
        narrow(rows.sums_and_scaled(), given)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, I32, U8], ids=lambda one: one.text)
@pytest.mark.parametrize("first", [0, 1, 2, 3, 5])
def test_any_width(dtype: DType, first: int) -> None:
    """All that may be left of a row behind its last four, wherever it begins: what is stored."""
    for cols in (*range(1, 12), *ANY_WIDTH):
        count = 40
        x = values(dtype, count * cols + first)[first:].view(count, cols)
        if dtype in (I32, U8):
            name = "maximum"
            nodes = (load(0, dtype), load(1, dtype), compute(name, dtype, 0, 1))
            inputs = tensor(dtype, 0, 1), tensor(dtype, 1)
            program = Program(2, inputs, nodes, (output(2, 0, 1),))
            check_gpu(program, [x, values(dtype, cols, seed=1)])
            continue
        check_gpu(softmax(dtype), [x])
        weight = values(dtype, cols)
        check_gpu(layer_norm(dtype), [x, weight, weight])


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [2049, 4095, 4097, 5001, 8191, 20_001, 50_257])
def test_wide_rows(dtype: DType, cols: int) -> None:
    """Of several warps, each of which has a first and a last place of its own; in chunks."""
    x, weight = values(dtype, 150, cols), values(dtype, cols)
    check_gpu(quick_softmax(dtype), [x])
    check_gpu(masked_rms_norm(dtype), [x, weight])


@pytest.mark.parametrize("dtype", [F16, BF16, F32, I32, U8], ids=lambda one: one.text)
def test_vectors_make_rows(dtype: DType) -> None:
    for cols in (65, 129, 197, 1022, 1023, 4095):
        count = (1 << 17) // cols + 3
        given = [values(dtype, count, cols), values(F16 if dtype is U8 else dtype, cols)]
        if dtype is U8:
            nodes = (
                *(load(0, U8), load(1, F16), cast(F32, 1), cast(F32, 0)),
                *(compute("gt", DType.BOOL, 3, 2),),
            )
            inputs = tensor(U8, 0, 1), tensor(F16, 1)
            check_gpu(Program(2, inputs, nodes, (output(4, 0, 1),)), given)
            continue
        check_gpu(binary(dtype, ((0, 1), (1,)), 2), given)


@pytest.mark.parametrize("dtype", [F16, F32, U8], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [5, 67, 197, 1023])
def test_nothing_is_written_beside_rows(dtype: DType, cols: int) -> None:
    """What lies before and behind a part of a tensor is as it was."""
    part = Output(0, (0, 1), (0, 1), along=0, whole=1, offset=2)
    given = tensor(dtype, 0, 1), tensor(dtype, INDEXED, 1), NUMBER
    program = Program(2, given, (load(0, dtype),), (part,))
    for first in range(1, 5):
        x = values(dtype, 600, cols).cuda()
        whole = torch.full((610, cols), 7, dtype=dtype.torch, device="cuda")
        DeviceFused(program)(x, whole, first)
        assert torch.equal(whole[first : first + 600], x)
        assert bool((whole[:first] == 7).all()) and bool((whole[first + 600 :] == 7).all())
