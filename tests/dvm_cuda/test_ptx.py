"""The inner loop's PTX does what words mean: loads, stores, reductions, scratch, jumps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from magjit_dvm.cuda.encode import Machine
from magjit_dvm.cuda.functions import FLOATS, INTS
from magjit_dvm.instructions import DType
from magjit_dvm.program import Program
from tests.dvm.checking import compute, load, output, tensor
from tests.dvm_cuda import checking
from tests.dvm_cuda import test_draws as draws
from tests.dvm_cuda import test_encoder as words
from tests.dvm_cuda import test_row_words as row_words
from tests.dvm_cuda import test_several_rows as rows
from tests.dvm_cuda import test_weights as kept
from tests.dvm_cuda.ptx_machine import run_ptx

F32, F16, BF16, U8, BOOL, I64 = (
    *(DType.F32, DType.F16, DType.BF16),
    *(DType.U8, DType.BOOL, DType.I64),
)
TINY = Machine(multiprocessors=1, shared_bytes=120000)


@pytest.fixture(autouse=True)
def _by_ptx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is simulated elsewhere runs as PTX here."""
    monkeypatch.setattr(checking, "run_image", run_ptx)
    yield


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda one: one.text)
@pytest.mark.parametrize("shape", [(3, 7), (2, 256), (2, 300), (1, 1030)])
def test_rows(dtype: DType, shape: tuple[int, int]) -> None:
    x, weight = words.values(dtype, *shape), words.values(dtype, shape[1])
    checking.check_words(words.softmax(dtype), [x])
    checking.check_words(words.log_softmax(dtype), [x])
    checking.check_words(words.layer_norm(dtype), [x, weight, weight])


@pytest.mark.parametrize("dtype", [F32, F16], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [2100, 5000, 6144])
def test_rows_of_several_warps(dtype: DType, cols: int) -> None:
    """Few and many warps meet differently; the last one may have no element, or some."""
    x, weight = words.values(dtype, 2, cols) + 3, words.values(dtype, cols)
    image = checking.check_words(words.layer_norm(dtype), [x, weight, weight])
    assert image is not None and image.group > 2 and image.chunks == 1
    assert "row.f.norm" in row_words.words_of(image)
    assert "row.f.stat" in row_words.words_of(checking.check_words(row_words.spread(dtype), [x]))
    checking.check_words(words.softmax(dtype), [x])
    if dtype is not F32:
        image = checking.check_words(row_words.quick_softmax(dtype), [x])
        assert "row.f.softmax" in row_words.words_of(image)


@pytest.mark.parametrize(
    "shape",
    [*words.WIDE[:5:2], *(pytest.param(one, marks=pytest.mark.slow) for one in words.WIDE[1:5:2])],
)
def test_wide_rows_in_one_stage(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "BF16", F16)
    words.test_wide_rows_in_one_stage(shape)


def test_rows_of_three_quarters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "BF16", F16)
    words.test_rows_of_three_quarters((46, 700))


@pytest.mark.parametrize("cols", [250, 768, 1024, pytest.param(4100, marks=pytest.mark.slow)])
def test_softmaxes(cols: int) -> None:
    row_words.test_a_softmax_is_one_word(F16, cols)


def test_norms_of_equal_elements_are_zero() -> None:
    row_words.test_norms_of_equal_elements_are_zero(768)
    row_words.test_norms_of_equal_elements_are_zero(5000)


def test_statistics_about_a_large_mean() -> None:
    row_words.test_statistics_about_a_large_mean(1024)


@pytest.mark.parametrize("cols", [250, 2050])
def test_special_rows(cols: int) -> None:
    row_words.test_special_rows(cols)


def test_vectors_of_columns() -> None:
    words.test_vectors_of_columns_that_are_not_aligned()


