"""What is fitted to a table: residuals that were planted, the hedge, times of another type."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from magjit_triton.codegen.matmul.configuration import Configuration, Work
from magjit_triton.macro import cli
from magjit_triton.macro.assemble import Assembled, Part
from magjit_triton.macro.building import entry_of, retargeted
from magjit_triton.macro.device import DEVICES
from magjit_triton.macro.errors import CorruptRepositoryError
from magjit_triton.macro.families import named
from magjit_triton.macro.heuristics import analytic, converted, least_seconds
from magjit_triton.macro.measuring import Shape
from magjit_triton.macro.refitting import (
    HEDGES,
    MARGIN,
    cautious,
    choices,
    corrected,
    hedge_of,
    hedged,
    refitted,
    shapes_of,
    shapes_on,
    taken_over,
)
from magjit_triton.macro.repository import Entry, Repository, Stored
from magjit_triton.macro.selector import compiled
from magjit_triton.macro.space import Space
from magjit_triton.macro.tuning import Table
from magjit_triton.macro.waves import Affine, Library, Model, Wave

H200 = DEVICES["h200"]
WORK = Work(torch.float16)
CUTS = (
    Configuration(16, 128, 64, stages=4),
    Configuration(64, 64, 64, stages=3),
    Configuration(64, 128, 64, stages=4, split_k=4),
    Configuration(128, 128, 64, warps=8),
)
GRID = (1, 16, 128, 1024, 8192), (1024, 4096), (1024, 4096)


def library_seconds(shape: Shape) -> float:
    batch, m, n, k = shape
    return 6e-6 + 2.0 * batch * m * n * k / 5e14


def made(dtype: torch.dtype = torch.float16) -> Entry:
    """An entry that a device of formulas was tuned for, without residuals."""
    stored = []
    for cut in CUTS:
        part = Part("k", str(dtype).encode(), "{}", ("m",), ("i32",), None, cut.warps, 1024, 64, 0)
        occupancy = 2 if dtype == torch.float16 else 1
        told = analytic(cut, WORK, H200, 2)
        stored.append(
            Stored(Assembled(cut, (part,), 0), occupancy, told.wave, told.sum_fixed, told.sum_each)
        )
    entry = entry_of(named("linear", dtype), H200, stored)
    times = tuple(library_seconds((1, m, n, k)) for m in GRID[0] for n in GRID[1] for k in GRID[2])
    return replace(entry, library=Library(*GRID, times))


def planted(number: int, shape: Shape) -> float:
    """An error of the waves that is linear in the logarithms."""
    _, m, n, k = shape
    return (number - 1.5) * 0.05 * math.log2(m) + 0.03 * math.log2(n / 1024) - 0.02 * math.log2(k)


def table_of(entry: Entry, seconds: Callable[[int, Shape], float], between: int = 8) -> Table:
    shapes = shapes_of(entry, between)
    times = {
        one.configuration: [seconds(number, shape) for shape in shapes]
        for number, one in enumerate(entry.stored)
    }
    family = named("linear", getattr(torch, entry.facts["dtype"]))
    space = Space.small(family.work, H200)
    facts = {"device": H200.as_json()}
    return Table(space, tuple(shapes), times, list(map(library_seconds, shapes)), facts)


def erring(entry: Entry) -> Table:
    model = entry.model(H200)
    return table_of(
        entry,
        lambda number, shape: model.of_waves(number, *shape) * math.exp2(planted(number, shape)),
    )


def test_a_planted_error_is_recovered_everywhere_in_the_grid() -> None:
    entry = made()
    table = erring(entry)
    found = refitted(entry, H200, table)
    model = found.model(H200)
    for column, shape in enumerate(table.shapes):
        if shape[1] > GRID[0][-1]:
            continue  # Beyond the grid a correction is not carried on.
        for number, one in enumerate(found.stored):
            expected = table.times[one.configuration][column]
            # Scaling the waves changes where bytes are their floor: a little between the points.
            exact = shape[1] in GRID[0]
            share = 3e-4 if exact else 0.06
            assert model.seconds(number, *shape) == pytest.approx(expected, rel=share), shape
    without_margin = replace(found, facts={**found.facts, "margin_s": 0.0})
    bare, after = (choices(one, H200, table) for one in (without_margin.bare, without_margin))

    def lost(rows: list[dict[str, Any]]) -> float:
        return math.fsum(math.log(row["chosen_s"] / row["best_s"]) for row in rows)

    assert lost(after) < 0.5 * lost(bare)


def test_refitting_again_changes_nothing() -> None:
    entry = made()
    table = erring(entry)
    once = refitted(entry, H200, table)
    again = refitted(once, H200, table)
    assert again.facts == once.facts
    for one, other in zip(once.stored, again.stored, strict=True):
        assert other.residuals == pytest.approx(one.residuals, abs=1e-3)


def test_what_was_not_measured_corrects_nothing() -> None:
    entry = made()
    table = erring(entry)
    failed = table.shapes[7]
    table.times[CUTS[1]][7] = math.inf
    found = corrected(
        entry,
        H200,
        table.shapes[1:],
        {cut: row[1:] for cut, row in table.times.items() if cut != CUTS[3]},
    )
    model = found.model(H200)
    assert found.stored[1].residuals[7] == 0.0
    assert model.seconds(1, *failed) == entry.model(H200).seconds(1, *failed)
    assert all(one.residuals[0] == 0.0 for one in found.stored)
    assert found.stored[0].residuals[7] != 0.0
    assert set(found.stored[3].residuals) == {0.0}


def test_times_that_are_absurd_are_kept_within_bounds() -> None:
    entry = made()
    table = table_of(entry, lambda number, shape: 1e12)
    found = corrected(entry, H200, table.shapes, table.times)
    assert {one for stored in found.stored for one in stored.residuals} == {32.0}
    assert compiled(found.model(H200)).choose(1, 100, 1024, 1024)[0] == -1


def test_where_the_library_changes_its_kernel_it_is_taken_for_the_better_one() -> None:
    """Between 32 and 48 rows it falls back by a half, and has caught up at 192."""
    entry, rows = made(), (1, 16, 32, 48, 96, 192, 512)
    least = [least_seconds(entry, H200, m, 1024, 4096) for m in rows]
    shares = (0.1, 0.3, 0.4, 0.2, 0.2, 0.35, 0.6)
    seconds = tuple(one / share for one, share in zip(least, shares, strict=True))
    found = cautious(replace(entry, library=Library(rows, (1024,), (4096,), seconds)), H200)
    told = [one / cautiously for one, cautiously in zip(least, found.seconds, strict=True)]
    assert told == pytest.approx([0.1, 0.4, 0.4, 0.4, 0.35, 0.35, 0.6])


# The hedge: ours is told to win by a share on each pair of points, and on the rows between them.

SHARES = {16: 0.05, 64: 0.25, 256: 0.25, 1024: 0.4}
FLAT = Affine(1e-5, 0.0)


def flat() -> Entry:
    """An entry of one kernel; it and the library take as long on all shapes but for residuals."""
    (one, *_) = (one for one in made().stored if one.configuration == CUTS[3])
    rows = tuple(factor * m for m in SHARES for factor in (1, 2))
    table = Library(rows, (1024,), (1024,), (1e-5,) * len(rows))
    residuals = tuple(math.log2(1 - share) for share in SHARES.values() for _ in range(2))
    one = replace(one, wave=Wave(FLAT, FLAT, FLAT, FLAT), residuals=residuals)
    return replace(made(), stored=(one,), library=table)


def hedge_where(on_points: dict[int, float], between: dict[int, float]) -> float:
    """The hedge of a kernel that really wins by shares; where none is named, it takes as long."""
    entry = flat()
    shapes = [(1, factor * m, 1024, 1024) for m in on_points for factor in (1, 2)]
    gains = [share for share in on_points.values() for _ in range(2)]
    shapes += [(1, 5 * m // 4, 1024, 1024) for m in between]
    gains += between.values()
    times = {CUTS[3]: [1e-5 * (1 - one) for one in gains]}
    found = hedged(entry, H200, shapes, times, [1e-5] * len(shapes))
    assert found.stored == entry.stored
    return float(found.facts["hedge"])


def test_of_hedges_that_choose_the_same_the_greatest_is_taken() -> None:
    assert hedge_where(SHARES, SHARES) == 0.04


def test_narrow_wins_that_are_none_between_the_points_are_hedged() -> None:
    assert hedge_where(SHARES, {**SHARES, 16: -0.01}) == 0.2


def test_what_is_lost_on_the_points_alone_says_nothing() -> None:
    """The model was fitted to them."""
    assert hedge_where({**SHARES, 16: -0.5}, SHARES) == 0.04


@pytest.mark.parametrize(("middle", "expected"), [(0.1, 0.09), (0.03, 0.02), (-0.05, 0.5)])
def test_a_size_is_chosen_for_as_if_it_had_not_been_measured(
    middle: float, expected: float
) -> None:
    """A kernel wins by a tenth with narrow and with wide weights; does it with those between?"""
    shares = {512: 0.1, 1024: middle, 2048: 0.1}
    (one, *_) = (one for one in made().stored if one.configuration == CUTS[3])
    residuals = tuple(math.log2(1 - share) for share in shares.values())
    one = replace(one, wave=Wave(FLAT, FLAT, FLAT, FLAT), residuals=residuals)
    entry = replace(
        made(), stored=(one,), library=Library((64,), tuple(shares), (1024,), (1e-5,) * 3)
    )
    shapes = [(1, 64, n, 1024) for n in shares]
    times = {CUTS[3]: [1e-5 * (1 - share) for share in shares.values()]}
    found = hedged(entry, H200, shapes, times, [1e-5] * 3)
    assert found.facts["hedge"] == expected
    assert found.library == entry.library


def test_without_shapes_between_all_count() -> None:
    assert hedge_where(SHARES, {}) == 0.04
    assert hedge_where({**SHARES, 16: -0.01}, {}) == 0.2


@pytest.mark.parametrize(("loss", "expected"), [(0.05, 0.04), (0.07, 0.3)])
def test_a_loss_counts_four_times(loss: float, expected: float) -> None:
    """Where no hedge parts the gain from the loss; log(1 / 0.77) is 4 log(1.0675)."""
    assert hedge_where(SHARES, {64: 0.23, 256: -loss}) == expected


def test_one_loss_that_no_hedge_avoids_does_not_end_all_gains() -> None:
    assert hedge_where(SHARES, {16: 0.05, 64: 0.25, 256: 0.25, 1024: -0.02}) == 0.04


def test_where_nothing_is_chosen_between_the_gains_on_the_points_count() -> None:
    """So many rows are several waves of ours: they are the library's."""
    assert hedge_where(SHARES, {2**13: -0.5}) == 0.04


