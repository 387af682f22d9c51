"""Words on the numbers of rows, for a batch of rows at once: a tail behind what reads them."""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.cuda.encode import Machine, encode
from magjit_dvm.cuda.forms import BATCHED, NORMS, READ_ONCE, form_of
from magjit_dvm.cuda.words import NO_WORD, Image
from magjit_dvm.instructions import DType
from magjit_dvm.program import INDEXED, Node, NodeKind, Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda.checking import check_words
from tests.dvm_cuda.test_chunks import summed
from tests.dvm_cuda.test_encoder import log_softmax, values
from tests.dvm_cuda.test_online import forward
from tests.dvm_cuda.test_row_words import special_rows
from tests.dvm_cuda.test_tables import index, iota, number, positions

F16, BF16, F32, I64, BOOL = DType.F16, DType.BF16, DType.F32, DType.I64, DType.BOOL
ONE = Machine(1)
ROWS = 40


def parts_of(image: Image | None) -> tuple[list[str], list[str]]:
    """Operators before the tail, and its own."""
    assert image is not None and image.tail != NO_WORD
    names = [word.first for word in image.words]
    return names[: image.tail], names[image.tail :]


def distances(dtype: DType = F16) -> Program:
    """The mean of a row about a number of it, and the deviation about that: of two reductions."""
    nodes = (
        *(load(0, dtype), cast(F32, 0), load(1, F32), compute("sub", F32, 1, 2)),
        *(reduce("sum", F32, 3, 1), Node(NodeKind.NUMEL, F32, dims=frozenset({1}))),
        *(compute("div", F32, 4, 5), compute("sub", F32, 3, 6), compute("mul", F32, 7, 7)),
        *(reduce("sum", F32, 8, 1), compute("div", F32, 9, 5), compute("sqrt", F32, 10)),
        *(load(2, F32), compute("mul", F32, 11, 12)),
    )
    inputs = tensor(dtype, 0, 1), tensor(F32, 0), tensor(F32, 0)
    return Program(2, inputs, nodes, (output(6, 0), output(13, 0)))


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [500, 512, 700, 1000, 1024])
def test_losses(cols: int, dtype: DType, way: str) -> None:
    """Classes, and their elements, are asked for when all rows of a batch have been read."""
    x = values(dtype, ROWS, cols)
    image = check_words(forward(dtype), [x, positions(cols, ROWS), x], ONE)
    before, tail = parts_of(image)
    assert image is not None and form_of(image) == BATCHED and image.chunks == 1
    assert {"red.f.softmax", "fin.f.softmax", "end"} < set(before)
    assert not any(name.startswith("s.") for name in before)
    assert any(name.startswith("s.at.") for name in tail) and "s.ld.i64s" in tail
    assert len(image.inputs) == 1 and image.batched == 2


@pytest.mark.parametrize("cols", [1025, 2048, 9000])
def test_losses_of_long_rows(cols: int, way: str) -> None:
    x = values(F16, ROWS, cols)
    image = check_words(forward(), [x, positions(cols, ROWS), x], ONE)
    before, tail = parts_of(image)
    assert image is not None and form_of(image) == READ_ONCE and image.once
    assert before[image.epilogue :] == ["fin.f.softmax", "end"] and "s.log" in tail


@pytest.mark.parametrize("cols", [700, 1024, 3000])
def test_what_tiles_need_is_found_before(cols: int, way: str) -> None:
    """The number that is subtracted comes through the stages, the one that is a factor late."""
    x = values(F16, ROWS, cols)
    given = [x, values(F32, ROWS), values(F32, ROWS, seed=3)]
    image = check_words(distances(), given, ONE)
    before, tail = parts_of(image)
    assert image is not None and [argument for argument, *_ in image.inputs] == [0, 1]
    assert "s.in" in before and "s.ld.32" in tail and "s.in" not in tail
    assert sum(name.startswith("s.st.") for name in tail) == 2


def test_special_values(way: str) -> None:
    for cols in (600, 3000):
        x = special_rows(F32, ROWS, cols)
        image = check_words(summed(F32), [x], ONE)
        assert image is not None and image.tail != NO_WORD


