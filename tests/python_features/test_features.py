"""Each feature equals eager on capture and on two replays: one graph, or a reported split."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import magjit
from magjit.errors import GraphBreakError

from ..lockstep import check, check_shapes, every_other, over_shapes
from ..twin import outcome
from .rows import ROWS
from .table import Row


@pytest.fixture(autouse=True)
def records_dropped() -> Iterator[None]:
    yield
    magjit.reset()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_feature(row: Row) -> None:
    compiled = check(row.make, 3, split=row.split, backward=row.backward)
    stats = magjit.stats(compiled)
    one_graph = (stats.captures, stats.replays, stats.splits) == (1, 2, 0)
    assert one_graph or (row.split and stats.splits >= 1), stats


@pytest.mark.parametrize("row", every_other(over_shapes(ROWS)))
def test_feature_over_shapes(row: Row) -> None:
    check_shapes(row.make)


@pytest.mark.parametrize("row", [r for r in ROWS if r.split], ids=lambda row: row.name)
def test_a_split_names_its_place_and_a_way_out(row: Row) -> None:
    scene = row.make()
    compiled = magjit.compile(scene.fn, backend="eager", fullgraph=True)
    error = outcome(scene, compiled, 0)["raised"]
    if error is None:
        assert magjit.stats(compiled).captures == 1
    else:
        assert isinstance(error, GraphBreakError)
        assert error.reason and error.location and error.remedy
