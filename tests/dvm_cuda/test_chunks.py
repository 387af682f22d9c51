"""Long rows: in chunks, several rows a block, in as few passes as can be."""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.cuda.encode import Machine, encode
from magjit_dvm.cuda.forms import ALONE, CHUNKED, form_of
from magjit_dvm.cuda.warps import most_threads
from magjit_dvm.cuda.words import Image
from magjit_dvm.instructions import DType
from magjit_dvm.program import Node, NodeKind, Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda.checking import check_words
from tests.dvm_cuda.test_encoder import layer_norm, log_softmax, masked_rms_norm, softmax, values
from tests.dvm_cuda.test_row_words import quick_softmax, special_rows, words_of
from tests.dvm_cuda.test_tables import loss, positions

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32
TIGHT = Machine(1, shared_bytes=115_000)
COLS = 9_732
"""Float32 of so many columns comes in chunks there."""


def long(program: Program, given: list[torch.Tensor], machine: Machine = TIGHT) -> Image:
    """The image of a program whose rows are in chunks."""
    image = check_words(program, given, machine)
    assert image is not None and form_of(image) == CHUNKED and image.chunks > 1
    assert image.threads <= most_threads(image.each, CHUNKED)
    assert image.warps == image.rows_of_tile * image.group
    return image


def summed(dtype: DType) -> Program:
    """The logarithm of the sum of exponentials, by which losses begin; the sum itself."""
    nodes = (
        *(load(0, dtype), cast(F32, 0), reduce("max", F32, 1, 1), compute("sub", F32, 1, 2)),
        *(compute("exp", F32, 3), reduce("sum", F32, 4, 1), compute("log", F32, 5)),
        compute("add", F32, 6, 2),
    )
    return Program(2, (tensor(dtype, 0, 1),), nodes, (output(7, 0), output(5, 0)))


def masked(dtype: DType) -> Program:
    """Of a third of x less a vector: what is reduced is computed in each pass."""
    nodes = (
        *(load(0, dtype), cast(F32, 0), Node(NodeKind.CONSTANT, F32, number=1 / 3)),
        *(compute("mul", F32, 1, 2), load(1, dtype), cast(F32, 4), compute("sub", F32, 3, 5)),
        *(reduce("max", F32, 6, 1), compute("sub", F32, 6, 7), compute("exp", F32, 8)),
        *(reduce("sum", F32, 9, 1), compute("reciprocal", F32, 10), compute("mul", F32, 9, 11)),
        cast(dtype, 12),
    )
    return Program(2, (tensor(dtype, 0, 1), tensor(dtype, 1)), nodes, (output(13, 0, 1),))


@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("cols", [COLS, COLS + 1])
def test_softmaxes_take_two_passes(cols: int, rows: int, way: str) -> None:
    """The largest and the sum are of one pass; what is made again is not saved."""
    x = values(F32, rows, cols)
    for program in (softmax(F32), log_softmax(F32)):
        image = long(program, [x])
        names = words_of(image)
        assert len(image.first) == 2 and names.count("red.f.softmax") == 1
        assert "fin.f.softmax" in names and "red.f.max" not in names
        assert image.each == (24 if cols % 4 else 64) and (image.keeps or cols % 4)
        if program == softmax(F32):  # of the other, differences are saved, which are a result
            assert "save" not in names and image.rows_of_tile == (
                1 if rows < 8 else 3 if cols % 4 else 2
            )


@pytest.mark.parametrize(
    "dtype", [F16, pytest.param(BF16, marks=pytest.mark.slow)], ids=["f16", "bf16"]
)
def test_of_16_bits(dtype: DType, way: str) -> None:
    machine = Machine(1, shared_bytes=150_000)
    for cols in (15_364, 15_363):
        image = long(quick_softmax(dtype), [values(dtype, 13, cols)], machine)
        assert image.rows_of_tile == (3 if cols % 4 else 2) and image.keeps
    image = long(masked(dtype), [values(dtype, 5, 15_364), values(dtype, 15_364)], machine)
    assert words_of(image).count("red.f.softmax") == 1


def test_stages_keep_a_row_if_they_can() -> None:
    """Where one is read once, there is nothing to keep."""
    x = values(F32, 20, COLS)
    image = long(softmax(F32), [x])
    assert image.keeps and image.stages >= image.chunks and image.rows_of_tile == 2
    image = long(softmax(F32), [values(F32, 20, 30_000)])
    assert not image.keeps and image.row_bytes * image.rows_of_tile == image.stage_bytes
    image = long(summed(F32), [x])
    assert not image.keeps and len(image.first) == 1


def test_rows_that_a_cache_has_no_room_for() -> None:
    """One of many blocks at a time, unless rows are read once."""
    for blocks, rows in ((1, 2), (400, 1)):
        x = torch.zeros(8 * blocks, 32_000, dtype=torch.float16)
        for program, most in ((quick_softmax(F16), rows), (summed(F16), 8)):
            image = encode(program, [x], Machine(blocks)).image
            assert image is not None and image.rows_of_tile == most


@pytest.mark.parametrize("cols", [COLS, COLS + 3])
def test_special_rows(cols: int, way: str) -> None:
    """Infinities, NaN, the smallest number alone in a row: in one chunk or in all."""
    x = special_rows(F32, 9, cols)
    x[0, -1] = float("inf")
    long(softmax(F32), [x])
    long(summed(F32), [x])


def test_losses_look_up_what_is_in_a_cache(way: str) -> None:
    """Once the row has been read; classes come through the stages."""
    rows, cols = 9, 15_400
    scores, program = values(F16, rows, cols), loss()
    forward = Program(2, program.inputs, program.nodes[:18], program.outputs[:1])
    image = check_words(forward, [scores, positions(cols, rows), scores], Machine(1))
    assert image is not None and form_of(image) == CHUNKED and image.each == 32
    names = words_of(image)
    assert names.index("red.f.softmax") < names.index("s.at.f16") and image.row_inputs == 1


@pytest.mark.parametrize("cols", [COLS, COLS + 2])
def test_norms(cols: int, way: str) -> None:
    weight = values(F32, cols)
    for rows in (3, 9) if way == "simulator" else (9,):
        x = values(F32, rows, cols) + 2
        image = long(layer_norm(F32), [x, weight, weight])
        assert len(image.first) == 3
        long(masked_rms_norm(F32), [x, weight])


def test_other_words_have_the_kernel_of_all() -> None:
    nodes = (
        *(load(0, F32), compute("asin", F32, 0), reduce("sum", F32, 1, 1)),
        compute("sub", F32, 1, 2),
    )
    program = Program(2, (tensor(F32, 0, 1),), nodes, (output(3, 0, 1),))
    image = check_words(program, [values(F32, 9, COLS)], TIGHT)
    assert image is not None and image.chunks > 1 and form_of(image) == ALONE
    assert image.rows_of_tile == 1
