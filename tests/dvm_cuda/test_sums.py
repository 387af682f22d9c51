"""Sums across rows: beside what is computed row by row, and alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from magjit_dvm.cuda.encode import Machine, encode
from magjit_dvm.cuda.forms import ALONE
from magjit_dvm.cuda.interpreter import source
from magjit_dvm.cuda.parts import MOST_SUMS, SUMS_SOURCE
from magjit_dvm.cuda.warps import each_of
from magjit_dvm.instructions import DType
from magjit_dvm.program import ACROSS, Node, NodeKind, Output, Program
from magjit_dvm.stacking import MOST
from magjit_dvm.vm import NotEncodable
from tests.dvm.checking import compute, load, output, tensor
from tests.dvm_cuda import checking
from tests.dvm_cuda.checking import check_words

F16, F32, BF16 = DType.F16, DType.F32, DType.BF16
FEW = Machine(multiprocessors=3)
"""A block has several tiles of few rows."""


def across(arg: int, *rows: int) -> Node:
    return Node(NodeKind.REDUCE, F32, (arg,), "sum", aux=ACROSS, dims=frozenset(rows))


def row_sum(arg: int, *columns: int) -> Node:
    return Node(NodeKind.REDUCE, F32, (arg,), "sum", dims=frozenset(columns))


def cast(arg: int, dtype: DType) -> Node:
    return Node(NodeKind.CAST, dtype, (arg,))


def drawn(dtype: DType, *shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=made).to(dtype.torch)


def alone(dtype: DType) -> Program:
    """The sum of one tensor."""
    nodes = load(0, dtype), cast(0, F32), across(1, 0), cast(2, dtype)
    return Program(2, (tensor(dtype, 0, 1),), nodes, (output(3, 1),))


def beside_rows(dtype: DType) -> Program:
    """y = x * w - its row's sum; the sums of y and of x across rows, and y itself."""
    nodes = (
        *(load(0, dtype), cast(0, F32), load(1, F32), compute("mul", F32, 1, 2)),
        *(row_sum(3, 1), compute("sub", F32, 3, 4), across(5, 0), cast(6, dtype)),
        *(cast(5, dtype), across(1, 0)),
    )
    outputs = output(8, 0, 1), output(7, 1), output(9, 1)
    return Program(2, (tensor(dtype, 0, 1), tensor(F32, 0)), nodes, outputs)


SHAPES = ((7, 300), (60, 256), (2, 128), (19, 1500), (9, 131), (23, 64))


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("shape", SHAPES)
def test_beside_rows(shape: tuple[int, int], dtype: DType, way: str) -> None:
    if way == "PTX" and shape[0] * shape[1] > 6000:
        shape = shape[0] // 3 + 1, shape[1]
    x, w = drawn(dtype, *shape), drawn(F32, shape[0], seed=1)
    image = check_words(beside_rows(dtype), [x, w], FEW)
    assert image is not None and image.parts is not None
    assert len(image.parts.results) == 2 and image.parts.rows <= shape[0]


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("shape", SHAPES)
def test_alone(shape: tuple[int, int], dtype: DType) -> None:
    image = check_words(alone(dtype), [drawn(dtype, *shape)], FEW)
    assert image is not None
    words = [one.first for one in image.words]
    assert words[1:] == ["acc", "end"]
    assert not any(one.startswith("row.") for one in words)


def test_tiles_that_a_row_shares_with_a_tensor() -> None:
    """Unaligned, beside a vector that all rows share; rows of two dimensions."""
    nodes = (
        *(load(0, F16), cast(0, F32), load(1, F16), cast(2, F32), compute("mul", F32, 1, 3)),
        *(compute("exp", F32, 4), across(5, 0, 1), across(4, 0, 1), cast(5, F16)),
    )
    outputs = output(8, 0, 1, 2), output(6, 2), output(7, 2)
    program = Program(3, (tensor(F16, 0, 1, 2), tensor(F16, 2)), nodes, outputs)
    whole = drawn(F16, 40 * 9 * 140 + 3)
    for first in (0, 3):
        x = whole[first : first + 40 * 9 * 140].view(40, 9, 140)
        image = check_words(program, [x, drawn(F16, 140, seed=1)], FEW)
        assert image is not None
        assert image.weights == 1 and image.parts is not None


def test_one_row_is_its_own_sum() -> None:
    image = check_words(alone(F16), [drawn(F16, 1, 300)])
    assert image is not None and image.parts is None


def test_columns_of_several_dimensions() -> None:
    nodes = load(0, F32), compute("neg", F32, 0), across(1, 0), row_sum(1, 1, 2)
    outputs = output(2, 1, 2), output(3, 0)
    program = Program(3, (tensor(F32, 0, 1, 2),), nodes, outputs)
    assert check_words(program, [drawn(F32, 31, 12, 20)], FEW)
    turned = replace(program, outputs=(Output(2, (1, 2), (1, 0)), output(3, 0)))
    with pytest.raises(NotEncodable, match="lies otherwise"):
        encode(turned, [drawn(F32, 31, 12, 20)], FEW)


