"""Each row means something: in eager, the change alters the outcome and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from ..twin import Scene, differ, outcome
from .rows import ROWS
from .table import RIGHT, Row

SEED = 3


def eager(scene: Scene) -> dict[str, Any]:
    seen = outcome(scene, scene.fn, SEED)
    return {key: seen[key] for key in ("result", "raised")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_only_the_change_alters_the_outcome(row: Row) -> None:
    scene, base = row.make(), row.make()
    before = eager(base)
    assert before["raised"] is None
    scene.apply(scene.unrelated)
    assert differ(before, eager(scene)) is None
    scene = row.make()
    eager(scene)
    scene.apply(scene.change)
    changed = eager(scene)
    assert changed["raised"] is None or row.after == RIGHT
    assert (differ(before, changed) is None) == row.silent


def test_the_table_is_large_enough() -> None:
    assert len([row for row in ROWS if row.after != RIGHT]) >= 90
