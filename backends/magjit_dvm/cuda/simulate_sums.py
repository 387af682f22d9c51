"""Sums across rows as the interpreter in plain Python keeps and writes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from magjit_dvm.cuda.simulate_addresses import Addresses
from magjit_dvm.cuda.simulate_memory import ImageError

__all__ = ["KeptSums"]

Array = Any


class KeptSums(Addresses):
    """Of a block or a run of tiles, and a row's place in its tile: what has been added up.

    Attributes:
        sums: that, by where it is in scratch memory.
    """

    sums: dict[tuple[int, int], dict[int, Array]]
    scratch: dict[int, Array]
    empty: Array

    def place_of(self, tile: int, blocks: int) -> int:
        """The row of the parts of what a tile adds to sums: of a block or of a run of tiles."""
        fixed = self.h["fixed"]
        return tile % blocks if tile < fixed else blocks + ((tile - fixed) >> self.h["shift"])

    def write_sums(self, place: int, places: int) -> None:
        """What warps have added up of a block, or of a run of tiles, to its row of the parts."""
        cols, own = self.h["cols"], [one for (of, _), one in self.sums.items() if of == place]
        if not own:
            raise ImageError("parts of sums without a tile")
        for number, rows in enumerate(zip(*map(self.values_of_sums, own), strict=True)):
            total = np.add.reduce(np.array(rows).view(np.float32).reshape(len(rows), -1)[:, :cols])
            to = self.h["parts"] + 4 * cols * (number * places + place)
            self.write(to + 4 * np.arange(cols), "32", total.view(np.uint32))

    def values_of_sums(self, kept: Any) -> list[Array]:
        """Of a row's warps, each sum's elements."""
        return [kept[at] for at in sorted(kept)]

    def open_sums(self, place: int, group: int) -> None:
        """What a row's warps have added up so far is in scratch memory."""
        at = range(0, self.h["sums"] * 128 * self.each, 128 * self.each)
        known = self.sums.get((place, group), {one: np.zeros_like(self.empty) for one in at})
        self.scratch.update({one: value.copy() for one, value in known.items()})

    def close_sums(self, place: int, group: int) -> None:
        """It is kept."""
        end = self.h["sums"] * 128 * self.each
        self.sums[place, group] = {at: one for at, one in self.scratch.items() if at < end}

    def add_to_slot(self, at: int, more: Array) -> None:
        """Float32 numbers to a slot of scratch memory."""
        if at not in self.scratch:
            raise ImageError("scratch memory is read before it is written")
        with np.errstate(all="ignore"):
            total = self.scratch[at].view(np.float32) + more
        self.scratch[at] = total.view(np.uint32)
