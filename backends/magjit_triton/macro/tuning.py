"""The search for schedules: what is asked, who asks, and how far it has come.

    Objective  measures configurations on the shapes of a family: on a device, or from a table
    Search     ask → configurations, tell ← costs
    searched   runs a search within a budget, and goes on where it was stopped

The cost of a configuration is the mean of the logarithms of its times on a *regime* of shapes: few
rows want other tiles than many, so that each regime is searched (the paper replays the exploration
several times).  ``chosen`` takes from all that was measured the few that serve all shapes.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.macro.errors import CorruptRepositoryError
from magjit_triton.macro.measuring import Shape
from magjit_triton.macro.repository import Repository
from magjit_triton.macro.rows import cut_of, cut_text
from magjit_triton.macro.space import Space

__all__ = [
    "CoordinateDescent",
    "Objective",
    "RandomSearch",
    "Search",
    "Table",
    "Trace",
    "chosen",
    "cost",
    "regimes",
    "searched",
]

Times = dict[Configuration, list[float]]


class Objective(Protocol):
    """What measures."""

    space: Space
    shapes: tuple[Shape, ...]

    def measure(self, configurations: Sequence[Configuration]) -> Times:
        """Seconds on each shape; infinite where a configuration cannot run."""


@dataclass
class Table:
    """A recorded exhaustive measurement, replayed: an ``Objective`` without a device.

    Attributes:
        space: what was measured; what is legal in it and not recorded cannot run.
        shapes: the columns.
        times: the rows.
        library: the library's times.
        facts: of where it was recorded.
    """

    space: Space
    shapes: tuple[Shape, ...]
    times: Times
    library: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def measure(self, configurations: Sequence[Configuration]) -> Times:
        """What was recorded."""
        unable = [math.inf] * len(self.shapes)
        return {one: self.times.get(one, unable) for one in configurations}

    def write(self, path: Path) -> None:
        """As JSON."""
        content = {
            "facts": self.facts,
            "shapes": [list(one) for one in self.shapes],
            "library": self.library,
            "configurations": [
                {"cut": json.loads(cut_text(cut)), "seconds": [_rounded(one) for one in times]}
                for cut, times in self.times.items()
            ],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        pending = path.with_suffix(".pending")
        pending.write_text(json.dumps(content) + "\n")
        pending.replace(path)  # Who waits for the file sees all of it.

    @classmethod
    def read(cls, path: Path, space: Space) -> Table:
        """What ``write`` wrote.

        Raises:
            CorruptRepositoryError: the file is something else.
        """
        try:
            found = json.loads(path.read_text())
            times = {
                cut_of(json.dumps(row["cut"])): [
                    math.inf if one is None else float(one) for one in row["seconds"]
                ]
                for row in found["configurations"]
            }
            shapes = tuple((b, m, n, k) for b, m, n, k in found["shapes"])
            if any(len(row) != len(shapes) for row in times.values()):
                raise ValueError("a row has not a time for each shape")
            return cls(space, shapes, times, list(found["library"]), dict(found["facts"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptRepositoryError(
                f"{path} is no recorded table: {error}", remedy="record it again"
            ) from error


def _rounded(seconds: float) -> float | None:
    return float(f"{seconds:.5g}") if math.isfinite(seconds) else None


def cost(times: Sequence[float], columns: Sequence[int]) -> float:
    """The mean logarithm of the times on some shapes."""
    found = [times[one] for one in columns]
    return statistics.fmean(map(math.log, found)) if all(map(math.isfinite, found)) else math.inf


def regimes(shapes: Sequence[Shape]) -> dict[str, list[int]]:
    """Shapes by their rows: those that want like tiles."""
    found: dict[str, list[int]] = {}
    for number, (batch, m, _, _) in enumerate(shapes):
        rows = batch * m
        name = "few" if rows <= 64 else "some" if rows <= 768 else "many"
        found.setdefault(name, []).append(number)
    return found


# Searches.


class Search(Protocol):
    """A search for the configuration of the least cost."""

    def ask(self, count: int) -> list[Configuration]:
        """Legal configurations that were not asked for before; fewer where there are no more."""

    def tell(self, costs: Mapping[Configuration, float]) -> None:
        """What they cost."""


class RandomSearch:
    """Legal configurations in random order."""

    def __init__(self, space: Space, seed: int) -> None:
        self._left = list(space.legal)
        random.Random(seed).shuffle(self._left)

    def ask(self, count: int) -> list[Configuration]:
        """The next ones."""
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    def tell(self, costs: Mapping[Configuration, float]) -> None:
        """Nothing is learnt."""


class CoordinateDescent:
    """One step along an axis at a time, to the best neighbour; anew where none is better."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._random = random.Random(seed)
        self._known: dict[Configuration, float] = {}
        self._asked: set[Configuration] = set()
        self._at: Configuration | None = None
        self._waiting: list[Configuration] = []

    def ask(self, count: int) -> list[Configuration]:
        """Neighbours of where it stands, or a new place to start."""
        self._move()
        taken = self._waiting[:count]
        self._waiting = self._waiting[count:]
        self._asked.update(taken)
        return taken

    def _move(self) -> None:
        while not self._waiting:
            if self._at is None:
                left = [one for one in self._space.legal if one not in self._asked]
                if not left:
                    return
                self._at = self._random.choice(left)
                self._waiting = [self._at]
                return
            around = self._space.neighbours(self._at)
            self._waiting = [one for one in around if one not in self._asked]
            if self._waiting:
                self._random.shuffle(self._waiting)
                return
            best = min([self._at, *around], key=lambda one: (self._known.get(one, math.inf), one))
            better = self._known.get(best, math.inf) < self._known.get(self._at, math.inf)
            self._at = best if better else None

    def tell(self, costs: Mapping[Configuration, float]) -> None:
        """What was found."""
        self._known.update(costs)