@pytest.mark.parametrize("cols", [96, 1024, 2056, pytest.param(5000, marks=pytest.mark.slow)])
def test_vectors_that_are_kept(cols: int) -> None:
    """Few rows for the simulation; a single block keeps them all the same."""
    rows = 25 if cols > 2000 else 70
    x, first, second = words.values(F16, rows, cols), *(words.values(F16, cols) for _ in range(2))
    image = checking.check_words(words.layer_norm(F16), [x, first, second], kept.ONE)
    assert image is not None and image.weights == 2
    checking.check_words(kept.scaled(F16, "mul", "sub", "add"), [x, first, second, first], kept.ONE)


def test_chunks() -> None:
    image = checking.check_words(words.softmax(F16), [words.values(F16, 1, 15500)], TINY)
    assert image is not None and image.chunks > 1


@pytest.mark.parametrize("dtype", [F32, F16, U8], ids=lambda one: one.text)
def test_views(dtype: DType) -> None:
    words.test_views(dtype)


def test_casts() -> None:
    words.test_casts()


@pytest.mark.parametrize(
    "name",
    [
        *("add", "where", "maximum", "sub", "lt", "sin", "pow", "gelu"),
        *("floor_div", "fmod", "remainder", "asin", "log2"),
    ],
)
def test_instructions(name: str) -> None:
    words.test_instructions("select" if name == "where" else name, F32)
    if name in INTS:
        words.test_instructions(name, U8)
    assert name in FLOATS or name == "where"


def test_a_large_tile() -> None:
    """R = 32, and a tail."""
    x = words.values(F16, 3000)
    nodes = (load(0, F16), compute("copy", F16, 0))
    program = Program(1, (tensor(F16, 0),), nodes, (output(1, 0),))
    image = checking.check_words(program, [x], Machine(multiprocessors=1))
    assert image is not None and image.each == 32 and image.elements % image.slice
    assert checking.check_words(program, [x[1:]], Machine(multiprocessors=1)) is not None
    assert isinstance(x, torch.Tensor)


@pytest.mark.parametrize("cols", [5, 8, 161, 162, 259, 300, 1023])
@pytest.mark.parametrize("fours", [1, 2])
def test_numbers_that_are_drawn(cols: int, fours: int) -> None:
    given = draws.given(3, cols, shares=512 * draws.FOURS + fours)
    checking.check_words(draws.dropped(normed=True), given)
    checking.check_words(draws.dropped(), given)


@pytest.mark.parametrize("dtype", [F32, F16, BF16, U8], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [1, 2, 3, 5, 6, 7, 127, 129, 254, 255, 257, 1021, 1022])
def test_rows_that_are_not_aligned(dtype: DType, cols: int) -> None:
    """Each row begins at another place within four elements."""
    nodes = (load(0, dtype), compute("copy", dtype, 0))
    if dtype in (F32, F16, BF16):
        x = words.values(dtype, 9, cols)
        checking.check_words(words.softmax(dtype), [x])
    program = Program(2, (tensor(dtype, 0, 1),), nodes, (output(1, 0, 1),))
    x = torch.randint(0, 99, (1, cols + 3)).to(dtype.torch)[:, 3:]
    checking.check_words(program, [x])


@pytest.mark.parametrize(
    "cols", [49, 130, 301, *(pytest.param(one, marks=pytest.mark.slow) for one in (31, 67, 254))]
)
def test_several_rows_of_a_warp(cols: int) -> None:
    """Some of the last warp are not there."""
    for dtype in (F16, F32):
        x, weight = words.values(dtype, rows.many(cols), cols), words.values(dtype, cols)
        rows.narrow(words.softmax(dtype), [x])
        rows.narrow(words.layer_norm(dtype), [x, weight, weight])
        whole = words.values(dtype, x.numel() + 1)[1:].view(x.shape)
        rows.narrow(words.log_softmax(dtype), [whole])


def test_numbers_and_masks_of_several_rows() -> None:
    rows.test_numbers_of_rows(45)
    rows.test_masks(61)
    rows.test_masks(20)
