"""A whole tuning on a device that is a formula: what is kept, and how well the choice does."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from tables import DEVICE, WORK, rugged

from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.macro import campaign, cli
from magjit_triton.macro.assemble import Assembled, Part
from magjit_triton.macro.building import entry_of
from magjit_triton.macro.families import MacroFamily, named
from magjit_triton.macro.heuristics import analytic, default_occupancy
from magjit_triton.macro.measuring import Bench, Shape
from magjit_triton.macro.refitting import HEDGES, hedged
from magjit_triton.macro.repository import Entry, Repository, Stored
from magjit_triton.macro.selector import compiled
from magjit_triton.macro.space import Space
from magjit_triton.macro.tuning import Table
from magjit_triton.macro.waves import Model

MEASURED: list[Configuration] = []
WRONG = Configuration(64, 64, 64, 8, 4, 3)


def stored(cut: Configuration) -> Stored:
    part = Part("k", b"", "{}", ("m",), ("i32",), None, cut.warps, 1024, 64, 0)
    return Stored(Assembled(cut, (part,), 0), default_occupancy(cut, WORK, DEVICE))


def true_seconds(cut: Configuration, shape: Shape) -> float:
    """As the analytic model has it, and uneven in a way that the model does not know."""
    one = analytic(cut, WORK, DEVICE, default_occupancy(cut, WORK, DEVICE))
    model = Model([one], None, multiprocessors=132, bandwidth=DEVICE.bandwidth)
    return model.seconds(0, *shape) * rugged(cut, 0.2)


class Simulated:
    """A ``Bench`` whose device is a formula."""

    def __init__(self, family: MacroFamily, timer: Any, largest: Shape) -> None:
        self.family, self.timer, self.device = family, timer, DEVICE

    def error(self, one: Stored, shape: Shape) -> float:
        return 1.0 if one.configuration == WRONG else 1e-4

    def seconds(self, one: Stored, shape: Shape, least: float = math.inf) -> float:
        MEASURED.append(one.configuration)
        return true_seconds(one.configuration, shape)

    def race(
        self, stored: Sequence[Stored], shape: Shape, sure: Collection[int] = ()
    ) -> list[float]:
        return [*(true_seconds(one.configuration, shape) for one in stored), self.library(shape)]

    def library(self, shape: Shape) -> float:
        _, m, n, k = shape
        return 6e-6 + 2.0 * m * n * k / 6.5e14

    waved = Bench.waved

    def ours(self, one: Stored, shape: Shape, *, part: int) -> float:
        if part == 1:
            return 3e-6 + 1e-12 * shape[1] * shape[2] * one.configuration.split_k
        bare = replace(one.configuration, split_k=1) if one.configuration.split_k > 1 else None
        return true_seconds(one.configuration, shape) - (2.5e-6 if bare else 0.0)


def built(family: Any, device: Any, cuts: Sequence[Configuration], **_: Any) -> Entry:
    return entry_of(family, device, [stored(one) for one in cuts])


@pytest.fixture(autouse=True)
def simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    MEASURED.clear()
    monkeypatch.setattr(campaign, "Bench", Simulated)
    monkeypatch.setattr(campaign, "EventTimer", lambda: lambda found: found)
    monkeypatch.setattr(campaign, "built", built)


PLAN = campaign.Plan(layers=((4096, 4096), (1024, 4096)), rows=(1, 16, 64, 256, 1024, 4096))


def family() -> MacroFamily:
    return named("linear", torch.float16)


def fraction(entry: Entry, rows: Sequence[int]) -> float:
    """Time of the best over time of the chosen, on average, on rows that were not tuned for."""
    selector = compiled(entry.model(DEVICE))
    cuts = [one.configuration for one in entry.stored]
    found = []
    for m in rows:
        shape = (1, m, 4096, 4096)
        times = [*(true_seconds(one, shape) for one in cuts), Simulated.library(None, shape)]  # type: ignore[arg-type]
        found.append(min(times) / times[selector.choose(*shape)[0]])
    return statistics.fmean(found)


@pytest.mark.parametrize("search", ["exhaustive", "random", "coordinate"])
def test_what_is_tuned_is_chosen_well(search: str, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    plan = replace(PLAN, search=search, budget=48)
    entry, table = campaign.tuned(family(), plan, progress=lambda *now: told.append(now))
    assert entry.measured and entry.library is not None
    assert 4 <= len(entry.stored) <= 24
    assert WRONG not in [one.configuration for one in entry.stored]
    assert entry.facts["measured"] == len(table.times)
    assert ("waves", len(entry.stored), len(entry.stored)) in told
    assert told[-1][0] == "grid" and told[-1][1] == told[-1][2] > len(entry.library.points)
    # On the points of the library's table the times that are told are the true ones.
    model = entry.model(DEVICE)
    for number, one in enumerate(entry.stored):
        for m, n, k in entry.library.points:
            if one.configuration.block_m > 32 or m <= 2048:
                expected = true_seconds(one.configuration, (1, m, n, k))
                assert model.seconds(number, 1, m, n, k) == pytest.approx(expected, rel=3e-4)
    assert fraction(entry, (5, 40, 150, 700, 2000, 9000)) > 0.93
    with Repository(tmp_path / "r.sqlite") as repository:
        repository.put(entry)
        assert repository.get(entry.signature, entry.device) == entry


def test_what_computes_something_else_is_never_kept() -> None:
    plan = replace(PLAN, rows=(64,))
    entry = built(family(), DEVICE, [WRONG, replace(WRONG, stages=4)])
    found, table = campaign.tuned(family(), plan, entry)
    assert [one.configuration for one in found.stored] == [replace(WRONG, stages=4)]
    assert found.facts["wrong"] == [str(WRONG)]
    assert all(math.isinf(one) for one in table.times[WRONG])


def test_another_types_times_are_taken_over_where_results_are_right() -> None:
    entry, _ = campaign.tuned(family(), PLAN)
    MEASURED.clear()
    extra = replace(entry.stored[0], assembled=stored(WRONG).assembled)
    other = replace(entry, stored=(*entry.stored, extra))
    found = campaign.borrowed(named("linear", torch.bfloat16), PLAN, other)
    assert not MEASURED
    assert found.measured and found.facts["times_of"] == entry.name
    assert found.facts["dtype"] == "bfloat16" and found.facts["wrong"] == [str(WRONG)]
    assert found.facts["hedge"] == entry.facts["hedge"]
    assert found.facts["hedge_of_waves"] == entry.facts["hedge_of_waves"]
    assert [one.wave for one in found.stored] == [one.wave for one in entry.stored]
    assert [one.residuals for one in found.stored] == [one.residuals for one in entry.stored]
    assert all(one.residuals for one in found.stored)
    assert found.library == entry.library


def test_a_choice_must_win_by_more_than_the_model_errs() -> None:
    entry, table = campaign.tuned(family(), PLAN)
    bare = replace(entry, facts={**entry.facts, "hedge": 0.0})

    def choices(one: Entry) -> list[int]:
        model = one.model(DEVICE)
        return [model.choose(*shape)[0] for shape in table.shapes]

    def worst(one: Entry) -> float:
        pairs = zip(choices(one), table.library, range(len(table.shapes)), strict=True)
        return min(
            library / table.times[one.stored[index].configuration][column]
            for index, library, column in pairs
            if index >= 0
        )

    assert entry.facts["hedge"] in HEDGES
    assert sum(one >= 0 for one in choices(entry)) > 0
    assert worst(entry) >= 1.0  # All are points of the grid, where residuals are exact.
    # Measured times as if kernels were slower than the model says: only sure wins are left.
    slow = {cut: [1.3 * one for one in row] for cut, row in table.times.items()}
    found = hedged(bare, DEVICE, table.shapes, slow, table.library)
    assert found.facts["hedge"] > entry.facts["hedge"]
    ours = [index >= 0 for index in choices(found)]
    assert sum(ours) < sum(index >= 0 for index in choices(bare))


def test_the_hedge_that_gains_most_is_taken() -> None:
    """On a device that is as fast as the model says, but for the shapes that win narrowly."""
    entry, table = campaign.tuned(family(), PLAN)
    bare = replace(entry, facts={**entry.facts, "hedge": 0.0})
    model = bare.model(DEVICE)
    found: dict[float, Entry] = {}
    for limit in (0.0, 0.1, 0.25):
        column = {shape: number for number, shape in enumerate(table.shapes)}
        library = [model.library_seconds(*shape) for shape in table.shapes]
        times = {
            one.configuration: [
                told
                if told < (1 - limit) * library[column[shape]]
                else 1.5 * library[column[shape]]
                for shape in table.shapes
                for told in [model.seconds(number, *shape)]
            ]
            for number, one in enumerate(entry.stored)
        }
        found[limit] = hedged(bare, DEVICE, table.shapes, times, library)
    hedges = [one.facts["hedge"] for one in found.values()]
    assert hedges == sorted(hedges), hedges
    assert hedges[1] < 0.2 <= hedges[2]


def test_a_table_of_the_grid_renews_an_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On another day the library is a fifth slower, and kernels as fast as before."""
    entry, _ = campaign.tuned(family(), PLAN)
    path, file = tmp_path / "r.sqlite", tmp_path / "linear.float16.grid.json"
    with Repository(path) as repository:
        repository.put(entry)
    before = Simulated.library
    monkeypatch.setattr(Simulated, "library", lambda self, shape: 1.2 * before(self, shape))
    monkeypatch.setattr("magjit_triton.macro.device.Device.current", lambda: DEVICE)
    options = ["--repository", str(path), "--json"]
    recording = ["record", "linear", "--grid", "3", "--tables", str(tmp_path), *options]
    assert cli.main(recording) == 0
    capsys.readouterr()
    monkeypatch.undo()  # Nothing else is measured.
    assert cli.main(["refit", "linear", "--table", str(file), *options]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    with Repository(path) as repository:
        found = repository.get(entry.signature, entry.device)
    assert found is not None and found.library is not None and entry.library is not None
    expected = [1.2 * one for one in entry.library.seconds]
    assert list(found.library.seconds) == pytest.approx(expected, rel=1e-3)
    assert found.facts["hedge"] == told["facts"]["hedge"] in HEDGES
    assert [one.assembled for one in found.stored] == [one.assembled for one in entry.stored]
    table = json.loads(file.read_text())
    table["shapes"][0] = [1, 5, 48, 128]
    file.write_text(json.dumps(table))
    assert cli.main(["refit", "linear", "--table", str(file), *options]) == 1
    assert "record linear --grid" in json.loads(capsys.readouterr().out)["remedy"]


def test_a_stopped_campaign_goes_on(tmp_path: Path) -> None:
    few = list(Space.small(WORK, DEVICE).aligned)[:12]
    entry = built(family(), DEVICE, few)

    def stop(what: str, done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with Repository(tmp_path / "r.sqlite") as store:
        with pytest.raises(KeyboardInterrupt):
            campaign.tuned(family(), PLAN, entry, store=store, progress=stop)
        assert set(MEASURED) == set(few[:5])
        MEASURED.clear()
        campaign.tuned(family(), PLAN, entry, store=store)
        assert set(MEASURED) == set(few[5:])


def test_recording_what_was_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry, _ = campaign.tuned(family(), PLAN)
    path, shapes = tmp_path / "r.sqlite", tmp_path / "s.json"
    with Repository(path) as repository:
        repository.put(entry)
    wanted = [[1, 3, 4096, 4096], [1, 500, 1024, 4096], [1, 500, 1000, 4096]]
    shapes.write_text(json.dumps(wanted))
    monkeypatch.setattr("magjit_triton.macro.device.Device.current", lambda: DEVICE)
    options = ["--tables", tmp_path / "tables", "--repository", path, "--json"]
    assert cli.main(list(map(str, ["record", "linear", "--shapes", shapes, *options]))) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert [row["shape"] for row in found["shapes"]] == wanted
    assert found["select_ns"] > 0
    for row in found["shapes"]:
        assert row["best_s"] <= row["chosen_s"]
        assert row["best_s"] <= row["library_s"]
    assert found["shapes"][2]["chosen"] == -1  # 1000 is no multiple of 16
    kept = Table.read(tmp_path / "tables" / "linear.float16.s.json", Space.small(WORK, DEVICE))
    assert [list(one) for one in kept.shapes] == wanted
    assert len(kept.times) == len(entry.stored)