def test_a_time_that_is_missing_is_no_gain_and_no_loss() -> None:
    assert hedge_where(SHARES, {16: -math.inf, 64: 0.1}) == 0.04


@pytest.mark.parametrize(("ours", "library", "chosen"), [(9e-6, 1e-5, -1), (45e-6, 5e-5, 0)])
def test_a_product_alone_must_win_by_a_margin(ours: float, library: float, chosen: int) -> None:
    """Both are quicker by a tenth, the first by less than the margin besides the hedge."""
    (one, *_) = (one for one in made().stored if one.configuration == CUTS[3])
    flat = Affine(ours, 0.0)
    one = replace(one, wave=Wave(flat, flat, flat, flat))
    table = Library((32, 64), (1024,), (1024,), (library,) * 2)
    entry = replace(made(), stored=(one,), library=table)
    for margin, expected in ((0.0, 0), (MARGIN, chosen)):
        entry = replace(entry, facts={**entry.facts, "hedge": 0.02, "margin_s": margin})
        model = entry.model(H200)
        assert compiled(model).choose(1, 48, 1024, 1024)[0] == expected
        assert model.choose(1, 48, 1024, 1024)[0] == expected


def test_margins_are_of_products_alone_and_times_may_be_anything() -> None:
    entry = made()
    found = refitted(replace(entry, facts={**entry.facts, "times_of": "x"}), H200, erring(entry))
    assert found.facts["margin_s"] == MARGIN
    assert "times_of" not in found.facts
    more = replace(entry, facts={**entry.facts, "buffers": 4})
    assert refitted(more, H200, erring(more)).facts["margin_s"] == 0.0
    tiny = Library((1,), (1,), (1,), (1e-7,)).times(0.5, MARGIN)
    assert tiny.seconds == (2.5e-8,)
    with pytest.raises(ValueError, match="margin"):
        Model((), None, multiprocessors=1, bandwidth=1.0, margin=-1.0)


