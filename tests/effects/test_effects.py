"""Outputs and side effects of captured and replayed calls, compared with eager, identity too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import magjit

from ..lockstep import check, check_shapes, every_other, over_shapes
from .rows import ROWS
from .table import Row

CALLS = 4


@pytest.fixture(autouse=True)
def records_dropped() -> Iterator[None]:
    yield
    magjit.reset()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_effect(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    compiled = check(row.make, CALLS, split=row.split, backward=row.backward, printed=capsys)
    if row.replays and not row.split:
        assert magjit.stats(compiled).replays >= 1


@pytest.mark.parametrize("row", every_other(over_shapes(ROWS)))
def test_effect_over_shapes(row: Row) -> None:
    check_shapes(row.make)
