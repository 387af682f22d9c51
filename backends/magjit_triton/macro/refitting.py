"""What a repository says of a family, checked on shapes and corrected by their times.

    entry → shapes (points of the library's table, random rows between them) → recorded Table
    Table → choices: what would be chosen, beside the best and the library
    Table → refitted: the library's table, the scale of waves, residuals and the hedges anew

Tables are recorded on a device; everything else needs none.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.macro.device import Device
from magjit_triton.macro.errors import CorruptRepositoryError
from magjit_triton.macro.heuristics import least_seconds
from magjit_triton.macro.measuring import Shape
from magjit_triton.macro.repository import Entry
from magjit_triton.macro.selector import compiled
from magjit_triton.macro.tuning import Table
from magjit_triton.macro.waves import LIBRARY, MOST_RESIDUAL, Affine, Library, Wave

__all__ = [
    "HEDGES",
    "MARGIN",
    "calibrated",
    "cautious",
    "choices",
    "corrected",
    "hedge_of",
    "hedged",
    "refitted",
    "shapes_of",
    "shapes_on",
    "taken_over",
]

HEDGES = (0.02, 0.04, 0.06, 0.09, 0.13, 0.2, 0.3, 0.5)
"""Shares by which a kernel must be faster than the library; see ``hedged``."""

MARGIN = 1e-6
"""Seconds by which a product alone must be faster than the library's, besides: so much do two
measurements of a short kernel differ, and nothing else is gained, such as a launch."""

_Parts = list[tuple[Entry, list[int]]]
"""Entries, and on which shapes each is judged."""
_Measured = tuple[Device, Sequence[Shape], Mapping[Configuration, Sequence[float]], Sequence[float]]
"""Where, on what, seconds of configurations and of the library."""

_BUFFERS_OF_A_PRODUCT = 3
_ALIKE = tuple((hedge, hedge) for hedge in HEDGES)
_BEYOND = 4 / 3
"""Of the last rows of a table: as far as random rows go."""
_NEVER = 1.0
"""The hedge that nothing meets."""
_LOSS = 4.0
"""A loss against what users had before weighs so many gains."""
_LOSS_BETWEEN = 16.0
"""The same between measured sizes: few of them can be left out, and a model that errs there errs
more at those that nobody saw."""
_STEPS = 4096.0
"""Of a residual's unit; far finer than times are measured, and few bytes when compressed."""


def shapes_of(entry: Entry, between: int = 0, seed: int = 0, batch: int = 1) -> list[Shape]:
    """What ``refitted`` wants times of: see ``shapes_on``.

    Raises:
        CorruptRepositoryError: the entry has no times of the library, or those of other batches.
    """
    return shapes_on(_library_of(entry), between, seed, batch)


