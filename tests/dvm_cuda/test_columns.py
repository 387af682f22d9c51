"""What rows have one number of, without reductions; and numbers that come again after some rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from magjit_dvm.cuda import columns as rules
from magjit_dvm.cuda.encode import encode
from magjit_dvm.cuda.machine import Machine
from magjit_dvm.cuda.words import Image
from magjit_dvm.instructions import DType
from magjit_dvm.program import Node, Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda.agreeing import check_encoders
from tests.dvm_cuda.checking import BIG, check_words
from tests.dvm_cuda.test_encoder import values
from tests.dvm_cuda.test_several_rows import many

F32, F16, BF16, I64, I32, U8 = DType.F32, DType.F16, DType.BF16, DType.I64, DType.I32, DType.U8
ALL, CHANNELS = (0, 1, 2), (1,)


def normed(dtype: DType, *numbers: tuple[DType, tuple[int, ...]], op: str = "relu") -> Program:
    """A tensor of three dimensions less the first of some numbers, times the others in turn."""
    nodes = [load(0, dtype), *(load(k, one) for k, (one, _) in enumerate(numbers, 1))]
    given = list(range(len(nodes)))
    for k, one in enumerate([dtype, *(one for one, _ in numbers)]):
        if one is not F32:
            given[k] = len(nodes)
            nodes.append(cast(F32, k))
    found = given[0]
    for k in range(1, len(given)):
        nodes.append(compute("sub" if k == 1 else "mul", F32, found, given[k]))
        found = len(nodes) - 1
    nodes.append(compute(op, F32, found))
    nodes += [cast(dtype, len(nodes) - 1)] if dtype is not F32 else []
    inputs = (tensor(dtype, *ALL), *(tensor(one, *dims) for one, dims in numbers))
    return Program(3, inputs, tuple(nodes), (output(len(nodes) - 1, *ALL),))


def given(program: Program, *sizes: int) -> list[torch.Tensor]:
    return [
        values(one.dtype, *(sizes[d] for d in one.dims), seed=k)
        for k, one in enumerate(program.inputs)
    ]


def image_of(program: Program, arguments: list[Any], machine: Machine = BIG) -> Image:
    """What both encoders make of a call."""
    assert check_encoders(program, arguments, machine) == "encoded"
    image = encode(program, arguments, machine).image
    assert image is not None
    return image


TWO = (F32, CHANNELS), (F32, CHANNELS)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [784, 787, 3136, 12544])
def test_numbers_of_channels(dtype: DType, cols: int) -> None:
    """A batch norm's: rows, which their numbers come with."""
    program = normed(dtype, *TWO)
    arguments = given(program, (1 << 20) // (64 * cols) + 1, 64, cols)
    image = check_words(program, arguments)
    assert image is not None and image.by_rows
    assert (image.cols, image.periods) == (cols, [64, 64])
    assert [one.first for one in image.words].count("s.in") == 2


@pytest.mark.parametrize("cols", [16, 25, 49, 64, 100, 196, 400])
def test_narrow_rows_of_channels(cols: int) -> None:
    """They share warps; as many elements as that is worth have rows for it."""
    for dtype in (F16, F32):
        program = normed(dtype, *TWO)
        arguments = given(program, (1 << 22) // (64 * cols) + 1, 64, cols)
        image = image_of(program, arguments)
        assert image.by_rows and image.lanes < 32 and image.periods == [64, 64]


@pytest.mark.parametrize(
    ("program", "sizes"),
    [
        pytest.param(normed(F16, *TWO), (20, 64, 512), id="few elements"),
        pytest.param(normed(F16, *TWO), (80, 512, 100), id="few elements of narrow rows"),
        pytest.param(normed(F16, *TWO), (2048, 512, 9), id="few columns"),
        pytest.param(normed(F16, *TWO), (2, 32, 40_000), id="many columns"),
        pytest.param(normed(F16, TWO[0]), (32, 64, 784), id="one number"),
        pytest.param(normed(F16, *TWO, op="log10"), (32, 64, 784), id="an operator of by"),
        pytest.param(normed(F16, *[TWO[0]] * 17), (32, 64, 784), id="more than 16 numbers"),
        pytest.param(normed(F16, TWO[0], (U8, CHANNELS)), (32, 64, 784), id="bytes"),
        pytest.param(normed(F16, *TWO, (I64, ALL)), (32, 64, 784), id="8 bytes an element"),
    ],
)
def test_what_is_left_without_rows(program: Program, sizes: tuple[int, ...]) -> None:
    assert not image_of(program, given(program, *sizes)).by_rows


def test_other_orders_of_memory_are_left_without_rows() -> None:
    """As operands that lie across one another, which have squares."""
    program = normed(F16, *TWO, (F16, ALL))
    x, m, s, y = given(program, 32, 64, 1024)
    assert image_of(program, [x, m, s, y]).by_rows
    across = values(F16, 1024, 64, 32).permute(2, 1, 0)
    assert not image_of(program, [x, m, s, across]).by_rows
    apart = values(F16, 32, 64, 2048)[:, :, ::2]
    assert not image_of(program, [x, m, s, apart]).by_rows
    part = values(F16, 32, 65, 1024)[:, 1:]  # rows, in another place each
    assert image_of(program, [x, m, s, part]).by_rows


def test_one_number_where_columns_do_not_come_by_four() -> None:
    program = normed(F16, TWO[0])
    assert image_of(program, given(program, 1400, 64, 49)).lanes < 32
    assert image_of(program, given(program, 32, 64, 785)).by_rows


def test_the_fewest_columns_that_numbers_share() -> None:
    """Of (N,) and (C,): both are numbers of rows of the latter's."""
    program = normed(F16, (F32, (0,)), (F32, CHANNELS))
    image = check_words(program, given(program, 16, 64, 1024))
    assert image is not None and image.cols == 1024
    assert image.periods == [64], "the other one is the same for rows side by side"


# -- numbers that come again --


def sums(number: DType, dims: tuple[int, ...] = CHANNELS) -> Program:
    """Of each row, less one number, times it."""
    nodes: list[Node] = [load(0, F32), load(1, number)]
    nodes += [cast(F32, 1)] if number is not F32 else []
    nodes += [compute("sub", F32, 0, len(nodes) - 1), compute("mul", F32, len(nodes), 0)]
    nodes.append(reduce("sum", F32, len(nodes) - 1, 2))
    inputs = tensor(F32, *ALL), tensor(number, *dims)
    return Program(3, inputs, tuple(nodes), (output(len(nodes) - 1, 0, 1),))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("number", [F32, I64, I32], ids=lambda one: one.text)
@pytest.mark.parametrize("channels", [32, 36, 100])
def test_numbers_that_come_again(number: DType, channels: int) -> None:
    """More rows in a tile than channels, and fewer; the last tile is not full."""
    for images, cols in ((5, 24), (2, 130), (2, 600)):
        program = sums(number)
        image = check_words(program, given(program, images, channels, cols))
        assert image is not None and image.periods == [channels]
        assert "s.in" in [one.first for one in image.words]


@pytest.mark.usefixtures("way")
def test_numbers_that_come_again_in_narrow_rows_and_in_chunks() -> None:
    program, norm = sums(F32), normed(F32, *TWO)
    for channels, cols in ((32, 30), (36, 49), (100, 100)):
        arguments = given(program, many(cols, BIG.multiprocessors) // channels + 1, channels, cols)
        assert image_of(program, arguments).lanes < 32
    arguments = given(program, 3, 32, 30_000)
    image = check_words(program, arguments)
    assert image is not None and image.chunks > 1 and image.periods == [32]
    assert check_words(norm, given(norm, 0, 64, 784)) is None


@pytest.mark.parametrize(
    ("channels", "dims", "first"),
    [
        pytest.param(33, CHANNELS, 0, id="16 bytes do not end with them"),
        pytest.param(16, CHANNELS, 0, id="few"),
        pytest.param(64, CHANNELS, 1, id="they begin within 16 bytes"),
        pytest.param(64, (0,), 0, id="the same for rows side by side"),
    ],
)
def test_what_comes_otherwise(channels: int, dims: tuple[int, ...], first: int) -> None:
    program = sums(F32, dims)
    x, number = given(program, 64, channels, 200)
    number = torch.cat([number, number])[first : first + len(number)]
    image = check_words(program, [x, number])
    assert image is not None and image.periods == []
    assert "s.ld.32" in [one.first for one in image.words]


def test_numbers_of_inner_dimensions() -> None:
    """Of two of three that rows have; not where another one is between them."""
    nodes = (load(0, F32), load(1, F32), compute("mul", F32, 0, 1), reduce("sum", F32, 2, 3))
    for dims, periods in (((1, 2), [60]), ((2,), []), ((0, 1, 2), [0]), ((0, 2), [])):
        inputs = tensor(F32, 0, 1, 2, 3), tensor(F32, *dims)
        program = Program(4, inputs, nodes, (output(3, 0, 1, 2),))
        image = check_words(program, given(program, 4, 3, 20, 300))
        assert image is not None and image.periods == periods


def test_limits_are_those_of_narrow_rows() -> None:
    """Rows that share warps would have a warp each, where there are fewer of them."""
    for cols in range(rules._LEAST_OF_NUMBERS, rules.OF_NARROW_ROWS[-1][0] + 1):
        least = rules._FEW_OF_NARROW // cols
        assert least >= many(cols, BIG.multiprocessors)