# The hedge between sizes: told shares of each n on the points, real ones there and between.

N = (512, 1024, 2048, 4096)


def hedges_of(
    told: tuple[float, ...],
    rows: dict[int, float],
    middle: tuple[float, float] | None = None,
    off: dict[int, float] | None = None,
) -> tuple[float, float, float]:
    """Of a kernel that wins by shares.

    Args:
        told: by the model, on the points of each n.
        rows: really, on rows between them.
        middle: really, on the points of the inner n; without them the points were not measured.
        off: really, on sizes of n that the table has not.

    Returns:
        ``hedge``, ``hedge_between`` and the one hedge for all.
    """
    (one, *_) = (one for one in made().stored if one.configuration == CUTS[3])
    residuals = tuple(math.log2(1 - share) for _ in range(2) for share in told)
    one = replace(one, wave=Wave(FLAT, FLAT, FLAT, FLAT), residuals=residuals)
    entry = replace(made(), stored=(one,), library=Library((32, 64), N, (1024,), (1e-5,) * 8))
    real = {(1, 48, n, 1024): share for n, share in {**rows, **(off or {})}.items()}
    if middle is not None:
        real |= {(1, 64, n, 1024): share for n, share in zip(N[1:3], middle, strict=True)}
    times = {CUTS[3]: [1e-5 * (1 - share) for share in real.values()]}
    measured = H200, list(real), times, [1e-5] * len(real)
    found = hedged(entry, *measured)
    assert found.hedges == (found.facts["hedge"], found.facts["hedge_between"])
    return *found.hedges, hedge_of(entry, *measured)


