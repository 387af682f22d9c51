"""Tuning a family: what is measured on a device, and what of it a repository keeps.

layers × rows → shapes → times of configurations (searched, or all) → the chosen few
→ their waves, and their times and the library's on a grid and between → refitted → Entry
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.macro.building import built, entry_of
from magjit_triton.macro.families import K_UNIT, MacroFamily
from magjit_triton.macro.measuring import Bench, EventTimer, Shape, Timer
from magjit_triton.macro.refitting import refitted, shapes_on, taken_over
from magjit_triton.macro.repository import Entry, Repository, Stored
from magjit_triton.macro.selector import compiled
from magjit_triton.macro.space import Space
from magjit_triton.macro.trust_regions import TrustRegions
from magjit_triton.macro.tuning import (
    CoordinateDescent,
    RandomSearch,
    Search,
    Table,
    Times,
    chosen,
    regimes,
    searched,
)
from magjit_triton.macro.waves import LIBRARY, Library

__all__ = ["LAYERS", "ROWS", "SEARCHES", "Measured", "Plan", "borrowed", "recorded", "tuned"]

ROWS = (1, 16, 48, 96, 192, 384, 768, 1536, 3072, 6144, 12288)
"""Rows that are measured where no others are asked for."""
LAYERS = ((4096, 4096), (1024, 4096), (11008, 4096), (4096, 11008), (3072, 1024))
"""n and k likewise."""

SEARCHES: dict[str, Callable[[Space, int], Search]] = {
    "regions": TrustRegions,
    "random": RandomSearch,
    "coordinate": CoordinateDescent,
}

_BETWEEN = 3
"""Random rows of each n and k: the hedge is chosen where the model may err."""
_LOW_TILE, _MOST_ROWS_OF_LOW_TILES = 32, 2048
# As far as eager mode's own result may be from float64, and a margin: what is wrong is far off.
_MOST_ERROR = {2: 2e-2, 4: 5e-3}

Progress = Callable[[str, int, int], None]
"""Told what is done, how many, of how many."""


@dataclass
class Measured:
    """An ``Objective`` on the current device.

    Attributes:
        bench: times.
        space: of schedules.
        shapes: that are measured.
        built: machine code that is there already.
        wrong: configurations whose results are not eager mode's; they count as unable.
        least: the best time of each shape so far.
    """

    bench: Bench
    space: Space
    shapes: tuple[Shape, ...]
    built: dict[Configuration, Stored] = field(default_factory=dict)
    wrong: list[Configuration] = field(default_factory=list)
    least: list[float] = field(default_factory=list)

    def measure(self, configurations: Sequence[Configuration]) -> Times:
        """Builds what is missing, checks a result of each, and measures all shapes."""
        missing = [one for one in configurations if one not in self.built]
        made = built(self.bench.family, self.bench.device, missing)
        self.built.update({one.configuration: one for one in made.stored})
        return {one: self._times(self.built.get(one)) for one in configurations}

    def _times(self, stored: Stored | None) -> list[float]:
        unable = [math.inf] * len(self.shapes)
        if stored is None or not self.able(stored):
            return unable
        least = self.least or unable
        found = [
            self.bench.seconds(stored, shape, before) if self.wanted(stored, shape) else math.inf
            for shape, before in zip(self.shapes, least, strict=True)
        ]
        self.least = list(map(min, least, found))
        return found

    def able(self, stored: Stored) -> bool:
        """Whether a result is eager mode's; what is not is kept in ``wrong``."""
        itemsize = self.space.work.dtype.itemsize
        smallest = min(filter(self.takes, self.shapes), key=math.prod, default=None)
        if smallest is None:
            return True
        ragged = (smallest[0], smallest[1] + 37, smallest[2], smallest[3])
        if self.bench.error(stored, ragged) > _MOST_ERROR[itemsize]:
            self.wrong.append(stored.configuration)
            return False
        return True

    def takes(self, shape: Shape) -> bool:
        """Whether kernels can run: loads of other shapes would not be aligned."""
        unit = 16 if "k" in self.bench.family.fixed else K_UNIT
        return not (shape[2] % 16 or shape[3] % unit)

    def wanted(self, stored: Stored, shape: Shape) -> bool:
        """Whether it can run, and is not so slow that measuring it is a waste."""
        if not self.takes(shape):
            return False
        return stored.configuration.block_m > _LOW_TILE or shape[1] <= _MOST_ROWS_OF_LOW_TILES


