"""What a repository says of a family, checked on shapes and corrected by their times.

    entry → shapes (points of the library's table, random rows between them) → recorded Table
    Table → choices: what would be chosen, beside the best and the library
    Table → refitted: the library's table, the scale of waves and the hedge anew

Tables are recorded on a device; everything else needs none.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from magjit_triton.macro.device import Device
from magjit_triton.macro.errors import CorruptRepositoryError
from magjit_triton.macro.measuring import Shape, calibrated, hedged
from magjit_triton.macro.repository import Entry
from magjit_triton.macro.selector import compiled
from magjit_triton.macro.tuning import Table
from magjit_triton.macro.waves import LIBRARY, Library

__all__ = ["choices", "refitted", "shapes_of"]

_MOST_ROWS = 16384


def _points(library: Library, batch: int) -> list[Shape]:
    """The points of a library's table, in its order."""
    return [(batch, m, n, k) for m in library.m for n in library.n for k in library.k]


def shapes_of(entry: Entry, between: int = 0, seed: int = 0, batch: int = 1) -> list[Shape]:
    """What ``refitted`` wants times of.

    Args:
        between: random numbers of rows of each pair of n and k, besides the table's points; small
            ones are as likely as large ones on a logarithmic axis.
        seed: of them.

    Raises:
        CorruptRepositoryError: the entry has no times of the library.
    """
    library = _library_of(entry)
    numbers = random.Random(seed)
    rows = [
        (batch, max(1, round(_MOST_ROWS ** numbers.random())), n, k)
        for n in library.n
        for k in library.k
        for _ in range(between)
    ]
    return list(dict.fromkeys([*_points(library, batch), *rows]))


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
    """An entry with the library's times, the scale of each wave and the hedge from a table.

    Args:
        table: with times of the entry's configurations on the points of the library's table.

    Raises:
        CorruptRepositoryError: a point or a configuration is missing.
    """
    library = _library_of(entry)
    found = dict(zip(table.shapes, table.library, strict=True))
    points = _points(library, table.shapes[0][0] if table.shapes else 1)
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
    entry = replace(entry, library=replace(library, seconds=seconds))
    entry = calibrated(entry, device, table.shapes, table.times)
    return hedged(entry, device, table.shapes, table.times, table.library)