TOLD = (0.19, 0.19, 0.0, 0.1)
ROWS = {512: 0.19, 1024: 0.19, 4096: 0.1}
"""As told: of the left-out sizes 1024 is told .1, 2048 .146."""


def test_where_left_out_sizes_win_both_hedges_are_alike() -> None:
    assert hedges_of(TOLD, ROWS, (0.1, 0.15)) == (0.09, 0.09, 0.09)


@pytest.mark.parametrize(("loss", "between"), [(0.012, 0.09), (0.015, 1.0)])
def test_between_sizes_a_loss_counts_sixteen_times(loss: float, between: float) -> None:
    """Log(1 / 0.81) is 16 log(1.0132); one hedge for all would take the loss."""
    assert hedges_of(TOLD, ROWS, (0.19, -loss)) == (0.09, between, 0.09)


def test_where_all_left_out_sizes_lose_ours_is_never_chosen_between() -> None:
    assert hedges_of(TOLD, ROWS, (-0.2, -0.2))[:2] == (0.09, 1.0)


def test_a_loss_that_a_hedge_avoids_is_avoided() -> None:
    assert hedges_of(TOLD, ROWS, (-0.05, 0.1))[:2] == (0.09, 0.13)


def test_left_out_sizes_do_not_change_the_hedge_of_measured_ones() -> None:
    narrow = {**ROWS, 4096: -0.05}
    assert hedges_of(TOLD, narrow, (0.1, 0.15))[0] == 0.13
    assert hedges_of(TOLD, narrow, (-0.2, -0.2))[0] == 0.13


def test_between_sizes_the_hedge_is_no_less() -> None:
    """Left-out sizes alone would have 0.09."""
    assert hedges_of(TOLD, {**ROWS, 4096: -0.05}, (0.19, 0.05))[:2] == (0.13, 0.13)
    assert hedges_of(TOLD, {}, (0.19, 0.05))[:2] == (0.09, 0.09)


def test_without_left_out_sizes_there_is_one_hedge() -> None:
    assert hedges_of(TOLD, ROWS) == (0.09, 0.09, 0.09)


@pytest.mark.parametrize(("real", "between"), [(0.1, 0.13), (-0.1, 1.0)])
def test_sizes_off_the_table_are_between(real: float, between: float) -> None:
    assert hedges_of(TOLD, ROWS, off={768: real})[:2] == (0.09, between)


# What a table lacks; batches; other types and devices.


def test_a_table_must_have_all_points_and_configurations() -> None:
    entry = made()
    table = erring(entry)
    short = replace(table, shapes=table.shapes[1:], library=table.library[1:])
    with pytest.raises(CorruptRepositoryError, match="no times of"):
        refitted(entry, H200, short)
    del table.times[CUTS[0]]
    with pytest.raises(CorruptRepositoryError, match="16x128"):
        refitted(entry, H200, table)
    with pytest.raises(CorruptRepositoryError, match="no times of the library"):
        corrected(replace(entry, library=None), H200, table.shapes, table.times)


def test_shapes_of_a_batch_are_the_points_of_more_rows() -> None:
    grid = Library((12, 96, 768), (256,), (128, 1024), (1e-6,) * 6)
    shapes = shapes_on(grid, 5, batch=12)
    assert [(b * m, n, k) for b, m, n, k in shapes[:6]] == grid.points
    assert {shape[0] for shape in shapes} == {12}
    assert 6 < len(shapes) <= 16
    assert all(12 <= 12 * m <= 1024 + 6 for _, m, _, _ in shapes)
    assert shapes == shapes_on(grid, 5, batch=12) != shapes_on(grid, 5, 1, batch=12)
    with pytest.raises(CorruptRepositoryError, match="batches of 5"):
        shapes_on(grid, batch=5)


