"""Searches on a table of made-up times: what they ask, find, and remember."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tables import DEVICE, SHAPES, WORK, synthetic

from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.macro.errors import CorruptRepositoryError, MissingTunerError
from magjit_triton.macro.repository import Repository
from magjit_triton.macro.space import Space
from magjit_triton.macro.trust_regions import TrustRegions
from magjit_triton.macro.tuning import (
    CoordinateDescent,
    RandomSearch,
    Search,
    Table,
    chosen,
    cost,
    regimes,
    searched,
)

tunes = pytest.mark.skipif(
    importlib.util.find_spec("botorch") is None,
    reason="the extra 'tune' (BoTorch) is not installed",
)
SEARCHES = [
    pytest.param(RandomSearch, id="random"),
    pytest.param(CoordinateDescent, id="coordinate"),
    pytest.param(TrustRegions, id="regions", marks=tunes),
]


@cache
def table() -> Table:
    return synthetic(Space.small(WORK, DEVICE))


class Counting:
    """An objective that remembers what it measured."""

    def __init__(self) -> None:
        self.space, self.shapes = table().space, table().shapes
        self.asked: list[Configuration] = []

    def measure(self, configurations: Sequence[Configuration]) -> dict[Configuration, list[float]]:
        self.asked += configurations
        return table().measure(configurations)


@pytest.mark.parametrize("kind", SEARCHES)
def test_searches_ask_for_legal_schedules_once_and_repeat_with_a_seed(kind: type[Search]) -> None:
    few = regimes(SHAPES)["few"]
    first = searched(kind(table().space, 3), table(), few, 40)
    assert len(set(first.configurations)) == len(first.configurations) == 40
    assert all(table().space.is_legal(one) for one in first.configurations)
    assert first.best[1] == min(first.costs) == first.so_far[-1]
    assert searched(kind(table().space, 3), table(), few, 40) == first
    assert searched(kind(table().space, 4), table(), few, 40) != first


@pytest.mark.parametrize("kind", SEARCHES)
def test_a_stopped_search_goes_on(kind: type[Search], tmp_path: Path) -> None:
    columns = regimes(SHAPES)["many"]
    whole = searched(kind(table().space, 0), table(), columns, 32)
    with Repository(tmp_path / "r.sqlite") as repository:
        begun = Counting()
        searched(kind(table().space, 0), begun, columns, 16, store=(repository, "run"))
    assert len(begun.asked) == 16
    with Repository(tmp_path / "r.sqlite") as repository:
        later = Counting()
        found = searched(kind(table().space, 0), later, columns, 32, store=(repository, "run"))
    assert len(later.asked) == 16
    assert found.reused == 16
    assert (found.configurations, found.costs) == (whole.configurations, whole.costs)


@pytest.mark.parametrize("kind", SEARCHES)
def test_a_search_ends_when_all_was_seen(kind: type[Search]) -> None:
    axes = {name: values[:2] for name, values in table().space.axes.items()}
    space = Space(WORK, DEVICE, axes)
    found = searched(kind(space, 0), synthetic(space), range(len(SHAPES)), 500)
    assert set(found.configurations) == set(space.legal)


@tunes
@pytest.mark.slow
def test_trust_regions_find_more_than_chance_does() -> None:
    """Means over three seeds: how far above the least cost a search of 48 is."""
    space = Space(WORK, DEVICE)
    rugged = synthetic(space, 0.05)
    for columns in regimes(SHAPES).values():
        least = min(cost(row, columns) for row in rugged.times.values())
        gaps = {
            kind: sum(
                searched(kind(space, s), rugged, columns, 48).best[1] - least for s in (0, 1, 2)
            )
            for kind in (RandomSearch, TrustRegions)
        }
        assert gaps[TrustRegions] <= gaps[RandomSearch], columns


def test_without_botorch_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botorch", None)
    with pytest.raises(MissingTunerError, match=r"magjit\[tune\]"):
        TrustRegions(table().space, 0)


def test_regimes_part_few_rows_from_many() -> None:
    found = regimes(SHAPES)
    assert sorted(sum(found.values(), [])) == list(range(len(SHAPES)))
    assert [SHAPES[one][1] for one in found["few"]] == [1, 16, 64]


def test_the_chosen_few_serve_all_shapes() -> None:
    few = chosen(table().times, 24)
    assert 2 <= len(few) <= 24
    best = [min(row[i] for row in table().times.values()) for i in range(len(SHAPES))]
    found = [min(table().times[one][i] for one in few) for i in range(len(SHAPES))]
    assert found == pytest.approx(best)
    one = chosen(table().times, 1)
    total = {cut: cost(row, range(len(SHAPES))) for cut, row in table().times.items()}
    assert total[one[0]] == min(total.values())


def test_nothing_is_chosen_that_the_library_beats() -> None:
    assert chosen(table().times, 24, [1e-9] * len(SHAPES)) == []


def test_tables_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    table().write(path)
    found = Table.read(path, table().space)
    assert found.shapes == SHAPES
    assert found.facts == table().facts
    for cut, row in table().times.items():
        assert found.times[cut] == pytest.approx(row, rel=1e-4)
    assert any(math.isinf(row[0]) for row in found.times.values())
    path.write_text("{}")
    with pytest.raises(CorruptRepositoryError, match="record it again"):
        Table.read(path, table().space)


def test_searches_compared_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The benchmark's part that needs no GPU, on the made-up table."""
    import macro_kernels as benchmark

    path, rows = tmp_path / "linear.json", tmp_path / "rows.json"
    table().write(path)
    arguments = ["--parts", "search", "--searches", "random", "coordinate", "--budget", "24"]
    files = ["--table", str(path), "--json", str(rows), "--force"]
    assert benchmark.main([*arguments, *files]) == 0
    found = json.loads(rows.read_text())["rows"]
    assert len(found) == 6
    assert all(row["magjit"] >= 1.0 for row in found)
    for regime in ("few", "some", "many"):
        picture = (tmp_path / f"linear.{regime}.svg").read_text()
        assert picture.startswith("<svg") and picture.count("<polyline") == 12


def test_the_benchmark_asks_for_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import macro_kernels as benchmark

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        benchmark.main(["--parts", "tune"])
    assert "no CUDA device" in capsys.readouterr().err
