"""Outputs and side effects of captured and replayed calls, compared with eager, identity too."""

from __future__ import annotations

import pytest

import magjit

from ..lockstep import check
from .rows import ROWS
from .table import Row

CALLS = 4


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_effect(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    compiled = check(row.make, CALLS, split=row.split, backward=row.backward, printed=capsys)
    if row.replays and not row.split:
        assert magjit.stats(compiled).replays >= 1
    magjit.reset()