def test_a_batch_is_exact_on_its_points() -> None:
    entry = made()
    grid = Library((12, 96, 768), (256,), (128, 1024), (1e-6,) * 6)
    entry = replace(entry, library=grid)
    shapes = tuple(shapes_on(grid, 4, batch=12))
    model = entry.model(H200)
    times = {
        cut: [model.of_waves(number, *shape) * 1.3 ** (number + 1) for shape in shapes]
        for number, cut in enumerate(CUTS)
    }
    found = corrected(entry, H200, shapes, times)
    for number, cut in enumerate(CUTS):
        for shape, seconds in zip(shapes, times[cut], strict=True):
            assert found.model(H200).seconds(number, *shape) == pytest.approx(seconds, rel=3e-4)


def test_another_types_residuals_are_taken_over() -> None:
    entry = made()
    found = refitted(entry, H200, erring(entry))
    other = made(torch.bfloat16)
    other = replace(other, stored=other.stored[::-1][:3])
    taken = taken_over(other, found)
    assert taken.signature == other.signature and taken.facts["dtype"] == "bfloat16"
    assert taken.facts["times_of"] == found.name
    hedges = ("hedge", "hedge_between", "hedge_of_waves")
    assert [taken.facts[one] for one in hedges] == [found.facts[one] for one in hedges]
    before = {name: one for name, one in found.facts.items() if name != "hedge_between"}
    assert "hedge_between" not in taken_over(taken, replace(found, facts=before)).facts
    assert taken.library == found.library
    for one, mine, theirs in zip(taken.stored, other.stored, found.stored[::-1][:3], strict=True):
        assert (one.assembled, one.occupancy) == (mine.assembled, 1)
        assert (one.wave, one.residuals) == (theirs.wave, theirs.residuals)
    with pytest.raises(CorruptRepositoryError, match="no configuration"):
        taken_over(replace(other, stored=()), found)


def test_another_device_has_the_waves_alone() -> None:
    entry = made()
    found = refitted(entry, H200, erring(entry))
    other = DEVICES["h100"]
    target = retargeted(found, other)
    facts = {**found.facts, "hedge": 0.02, "hedge_between": 0.2, "hedge_of_waves": 0.3}
    made_of = converted(replace(found, facts=facts), H200, target, other)
    assert not any(one.residuals for one in made_of.stored)
    assert made_of.hedges == (0.3, 0.3)

    def hedges() -> tuple[float, float]:
        return converted(replace(found, facts=facts), H200, target, other).hedges

    facts["hedge_between"] = 1.0
    assert hedges() == (0.3, 1.0)
    del facts["hedge_of_waves"]  # As files have it that were written before.
    assert hedges() == (0.1, 1.0)
    del facts["hedge_between"]
    assert hedges() == (0.1, 0.1)


# The command line.


def test_refitting_from_a_table_and_from_the_other_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = tmp_path / "r.sqlite", tmp_path / "table.json"
    entry, other = made(), made(torch.bfloat16)
    with Repository(path) as repository:
        repository.put(entry)
        repository.put(other)
    erring(entry).write(file)
    line = ["--repository", str(path), "--json"]
    assert cli.main(["refit", "linear", "--table", str(file), *line]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    taking = ["refit", "linear", "--dtype", "bfloat16", "--times-of", "float16"]
    assert cli.main([*taking, "--device", "h200", *line]) == 0
    (taken,) = json.loads(capsys.readouterr().out)
    assert taken["facts"]["times_of"] == "linear float16"
    assert taken["facts"]["hedge"] == told["facts"]["hedge"] in HEDGES
    with Repository(path, read_only=True) as repository:
        first = repository.get(entry.signature, entry.device)
        second = repository.get(other.signature, other.device)
    assert first is not None and second is not None
    assert [one.residuals for one in first.stored] == [one.residuals for one in second.stored]
    assert all(any(one.residuals) for one in first.stored)
    assert [one.assembled for one in second.stored] == [one.assembled for one in other.stored]


def test_refitting_wants_a_table_or_a_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["refit", "linear", "--repository", str(tmp_path / "r.sqlite"), "--json"]
    with pytest.raises(SystemExit):
        cli.main(line)
    with pytest.raises(SystemExit):
        cli.main([*line, "--table", "t", "--times-of", "float16"])
    Repository(tmp_path / "r.sqlite").close()
    assert cli.main([*line, "--times-of", "bfloat16", "--device", "h200"]) == 1
    said = capsys.readouterr().out
    assert json.loads(said)["error"] == "RepositoryError"
