"""Programs in several regions: equal to eager at every call, and nothing observed twice."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import magjit

from ..twin import Scene, differ, outcome
from .programs import ROWS, Row


@pytest.fixture(autouse=True)
def records_dropped() -> Iterator[None]:
    yield
    magjit.reset()


SEEDS = (0, 0, 1, 2, 0, 3, 1, 2)


def compare(row: Row, eager: Scene, jit: Scene, compiled: Any, seed: int, printed: Any) -> None:
    def text() -> str:
        shown: str = printed.readouterr().out
        return shown

    backward = row.backward
    expected = outcome(eager, eager.fn, seed, backward=backward, printed=text)
    actual = outcome(jit, compiled, seed, backward=backward, printed=text)
    found = differ(expected, actual)
    assert found is None, f"seed {seed}: {found}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_program(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    eager, jit = row.make(), row.make()
    compiled = magjit.compile(jit.fn, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if not row.cut else "error", magjit.MagJITWarning)
        for call, seed in enumerate(SEEDS):
            before = magjit.stats(compiled)
            compare(row, eager, jit, compiled, seed, capsys)
            now = magjit.stats(compiled)
            entered = now.region_replays - before.region_replays
            # A run that is left has done the operation before the first region itself.
            done = now.operations - before.operations + now.captures - before.captures
            assert entered <= done
            if call == 1 and row.cut and not row.learns:
                assert now.captures == before.captures, "the second call was observed"
                assert now.eager_calls == before.eager_calls
        if row.cut:
            assert now.operations > 0 and now.replays > 0
            limit = now.captures
            for seed in SEEDS:
                compare(row, eager, jit, compiled, seed, capsys)
            assert magjit.stats(compiled).captures <= limit + 1