def shapes_on(library: Library, between: int = 0, seed: int = 0, batch: int = 1) -> list[Shape]:
    """The points of a library's table, in its order, then shapes between them.

    Args:
        between: random numbers of rows of each pair of n and k, besides the table's points; small
            ones are as likely as large ones on a logarithmic axis.
        seed: of them.
        batch: of all shapes.

    Raises:
        CorruptRepositoryError: rows of the table are not those of so many products.
    """
    if any(rows % batch for rows in library.m):
        raise CorruptRepositoryError(
            f"The library's times are not those of batches of {batch}",
            remedy="name the batch that the family was tuned with, or tune it again",
        )
    numbers = random.Random(seed)
    most = max(1.0, library.m[-1] * _BEYOND)
    points = [(batch, m // batch, n, k) for m, n, k in library.points]
    rows = [
        (batch, max(1, round(most ** numbers.random() / batch)), n, k)
        for n in library.n
        for k in library.k
        for _ in range(between)
    ]
    return list(dict.fromkeys([*points, *rows]))


def _library_of(entry: Entry) -> Library:
    if entry.library is None:
        raise CorruptRepositoryError(
            f"{entry.name} has no times of the library", remedy=f"tune {entry.name.split()[0]}"
        )
    return entry.library


def choices(entry: Entry, device: Device, table: Table) -> list[dict[str, Any]]:
    """Of each shape of a table: what is chosen, and seconds of it, of the best, of the library."""
    selector = compiled(entry.model(device))
    cuts = [one.configuration for one in entry.stored]
    unable = [math.inf] * len(table.shapes)
    rows = []
    for column, shape in enumerate(table.shapes):
        index, _, told = selector.choose(*shape)
        times = [table.times.get(cut, unable)[column] for cut in cuts]
        library = table.library[column]
        rows.append(
            {
                "shape": list(shape),
                "chosen": index,
                "configuration": "" if index == LIBRARY else str(cuts[index]),
                "predicted_s": told,
                "chosen_s": library if index == LIBRARY else times[index],
                "best_s": min([*times, library]),
                "library_s": library,
            }
        )
    return rows


def refitted(entry: Entry, device: Device, table: Table) -> Entry:
    """An entry with the library's times, the scales of waves, residuals and hedges from a table.

    Its facts ``hedge`` and ``hedge_between`` are of the corrected model, ``hedge_of_waves`` of the
    waves alone, for devices that residuals do not hold on; see ``hedged`` and ``hedge_of``.  Its
    fact ``margin_s`` is ``MARGIN`` where the product is alone.

    Args:
        table: with times of the entry's configurations on the points of the library's table.

    Raises:
        CorruptRepositoryError: a point or a configuration is missing.
    """
    library = _library_of(entry)
    found = dict(zip(table.shapes, table.library, strict=True))
    points = shapes_on(library, batch=table.shapes[0][0] if table.shapes else 1)
    missing: Sequence[object] = [one for one in points if one not in found]
    missing = missing or [
        one.configuration for one in entry.stored if one.configuration not in table.times
    ]
    if missing:
        raise CorruptRepositoryError(
            f"The table has no times of {missing[0]}, and of {len(missing) - 1} more",
            remedy=f"record {entry.name.split()[0]} --grid",
        )
    seconds = tuple(found[one] for one in points)
    entry = replace(entry.bare, library=replace(library, seconds=seconds))
    margin = MARGIN if int(entry.facts["buffers"]) == _BUFFERS_OF_A_PRODUCT else 0.0
    entry = replace(entry, library=cautious(entry, device))
    facts = {name: one for name, one in entry.facts.items() if name != "times_of"}
    entry = replace(entry, facts={**facts, "margin_s": margin})
    entry = calibrated(entry, device, table.shapes, table.times)
    alone = hedge_of(entry, device, table.shapes, table.times, table.library)
    entry = replace(entry, facts={**entry.facts, "hedge_of_waves": alone})
    entry = corrected(entry, device, table.shapes, table.times)
    return hedged(entry, device, table.shapes, table.times, table.library)


def cautious(entry: Entry, device: Device) -> Library:
    """The library as if it were at each point as efficient as at the best of its neighbours.

    With the number of rows the library changes its kernels, and its times jump: what was measured
    on both sides of a jump says little of the rows between.  Efficiency is the least time that the
    device allows over that of the library; neighbours are the next points with up to twice the rows
    or half of them.

    Raises:
        CorruptRepositoryError: the entry has no times of the library.
    """
    library = _library_of(entry)
    least = [least_seconds(entry, device, *point) for point in library.points]
    shares = [bound / seconds for bound, seconds in zip(least, library.seconds, strict=True)]
    row = len(library.n) * len(library.k)
    best = list(shares)
    for place, (fewer, more) in enumerate(zip(library.points, library.points[row:], strict=False)):
        if more[0] <= 2 * fewer[0]:
            best[place] = max(best[place], shares[place + row])
            best[place + row] = max(best[place + row], shares[place])
    seconds = (bound / share for bound, share in zip(least, best, strict=True))
    return replace(library, seconds=tuple(seconds))


def calibrated(
    entry: Entry,
    device: Device,
    shapes: Sequence[Shape],
    times: Mapping[Configuration, Sequence[float]],
) -> Entry:
    """An entry whose waves are scaled so that they meet measured times on average; bare.

    The waves leave out what tiles share in the cache and how they crowd the memory; how much that
    matters depends on the configuration above all, then on the shape: see ``corrected``.

    Args:
        times: configuration → seconds for each shape.
    """
    entry = entry.bare
    model = entry.model(device)
    found = []
    for number, one in enumerate(entry.stored):
        pairs = [
            (seconds, model.seconds(number, *shape))
            for shape, seconds in zip(shapes, times.get(one.configuration, ()), strict=False)
            if math.isfinite(seconds) and model.fits(*shape)
        ]
        if not pairs or one.wave is None:
            found.append(one)
            continue
        logarithms = [math.log(measured / told) for measured, told in pairs]
        found.append(replace(one, wave=_scaled(one.wave, math.exp(statistics.fmean(logarithms)))))
    return replace(entry, stored=tuple(found))


def _scaled(wave: Wave, factor: float) -> Wave:
    parts = (wave.lone, wave.single, wave.full, wave.steady)
    return Wave(*(Affine(one.fixed * factor, one.per_step * factor) for one in parts))


def corrected(
    entry: Entry,
    device: Device,
    shapes: Sequence[Shape],
    times: Mapping[Configuration, Sequence[float]],
) -> Entry:
    """An entry with residuals: on the points of the library's table its times are the measured.

    A time that is missing, or infinite where a configuration failed or was not worth the time,
    corrects nothing.

    Args:
        times: configuration → seconds for each shape.

    Raises:
        CorruptRepositoryError: the entry has no times of the library.
    """
    library = _library_of(entry)
    entry = entry.bare
    model = entry.model(device)
    columns = {_point(shape): (column, shape) for column, shape in enumerate(shapes)}
    found = []
    for number, one in enumerate(entry.stored):
        residuals = []
        for point in library.points:
            column, shape = columns.get(point, (0, None))
            measured = math.inf
            if shape is not None and one.configuration in times and model.fits(*shape):
                measured = times[one.configuration][column]
            residual = 0.0
            if shape is not None and math.isfinite(measured):
                told = model.of_waves(number, *shape)
                residual = round(math.log2(measured / told) * _STEPS) / _STEPS
            residuals.append(min(max(residual, -MOST_RESIDUAL), MOST_RESIDUAL))
        found.append(replace(one, residuals=tuple(residuals)))
    return replace(entry, stored=tuple(found))


def _point(shape: Shape) -> tuple[int, int, int]:
    """Where in the library's table a shape is: a batch counts as more rows."""
    batch, m, n, k = shape
    return batch * m, n, k


def hedged(
    entry: Entry,
    device: Device,
    shapes: Sequence[Shape],
    times: Mapping[Configuration, Sequence[float]],
    library: Sequence[float],
) -> Entry:
    """An entry whose kernels are chosen only where they should win by more than the model errs.

    Of ``HEDGES`` the one whose choices gain most over the library, as a sum of logarithms in which
    a loss counts four times: the library is what users had before.  Only shapes count that the
    model was not made from.

    The fact ``hedge`` is for the sizes of n and k that the library's table has: it is chosen on
    rows between the points.  ``hedge_between`` is for all others, and no less: it is chosen on the
    points at a size of n or k, as the model chooses there that is made from the other sizes, and on
    shapes off the table.  There a loss counts sixteen times, and "never" is one more hedge.  Where
    the first has no shapes, it takes those of the second, or else all; where the second has none,
    it is the first.

    Of hedges that are worth the same there, the one whose choices gain most on all shapes; of those
    that choose the same everywhere the greatest, since what wins narrowly elsewhere was not seen.

    Args:
        times: configuration → seconds for each shape; what is infinite tells nothing.
        library: seconds for each shape.
    """
    measured = device, shapes, times, library
    rows, sizes = _unused(entry, shapes)
    hedge, between = _worth_most(entry, _ALIKE, rows or sizes, _LOSS, measured)
    if sizes:
        hedges = [(hedge, one) for one in (*HEDGES, _NEVER) if one >= hedge]
        hedge, between = _worth_most(entry, hedges, sizes, _LOSS_BETWEEN, measured)
    return _with_hedges(entry, hedge, between)


def hedge_of(
    entry: Entry,
    device: Device,
    shapes: Sequence[Shape],
    times: Mapping[Configuration, Sequence[float]],
    library: Sequence[float],
) -> float:
    """The one hedge for all sizes: what ``hedged`` chooses on all its shapes together."""
    rows, sizes = _unused(entry, shapes)
    measured = device, shapes, times, library
    return _worth_most(entry, _ALIKE, [*rows, *sizes], _LOSS, measured)[0]


def _worth_most(
    entry: Entry,
    hedges: Sequence[tuple[float, float]],
    parts: _Parts,
    loss: float,
    measured: _Measured,
) -> tuple[float, float]:
    """Of hedges on measured sizes and between them; on all shapes where there are no parts."""
    everything = list(range(len(measured[1])))
    found = []
    for one in hedges:
        gains = [
            gain
            for part, columns in parts or [(entry, everything)]
            for gain in _gains(_with_hedges(part, *one), columns, measured)
        ]
        worth = math.fsum(min(gain, loss * gain) for gain in gains)
        every = _gains(_with_hedges(entry, *one), everything, measured)
        found.append((worth, math.fsum(every), one))
    return max(found)[-1]


def _with_hedges(entry: Entry, hedge: float, between: float) -> Entry:
    return replace(entry, facts={**entry.facts, "hedge": hedge, "hedge_between": between})


def _gains(entry: Entry, columns: Iterable[int], measured: _Measured) -> list[float]:
    """Logarithms of the library's time over that of what is chosen."""
    device, shapes, times, library = measured
    selector = compiled(entry.model(device))
    gains = []
    for column in columns:
        pick, _, _ = selector.choose(*shapes[column])
        seconds = library[column]
        if pick != LIBRARY:
            seconds = times[entry.stored[pick].configuration][column]
        gains.append(math.log(library[column] / seconds) if math.isfinite(seconds) else 0.0)
    return gains


def _unused(entry: Entry, shapes: Sequence[Shape]) -> tuple[_Parts, _Parts]:
    """Entries, and which shapes each was not made from: at measured sizes of n and k; elsewhere."""
    if entry.library is None:
        return [], []
    known = entry.library.n, entry.library.k
    points = set(entry.library.points)
    places = [_point(shape) for shape in shapes]
    rows: list[int] = []
    off: list[int] = []
    for column, place in enumerate(places):
        if place not in points:
            met = all(
                size in sizes or len(sizes) == 1
                for size, sizes in zip(place[1:], known, strict=True)
            )
            (rows if met else off).append(column)
    elsewhere = [(entry, off)]
    for axis, sizes in enumerate(known, 1):
        for size in sizes[1:-1]:
            columns = [
                column
                for column, place in enumerate(places)
                if place in points and place[axis] == size
            ]
            elsewhere.append((_without(entry, axis, size), columns))
    return [(entry, rows)] if rows else [], [part for part in elsewhere if part[1]]


def _without(entry: Entry, axis: int, size: int) -> Entry:
    """An entry as if the points of its library's table with this size had not been measured."""
    assert entry.library is not None
    kept = [number for number, point in enumerate(entry.library.points) if point[axis] != size]
    sizes = [entry.library.m, entry.library.n, entry.library.k]
    sizes[axis] = tuple(one for one in sizes[axis] if one != size)
    m, n, k = sizes
    library = Library(m, n, k, tuple(entry.library.seconds[number] for number in kept))
    stored = (
        replace(one, residuals=tuple(one.residuals[number] for number in kept))
        if one.residuals
        else one
        for one in entry.stored
    )
    return replace(entry, library=library, stored=tuple(stored))


def taken_over(entry: Entry, other: Entry) -> Entry:
    """An entry with the times of another, of the same family in another type.

    Waves, residuals, the library's times and hedges are the other's; machine code and how many
    blocks a multiprocessor takes are its own.  Configurations that the other has not are left out.

    Raises:
        CorruptRepositoryError: they have none in common.
    """
    times = {one.configuration: one for one in other.stored}
    stored = tuple(
        replace(times[one.configuration], assembled=one.assembled, occupancy=one.occupancy)
        for one in entry.stored
        if one.configuration in times
    )
    if not stored:
        raise CorruptRepositoryError(
            f"{other.name} has times of no configuration of {entry.name}",
            remedy=f"tune {entry.name.split()[0]} --times-of",
        )
    taken = ("search", "hedge", "hedge_between", "hedge_of_waves", "margin_s")
    facts = {name: one for name, one in entry.facts.items() if name not in taken}
    facts.update({name: other.facts[name] for name in taken if name in other.facts})
    facts["times_of"] = other.name
    return replace(entry, stored=stored, library=other.library, facts=facts)