def refused(nodes: tuple[Node, ...], *outputs: Output, shape: tuple[int, ...] = (40, 256)) -> str:
    dims = tuple(range(len(shape)))
    program = Program(len(shape), (tensor(F32, *dims),), nodes, outputs)
    with pytest.raises(NotEncodable) as found:
        encode(program, [drawn(F32, *shape)], FEW)
    checking.check_encoders(program, [drawn(F32, *shape)], FEW)
    return str(found.value)


def test_refusals() -> None:
    x = load(0, F32)
    assert "long rows" in refused((x, across(0, 0)), output(1, 1), shape=(3, 70000))
    others = x, across(0, 0), row_sum(0, 2)
    found = refused(others, output(1, 1, 2), output(2, 0, 1), shape=(4, 8, 64))
    assert found == "sums across rows of other columns"
    several = x, across(0, 0), across(0, 1)
    assert "different rows" in refused(several, output(1, 1), output(2, 0))
    assert "other columns" in refused((x, across(0, 0, 1)), output(1))
    parts = [Output(1, (1,), (0,), k - 1, 0, k, 2) for k in range(2)]
    assert "part of another" in refused((x, across(0, 0)), *parts)
    made = (x, *(compute("neg", F32, k) for k in range(MOST_SUMS)))
    many = tuple(across(k, 0) for k in range(MOST_SUMS + 1))
    outputs = [output(len(made) + k, 1) for k in range(MOST_SUMS + 1)]
    assert "too many sums" in refused((*made, *many), *outputs)


def test_parts_are_those_of_blocks() -> None:
    """Whatever blocks there are."""
    x = drawn(F32, 50, 256)
    for count in (1, 2, 7, 132):
        image = check_words(alone(F32), [x], Machine(multiprocessors=count))
        assert image is not None and image.parts is not None
        assert image.parts.rows == image.blocks == min(count, image.tiles)
        assert image.parts.blocks == 32


def test_the_second_kernel_is_given_where_parts_and_results_are() -> None:
    image = encode(beside_rows(F16), [drawn(F16, 40, 256), drawn(F32, 40)], FEW).image
    assert image is not None and image.parts is not None
    parts = image.parts
    packed = parts.pack(4096, [0, 0, 111, 222, 333])
    places = np.frombuffer(packed, np.uint64).reshape(2, 4)[:, :2].tolist()
    assert places == [[4096, 222], [4096 + 4 * parts.rows * 256, 333]]
    numbers = np.frombuffer(packed, np.uint32).reshape(2, 8)[:, 4:].tolist()
    assert numbers == [[parts.rows, 256, 1, 32], [parts.rows, 256, 0, 64]]
    assert f"Sum of[{MOST * MOST_SUMS}]" in SUMS_SOURCE and parts.blocks == 64


def test_room_is_kept_for_sums() -> None:
    """Wide rows have two stages and their sums beside them as long as that is possible."""
    for cols in (512, 4096, 8192, 12000):
        image = encode(alone(F16), [torch.zeros(2000, cols, dtype=torch.float16)], Machine()).image
        assert image is not None and image.stages >= 2 and image.chunks == 1


def test_kernels_know_sums() -> None:
    assert all("h.sums" in source(each=(each,)) for each in each_of(ALONE))


def test_two_results_of_one_sum() -> None:
    nodes = (
        *(load(0, F32), compute("exp", F32, 0), compute("add", F32, 1, 1), across(2, 0)),
        compute("sin", F32, 2),
    )
    program = Program(2, (tensor(F32, 0, 1),), nodes, (output(3, 1), output(3, 1), output(4, 0, 1)))
    image = check_words(program, [drawn(F32, 40, 256)], FEW)
    assert image is not None and image.sums == 2


def test_most_tiles_are_the_same_each_time() -> None:
    """The others are drawn in runs: whoever draws one, what it adds up is its own."""
    x = torch.zeros(4000, 512)
    image = encode(alone(F32), [x], FEW).image
    assert image is not None and image.parts is not None and image.draws
    assert image.fixed % image.blocks == 0 and 0.8 < image.fixed / image.tiles < 1
    assert image.parts.rows == image.blocks + -(-(image.tiles - image.fixed) // 2**image.shift)
    few = encode(alone(F32), [x[:600]], FEW).image
    assert few is not None and few.tiles > few.blocks
    assert few.fixed == few.tiles and not few.draws
    negated = Program(
        2, (tensor(F32, 0, 1),), (load(0, F32), compute("neg", F32, 0)), (output(1, 0, 1),)
    )
    image = encode(negated, [x], FEW).image
    assert image is not None and image.draws


def test_sums_of_runs() -> None:
    image = check_words(beside_rows(F16), [drawn(F16, 2000, 256), drawn(F32, 2000, seed=1)], FEW)
    assert image is not None and image.draws and image.shift > 0