def test_large_elements_have_powers_of_their_own(way: str) -> None:
    """Beyond 2^20, the product with a logarithm would be off by more than the difference is."""
    base = torch.tensor([0.0, 3e5, 1e6, 2e6, 1e9, -1e9, 3e38, -3.3e38]).repeat(5)[:, None]
    x = values(F32, ROWS, 600) + base
    check_words(summed(F32), [x], ONE)


def test_positions_of_rows_and_tables(way: str) -> None:
    """The sum of a row, times what a table has for its number."""
    nodes = (
        *(load(0, F16), cast(F32, 0), reduce("sum", F32, 1, 1), iota(0), number(7)),
        *(compute("minimum", I64, 3, 4), index(1, F32, 5), compute("mul", F32, 2, 6)),
        *(load(2, F32), compute("add", F32, 7, 8)),
    )
    inputs = tensor(F16, 0, 1), tensor(F32, INDEXED), tensor(F32, 0)
    program = Program(2, inputs, nodes, (output(9, 0),))
    given = [values(F16, ROWS, 800), values(F32, 8), values(F32, ROWS)]
    image = check_words(program, given, ONE)
    _, tail = parts_of(image)
    assert {"s.ld.at", "s.at.32", "s.ld.32"} < set(tail)


def test_where_there_is_no_tail(way: str) -> None:
    x = values(F16, ROWS, 1024)
    largest = Program(
        2,
        (tensor(F16, 0, 1),),
        (load(0, F16), cast(F32, 0), reduce("max", F32, 1, 1), cast(F16, 2)),
        (output(3, 0),),
    )
    few = check_words(summed(F16), [x[:31]], ONE), check_words(largest, [x], ONE)
    narrow = check_words(summed(F16), [values(F16, ROWS, 480)], ONE)
    tiles = check_words(log_softmax(F16), [x], ONE)
    for image in (*few, narrow, tiles):
        assert image is not None and image.tail == NO_WORD
    assert few[1] is not None and form_of(few[1]) == NORMS


def test_words_that_no_kernel_of_tails_has(way: str) -> None:
    nodes = (
        *(load(0, F32), compute("asin", F32, 0), reduce("sum", F32, 1, 1)),
        *(compute("log", F32, 2), compute("exp", F32, 3), compute("sqrt", F32, 4)),
    )
    program = Program(2, (tensor(F32, 0, 1),), nodes, (output(5, 0),))
    image = check_words(program, [values(F32, ROWS, 600)], ONE)
    assert image is not None and image.tail == NO_WORD


@pytest.mark.parametrize(("count", "tail"), [(4, True), (10, True), (13, False)])
def test_as_many_numbers_as_there_are_registers(count: int, tail: bool, way: str) -> None:
    """Multiples of a sum, which wait for one another; beyond that, rows have no tail."""
    nodes = [load(0, F32), reduce("sum", F32, 0, 1)]
    for k in range(count):
        nodes += [number(1 + k / 8, F32), compute("mul", F32, 1, 2 + 2 * k)]
    for k in range(count - 1):
        nodes.append(compute("maximum", F32, len(nodes) - 1, 3 + 2 * k))
    program = Program(2, (tensor(F32, 0, 1),), tuple(nodes), (output(len(nodes) - 1, 0),))
    image = check_words(program, [values(F32, ROWS, 600)], ONE)
    assert image is not None and (image.tail != NO_WORD) == tail


def test_equal_numbers_share_a_register() -> None:
    nodes = (
        *(load(0, F32), reduce("sum", F32, 0, 1), number(0.0, F32), number(0)),
        *(load(1, I64), Node(NodeKind.COMPUTE, BOOL, (4, 3), "ne")),
        *(compute("select", F32, 5, 1, 2), compute("select", F32, 5, 2, 1)),
    )
    program = Program(2, (tensor(F32, 0, 1), tensor(I64, 0)), nodes, (output(6, 0), output(7, 0)))
    image = check_words(program, [values(F32, ROWS, 600), positions(3, ROWS)], ONE)
    _, tail = parts_of(image)
    assert tail.count("s.k") == 1


def test_blocks_with_several_batches() -> None:
    """More rows than lanes, of several warps a row and of one."""
    for rows, cols in ((1300, 600), (700, 1024), (260, 4100)):
        image = encode(summed(F16), [torch.empty(rows, cols, dtype=torch.float16)], ONE).image
        assert image is not None and image.tail != NO_WORD and image.tiles > image.blocks