@dataclass(frozen=True)
class Plan:
    """How a family is tuned.

    Attributes:
        search: one of ``SEARCHES``, or ``"exhaustive"``: all that is built, or the small space.
        budget: configurations of each regime.
        count: how many are kept, 12 to 24.
        layers: n and k.
        rows: m.
        batch: of batched families.
        seed: of the search.
    """

    search: str = "exhaustive"
    budget: int = 64
    count: int = 24
    layers: tuple[tuple[int, int], ...] = LAYERS
    rows: tuple[int, ...] = ROWS
    batch: int = 1
    seed: int = 0

    def shapes(self, family: MacroFamily) -> tuple[Shape, ...]:
        """All rows of all layers."""
        fixed = family.fixed
        found = dict.fromkeys(
            (self.batch, m, fixed.get("n", n), fixed.get("k", k))
            for n, k in self.layers
            for m in self.rows
        )
        return tuple(found)


def _objective(
    family: MacroFamily,
    plan: Plan,
    prebuilt: Entry | None,
    timer: Timer | None,
    shapes: tuple[Shape, ...] = (),
) -> Measured:
    shapes = shapes or plan.shapes(family)
    largest = max(shapes, key=math.prod)
    bench = Bench(family, timer or EventTimer(), largest)
    entry = prebuilt or entry_of(family, bench.device, ())
    known = {one.configuration: one for one in entry.stored}
    space = Space(family.work, bench.device)
    if plan.search == "exhaustive":
        space = Space.small(family.work, bench.device)
    return Measured(bench, space, shapes, known)


def recorded(
    family: MacroFamily,
    plan: Plan,
    prebuilt: Entry | None,
    *,
    shapes: Sequence[Shape] = (),
    progress: Progress | None = None,
    timer: Timer | None = None,
) -> Table:
    """Times of every built configuration, or of the small space, and of the library.

    What is so slow that measuring it is a waste has none; what the entry chooses is measured as
    well as the fastest are.
    """
    objective = _objective(family, plan, prebuilt, timer, tuple(shapes))
    bench = objective.bench
    todo = list(objective.built) or list(objective.space.aligned)
    missing = [one for one in todo if one not in objective.built]
    made = [*objective.built.values(), *built(family, bench.device, missing).stored]
    able = [one for one in made if objective.able(one)]

    def told(done: int, total: int) -> None:
        if progress is not None:
            progress("measured", done, total)

    chosen_now = prebuilt if prebuilt is not None and prebuilt.measured else None
    raced, library = _raced(objective, able, objective.shapes, chosen_now, told)
    unable = [math.inf] * len(objective.shapes)
    times = {one: raced.get(one, unable) for one in todo}
    facts = {
        "family": str(family),
        "device": bench.device.as_json(),
        "dtype": str(family.family.dtype).removeprefix("torch."),
        "wrong": [str(one) for one in objective.wrong],
    }
    return Table(objective.space, objective.shapes, times, library, facts)


def _raced(
    objective: Measured,
    able: Sequence[Stored],
    shapes: Sequence[Shape],
    choosing: Entry | None,
    told: Callable[[int, int], None],
) -> tuple[Times, list[float]]:
    """Times of configurations and of the library on shapes, in turns.

    Args:
        choosing: what this chooses is measured as well as the fastest are.
        told: how many shapes are done, of how many.
    """
    bench = objective.bench
    times: Times = {one.configuration: [math.inf] * len(shapes) for one in able}
    library = []
    selector = None if choosing is None else compiled(choosing.model(bench.device))
    for column, shape in enumerate(shapes):
        picked = LIBRARY if selector is None else selector.choose(*shape)[0]
        pick = None if picked == LIBRARY or choosing is None else choosing.stored[picked]
        runners = [one for one in able if one is pick or objective.wanted(one, shape)]
        sure = [place for place, one in enumerate(runners) if one is pick]
        *own, other = bench.race(runners, shape, sure)
        library.append(other)
        for one, seconds in zip(runners, own, strict=True):
            times[one.configuration][column] = seconds
        told(column + 1, len(shapes))
    return times, library


