"""What descriptors can load, in which order tiles are made, which columns form pairs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from magjit.plugin.virtual_tensors.indexing import FloorDiv, Mod
from magjit_triton.codegen.ir import Builder, Dim, Load
from magjit_triton.codegen.matmul.bounds import interval, tightened
from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.codegen.matmul.described import (
    describe,
    order_of_tiles,
    programs_for,
    step_along,
)
from magjit_triton.codegen.matmul.points import exchange_of

ROW, COLUMN = (sympy.Symbol(f"i{k}", integer=True, nonnegative=True) for k in range(2))
SIZE = sympy.Symbol("s0", integer=True, nonnegative=True)
HALF = torch.float16


def builder_of(offset: sympy.Expr, dtype: torch.dtype = HALF) -> tuple[Builder, int]:
    builder = Builder((Dim(ROW, SIZE, "p"), Dim(COLUMN, sympy.Integer(64), "r")))
    return builder, builder.emit("load", (), Load("b1", offset, dtype), torch.float32)


# Described operands.


@pytest.mark.parametrize(
    ("offset", "turned", "stride", "start"),
    [
        (64 * ROW + COLUMN, False, 64, 0),
        (80 * ROW + COLUMN + 16, False, 80, 16),
        (ROW + 72 * COLUMN, True, 72, 0),
        (8 * SIZE * ROW + COLUMN, False, 8 * SIZE, 0),
        (ROW + 8 * SIZE * COLUMN + 24 * SIZE, True, 8 * SIZE, 24 * SIZE),
    ],
)
def test_rows_or_columns_in_one_piece(
    offset: sympy.Expr, turned: bool, stride: sympy.Expr, start: sympy.Expr
) -> None:
    found = describe(*builder_of(offset), HALF)
    assert found is not None
    assert (found.turned, found.stride, found.offset) == (turned, stride, start)
    assert found.sizes == ((64, SIZE) if turned else (SIZE, 64))
    assert found.block(16, 32) == ((32, 16) if turned else (16, 32))


@pytest.mark.parametrize(
    "offset",
    [
        65 * ROW + COLUMN,  # rows that begin anywhere
        64 * ROW + COLUMN + 1,
        64 * ROW + 2 * COLUMN,
        SIZE * ROW + COLUMN,  # for some sizes only
        COLUMN,  # one row for all
        64 * FloorDiv(ROW, sympy.Integer(2)) + COLUMN,
        64 * Mod(ROW, sympy.Integer(4)) + COLUMN,
        ROW * COLUMN + COLUMN,
    ],
)
def test_what_no_descriptor_has(offset: sympy.Expr) -> None:
    assert describe(*builder_of(offset), HALF) is None


def test_only_what_is_read_as_it_is() -> None:
    builder, value = builder_of(64 * ROW + COLUMN)
    assert describe(builder, builder.emit("neg", (value,)), HALF) is None
    condition = builder.emit("const", (), True, torch.bool)
    load = Load("b1", 64 * ROW + COLUMN, HALF)
    assert describe(builder, builder.emit("load", (condition,), load), HALF) is None
    assert describe(builder, value, torch.bfloat16) is None
    exact = builder_of(64 * ROW + COLUMN, torch.float32)
    assert describe(*exact, torch.float32) is None


# The order of tiles.


@given(st.integers(1, 5000), st.integers(1, 200), st.sampled_from([1, 2, 8, 16]))
def test_programs_share_tiles_evenly(tiles: int, multiprocessors: int, group: int) -> None:
    programs = programs_for(tiles, multiprocessors, group)
    assert 1 <= programs <= multiprocessors
    assert -(-tiles // programs) == -(-tiles // multiprocessors)


class Language:
    """What the lines use of Triton's language, as numbers of one program."""

    def __init__(self, programs: int) -> None:
        self.programs = programs

    minimum = staticmethod(min)

    def num_programs(self, axis: int) -> int:
        return self.programs

    @staticmethod
    def where(condition: bool, first: int, second: int) -> int:
        return first if condition else second


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from([1, 3, 8]), st.integers(1, 9))
def test_every_tile_is_made_once(rows: int, columns: int, group: int, programs: int) -> None:
    lines = "\n".join(order_of_tiles(group, "rows"))
    found = []
    for program in range(rows * columns):
        names = {"program": program, "rows": rows, "columns": columns, "tl": Language(programs)}
        exec(lines, names)
        found.append((names["row"], names["column"]))
        assert names["backwards"] == program // programs % 2
    assert sorted(found) == [(row, column) for row in range(rows) for column in range(columns)]
    # What was written last is read first; the next group begins where this one ends.
    assert found[0][0] == rows - 1
    if columns > group:
        width = min(group, columns)
        assert found[width * rows][0] == found[width * rows - 1][0]


