"""The rows themselves: two eager twins agree, and a later call differs from the first."""

from __future__ import annotations

import pytest

from ..lockstep import check, check_shapes, over_shapes
from ..twin import differ, outcome
from .rows import ROWS
from .table import Row

# Rows whose results are the same for all inputs: what they do is seen in their arguments.
CONSTANT = {
    "returns nothing",
    "in place argument zeroed and returned",
    "in place argument copied into",
    "in place fill by a function",
}


@pytest.mark.slow  # twins that disagree fail beside a compiled one, too
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_two_eager_twins_agree(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    check(row.make, 3, backward=row.backward, printed=capsys, compiler=lambda fn, **_: fn)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_only_rows_about_exceptions_raise(row: Row) -> None:
    scene = row.make()
    seen = [outcome(scene, scene.fn, number)["raised"] for number in range(2)]
    assert seen == [None, None] or row.name.startswith("exception")


@pytest.mark.parametrize("row", [r for r in ROWS if r.name not in CONSTANT], ids=lambda r: r.name)
def test_a_stale_answer_would_be_noticed(row: Row) -> None:
    first, second = row.make(), row.make()
    stale = outcome(first, first.fn, 0)
    fresh = outcome(second, second.fn, 1)
    keys = ("result", "raised", "state")
    left, right = ({key: seen[key] for key in keys} for seen in (stale, fresh))
    assert differ(left, right) is not None


def test_the_table_is_large_enough() -> None:
    assert len([row for row in ROWS if not row.split]) >= 70


@pytest.mark.slow  # twins that disagree fail beside a compiled one, too
@pytest.mark.parametrize("row", over_shapes(ROWS), ids=lambda row: row.name)
def test_two_eager_twins_agree_over_shapes(row: Row) -> None:
    check_shapes(row.make, compiler=lambda fn, **_: fn)