def tuned(
    family: MacroFamily,
    plan: Plan,
    prebuilt: Entry | None = None,
    *,
    store: Repository | None = None,
    progress: Progress | None = None,
    timer: Timer | None = None,
) -> tuple[Entry, Table]:
    """An entry with times, and all that was measured for it.

    Args:
        prebuilt: machine code that need not be built here.
        store: keeps measurements, so that a run that was stopped goes on.
        timer: of runs, by default ``EventTimer``.

    Raises:
        NoDeviceError: there is no CUDA device.
    """
    begin = time.perf_counter()
    objective = _objective(family, plan, prebuilt, timer)
    times: Times = {}
    run = f"{family.signature} {objective.bench.device.name} {plan}"
    if plan.search == "exhaustive":
        todo = list(objective.built) or list(objective.space.aligned)
        times.update({} if store is None else store.seen(run))
        for number, one in enumerate(todo):
            if one not in times:
                found = objective.measure([one])
                times.update(found)
                if store is not None:
                    store.note(run, found)
            if progress is not None:
                progress("measured", number + 1, len(todo))
    else:
        for name, columns in regimes(objective.shapes).items():
            search = SEARCHES[plan.search](objective.space, plan.seed)

            def told(seen: int, least: float, name: str = name) -> None:
                if progress is not None:
                    progress(f"{name} rows", seen, plan.budget)

            searched(
                search,
                objective,
                columns,
                plan.budget,
                known=times,
                store=None if store is None else (store, run),
                progress=told,
            )
    bench = objective.bench
    library = [bench.timer(bench.library(shape)) for shape in objective.shapes]
    cuts = chosen(times, plan.count, library)
    if len(cuts) < 12:  # The model may err, and other shapes want others.
        cuts += [one for one in chosen(times, plan.count) if one not in cuts]
    cuts = cuts[: plan.count]
    missing = [one for one in cuts if one not in objective.built]
    objective.built.update(
        {one.configuration: one for one in built(family, bench.device, missing).stored}
    )
    stored = []
    for number, one in enumerate(cuts):
        stored.append(bench.waved(objective.built[one]))
        if progress is not None:
            progress("waves", number + 1, len(cuts))
    entry = entry_of(family, bench.device, stored)
    entry = _fitted(entry, objective, progress)
    facts = {
        **entry.facts,
        "tuned_s": round(time.perf_counter() - begin, 2),
        "search": plan.search,
        "measured": len(times),
        "wrong": [str(one) for one in objective.wrong],
    }
    table = Table(objective.space, objective.shapes, times, library, {"family": str(family)})
    return replace(entry, facts=facts), table


def _fitted(entry: Entry, objective: Measured, progress: Progress | None) -> Entry:
    """An entry with waves, and what measuring it on a grid says."""

    def told(done: int, total: int) -> None:
        if progress is not None:
            progress("grid", done, total)

    batch = objective.shapes[0][0]
    m, n, k = _knots(objective.shapes)
    rows = tuple(batch * one for one in m)
    grid = Library(rows, tuple(n), tuple(k), (1.0,) * (len(m) * len(n) * len(k)))
    shapes = shapes_on(grid, _BETWEEN, batch=batch)
    times, library = _raced(objective, entry.stored, shapes, None, told)
    entry = replace(entry, library=replace(grid, seconds=tuple(library[: len(grid.seconds)])))
    table = Table(objective.space, tuple(shapes), times, library)
    return refitted(entry, objective.bench.device, table)


def borrowed(family: MacroFamily, plan: Plan, other: Entry, *, timer: Timer | None = None) -> Entry:
    """An entry with the schedules, times and residuals of the same family in another 16-bit type.

    Tensor cores are as fast in both; results are compared with eager mode's here, too.
    """
    begin = time.perf_counter()
    objective = _objective(family, plan, None, timer)
    device = objective.bench.device
    made = built(family, device, [one.configuration for one in other.stored])
    able = replace(made, stored=tuple(one for one in made.stored if objective.able(one)))
    found = taken_over(able, other)
    facts: dict[str, Any] = {
        **found.facts,
        "tuned_s": round(time.perf_counter() - begin, 2),
        "wrong": [str(one) for one in objective.wrong],
    }
    return replace(found, facts=facts)


def _knots(shapes: Sequence[Shape]) -> tuple[list[int], list[int], list[int]]:
    """A grid for the library's table: the shapes' sizes, and rows between them."""
    m, n, k = (sorted({shape[axis] for shape in shapes}) for axis in (1, 2, 3))
    rows = set(m)
    for low, high in pairwise(m):
        if high > 2 * low:
            rows.add(1 << (low * high - 1).bit_length() // 2)
    return sorted(rows), n, k