@given(st.integers(1, 300), st.sampled_from([16, 64]), st.booleans(), st.booleans())
def test_every_step_is_taken_once(k: int, block: int, backwards: bool, symbolic: bool) -> None:
    loop, step = step_along(SIZE if symbolic else sympy.Integer(k), block)
    names: dict[str, object] = {"backwards": int(backwards), "s0": k, "found": []}
    exec(f"{loop}\n    {step}\n    found.append(step)", names)
    expected = list(range(0, k, block))
    assert names["found"] == (expected[::-1] if backwards else expected)


@pytest.mark.parametrize("fields", [{"split_k": 2, "programs": 4}, {"programs": 0}])
def test_descriptors_are_for_whole_tiles_in_turn(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="in turn"):
        Configuration(16, 16, 16, described=True, **fields)  # type: ignore[arg-type]


# Conditions on columns.

RELATIONS: list[Callable[[sympy.Expr, int], sympy.Basic]] = [
    lambda expr, number: expr < number,
    lambda expr, number: expr <= number,
    lambda expr, number: expr > number,
    lambda expr, number: expr >= number,
    lambda expr, number: number - expr < 3,
    lambda expr, number: number - expr >= 3,
]


@given(
    st.lists(
        st.tuples(st.sampled_from(RELATIONS), st.integers(-5, 40), st.sampled_from([1, 4, 7])),
        min_size=1,
        max_size=3,
    )
)
def test_intervals_are_where_conditions_hold(parts: list[tuple[Callable, int, int]]) -> None:
    size = 64
    relations = []
    for relation, number, unit in parts:
        expr = FloorDiv(COLUMN, sympy.Integer(unit)) - 2 if unit > 1 else COLUMN
        relations.append(relation(expr, number))
    condition = sympy.And(*relations)
    if condition in (sympy.true, sympy.false):
        return

    def holds(one: sympy.Basic, column: int) -> bool:
        swaps = {COLUMN: sympy.Integer(column)}
        swaps |= {part: sympy.Integer(column // int(part.args[1])) for part in one.atoms(FloorDiv)}
        return bool(one.xreplace(swaps))

    expected = [column for column in range(size) if holds(condition, column)]
    found = interval(condition, COLUMN, sympy.Integer(size))
    assert (list(range(*found)) if found else []) == expected
    same = tightened(condition, COLUMN, sympy.Integer(size))
    assert [column for column in range(size) if holds(same, column)] == expected


@pytest.mark.parametrize(
    "condition",
    [ROW < 3, sympy.And(ROW < 3, COLUMN < 5), Mod(COLUMN, sympy.Integer(4)) < 2, 2 * COLUMN < 9],
)
def test_what_is_no_interval(condition: sympy.Basic) -> None:
    assert interval(condition, COLUMN, sympy.Integer(64)) is None
    assert tightened(condition, COLUMN, sympy.Integer(64)) == condition


def test_a_size_that_is_no_number_has_no_interval() -> None:
    assert interval(COLUMN < 5, COLUMN, SIZE) is None


# Pairs.

RANGES = {ROW: SIZE, COLUMN: sympy.Integer(64)}
PLACE = Mod(COLUMN, sympy.Integer(16))


@pytest.mark.parametrize(
    ("shift", "condition", "distance"),
    [
        (8, PLACE < 8, 8),
        (-8, PLACE >= 8, 8),
        (8, sympy.And(COLUMN < 32, PLACE < 8), 8),
        (8, PLACE >= 8, 0),  # out of the pair
        (-8, PLACE < 8, 0),
        (8, COLUMN < 32, 0),  # not proved
        (4, PLACE < 8, 0),
        (6, Mod(COLUMN, sympy.Integer(12)) < 6, 0),  # no power of two
        (512, Mod(COLUMN, sympy.Integer(1024)) < 512, 0),  # more than a tile has
    ],
)
def test_pairs_are_proved(shift: int, condition: sympy.Basic, distance: int) -> None:
    index = (ROW, COLUMN + shift)
    assert exchange_of((ROW, COLUMN), index, [condition], RANGES) == distance
    assert exchange_of((ROW, COLUMN), (ROW + 1, COLUMN + shift), [condition], RANGES) == 0
    assert exchange_of((ROW, COLUMN), index, [], RANGES) == 0
