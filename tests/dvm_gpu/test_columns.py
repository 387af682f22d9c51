"""Rows of what has numbers in common, on a GPU, against the reference."""

from __future__ import annotations

import pytest

from magjit_dvm.instructions import DType
from tests.dvm_cuda import test_columns as columns
from tests.dvm_cuda.test_columns import CHANNELS, given, normed, sums
from tests.dvm_cuda.test_several_rows import many
from tests.dvm_gpu.test_gpu import BIG, check_image

pytestmark = pytest.mark.gpu

F16, BF16, F32, I32, I64 = DType.F16, DType.BF16, DType.F32, DType.I32, DType.I64


@pytest.fixture(autouse=True)
def _run_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "check_words", check_image)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [784, 787, 3136, 12544])
def test_numbers_of_channels(dtype: DType, cols: int) -> None:
    columns.test_numbers_of_channels(dtype, cols)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [16, 25, 49, 100, 196, 400])
def test_narrow_rows_of_channels(dtype: DType, cols: int) -> None:
    """In tiles of up to 152 rows: of fewer channels, of as many, and of more."""
    for channels in (32, 76, 152, 512):
        for numbers in (columns.TWO, (*columns.TWO, (dtype, CHANNELS), (F32, (0,)))):
            program = normed(dtype, *numbers)
            images = (1 << 22) // (channels * cols) + 1
            image = check_image(program, given(program, images, channels, cols))
            assert image is not None and image.lanes < 32 and image.periods[:1] == [channels]


def test_the_fewest_columns_that_numbers_share() -> None:
    columns.test_the_fewest_columns_that_numbers_share()


@pytest.mark.parametrize("number", [F32, I64, I32], ids=lambda one: one.text)
@pytest.mark.parametrize("channels", [32, 36, 100, 256])
def test_numbers_that_come_again(number: DType, channels: int) -> None:
    """Also where blocks have many tiles, and draw them."""
    columns.test_numbers_that_come_again(number, channels)
    for cols in (49, 130, 600, 2100):
        program = sums(number)
        rows = many(cols, BIG.multiprocessors) if cols < 480 else 9000
        image = check_image(program, given(program, rows // channels + 1, channels, cols))
        assert image is not None and image.periods == [channels]


def test_numbers_that_come_again_in_narrow_rows_and_in_chunks() -> None:
    program = sums(F32)
    for channels, cols in ((32, 30), (36, 49), (100, 100)):
        images = many(cols, BIG.multiprocessors) // channels + 1
        check_image(program, given(program, images, channels, cols))
    for images in (3, 60):
        image = check_image(program, given(program, images, 32, 30_000))
        assert image is not None and image.chunks > 1 and image.periods == [32]


def test_numbers_of_inner_dimensions() -> None:
    columns.test_numbers_of_inner_dimensions()