# Running a search.


@dataclass(frozen=True)
class Trace:
    """What a search measured, in order.

    Attributes:
        configurations, costs: of each.
        reused: how many of them an earlier run had measured.
    """

    configurations: tuple[Configuration, ...]
    costs: tuple[float, ...]
    reused: int = 0

    @property
    def best(self) -> tuple[Configuration, float]:
        """The least cost."""
        pair = min(zip(self.costs, self.configurations, strict=True))
        return pair[1], pair[0]

    @property
    def so_far(self) -> list[float]:
        """The least cost after each measurement."""
        found, least = [], math.inf
        for one in self.costs:
            least = min(least, one)
            found.append(least)
        return found


def searched(
    search: Search,
    objective: Objective,
    columns: Sequence[int],
    budget: int,
    *,
    batch: int = 8,
    known: Times | None = None,
    store: tuple[Repository, str] | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Trace:
    """Run a search until it has seen as many configurations as the budget allows.

    A search with the same seed asks the same questions, so one that was stopped goes on where it
    was: what is known is not measured again.

    Args:
        columns: the shapes that count.
        known: times from elsewhere; new ones are added.
        store: a file, and a name, under which times are kept and found.
        progress: is told of how many were seen, and the least cost.
    """
    times: Times = {} if known is None else known
    if store is not None:
        for one, row in store[0].seen(store[1]).items():
            times.setdefault(one, row)
    seen: list[Configuration] = []
    costs: list[float] = []
    reused = 0
    while len(seen) < budget:
        asked = search.ask(min(batch, budget - len(seen)))
        if not asked:
            break
        fresh = [one for one in asked if one not in times]
        reused += len(asked) - len(fresh)
        if fresh:
            found = objective.measure(fresh)
            times.update(found)
            if store is not None:
                store[0].note(store[1], found)
        told = {one: cost(times[one], columns) for one in asked}
        search.tell(told)
        seen += asked
        costs += [told[one] for one in asked]
        if progress is not None:
            progress(len(seen), min(costs))
    return Trace(tuple(seen), tuple(costs), reused)


def chosen(
    times: Times, count: int, library: Sequence[float] = (), among: Iterable[int] | None = None
) -> list[Configuration]:
    """The configurations of which the best is fastest on average, the most useful first.

    Greedy: each is the one that lowers the mean logarithm of the least times most; what gains
    nothing any more is left out.

    Args:
        library: what is there besides them.
        among: the shapes that count; all by default.
    """
    rows = {one: row for one, row in times.items() if any(map(math.isfinite, row))}
    columns = list(among) if among is not None else list(range(len(next(iter(rows.values()), []))))
    least = [library[one] if library else math.inf for one in columns]
    found: list[Configuration] = []
    while len(found) < count:
        best: tuple[float, Configuration] | None = None
        for one, row in sorted(rows.items()):
            if one in found:
                continue
            gain = math.fsum(
                math.log(min(before, 1e3) / row[column])
                for column, before in zip(columns, least, strict=True)
                if row[column] < before
            )
            if gain > 0 and (best is None or gain > best[0]):
                best = gain, one
        if best is None:
            break
        found.append(best[1])
        least = [
            min(before, rows[best[1]][column])
            for column, before in zip(columns, least, strict=True)
        ]
    return found
