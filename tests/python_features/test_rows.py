"""The rows themselves: two eager twins agree and nothing raises."""

from __future__ import annotations

import pytest

from ..lockstep import check, check_shapes, over_shapes
from ..twin import outcome
from .rows import ROWS
from .table import Row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_two_eager_twins_agree(row: Row) -> None:
    check(row.make, 3, backward=row.backward, compiler=lambda fn, **_: fn)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_row_raises(row: Row) -> None:
    scene = row.make()
    assert outcome(scene, scene.fn, 0)["raised"] is None


@pytest.mark.parametrize("row", over_shapes(ROWS), ids=lambda row: row.name)
def test_two_eager_twins_agree_over_shapes(row: Row) -> None:
    check_shapes(row.make, compiler=lambda fn, **_: fn)
