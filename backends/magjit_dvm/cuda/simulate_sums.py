"""Sums across rows as the interpreter in plain Python keeps and writes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from magjit_dvm.cuda.adders import NONE
from magjit_dvm.cuda.simulate_addresses import Addresses
from magjit_dvm.cuda.simulate_memory import BYTES, ImageError
from magjit_dvm.cuda.simulate_rows import norm_gradient, standardized
from magjit_dvm.cuda.words import OF_COLUMNS, OF_ROWS, OPCODES, PERIOD_SHIFT

__all__ = ["KeptSums"]

Array = Any


class KeptSums(Addresses):
    """Of a block or a run of tiles, and a row's place in its tile: what has been added up.

    Attributes:
        sums: that, by where it is in scratch memory.
        added: what adders have, of each block or run: sums, columns.
    """

    sums: dict[tuple[int, int], dict[int, Array]]
    added: dict[int, Array]
    scratch: dict[int, Array]
    empty: Array
    row: int
    inputs: list[tuple[int, int, int]]

    def find_sums(self) -> None:
        """What the header says of them in one number."""
        packed = self.h["sums"]
        self.h["sums"], self.h["shift"] = packed & 255, packed >> 8 & 255
        self.h["adders"] = packed >> 16

    def place_of(self, tile: int, blocks: int) -> int:
        """The row of the parts of what a tile adds to sums: of a block or of a run of tiles."""
        fixed = self.h["fixed"]
        return tile % blocks if tile < fixed else blocks + ((tile - fixed) >> self.h["shift"])

    def write_sums(self, place: int, places: int) -> None:
        """What warps have added up of a block, or of a run of tiles, to its row of the parts."""
        if self.h["adders"] or self.is_whole:
            if place not in self.added:
                raise ImageError("parts of sums without a tile")
            for number, total in enumerate(self.added[place]):
                self.write_part(number, places, place, total)
            return
        cols, own = self.h["cols"], [one for (of, _), one in self.sums.items() if of == place]
        if not own:
            raise ImageError("parts of sums without a tile")
        for number, rows in enumerate(zip(*map(self.values_of_sums, own), strict=True)):
            total = np.add.reduce(np.array(rows).view(np.float32).reshape(len(rows), -1)[:, :cols])
            self.write_part(number, places, place, total)

    def write_part(self, number: int, places: int, place: int, total: Array) -> None:
        cols = self.h["cols"]
        to = self.h["parts"] + 4 * cols * (number * places + place)
        self.write(to + 4 * np.arange(cols), "32", total.view(np.uint32))

    def add_row(self, place: int, first: int) -> None:
        """What adders make of a row whose first element is this one."""
        head, w1, quads, w3 = (int(one) for one in self.program[self.h["rest0"]])
        if OPCODES[head & 255] != "add.rows" or self.h["adders"] * 128 * quads < self.h["cols"]:
            raise ImageError("adders without columns of their own")
        what = OF_COLUMNS[w3 >> 16]
        g, x = (self.tile_of_stage(head >> shift & 15, first, what) for shift in (16, 20))
        mean, root = (
            None if one == NONE else self.number_of_row(one) for one in (w1 & 255, w1 >> 8)
        )
        with np.errstate(all="ignore"):
            self.add_norm(place, w3 & 0xFFFF, g, standardized(x, mean, root))

    @property
    def is_whole(self) -> bool:
        """Whether one word is all of a row's gradient."""
        return OPCODES[int(self.program[self.h["first0"]][0]) & 255] == "norm.back"

    def back_row(self, place: int, first: int) -> None:
        """What that word makes of a row whose first element is this one."""
        (head, w1, share, w3), (stores, _, low, high), (loads, weights, _, _) = (
            [int(one) for one in word] for word in self.program[self.h["first0"] :][:3]
        )
        what = OF_COLUMNS[w3]
        if OPCODES[stores & 255] != f"st.g.{what}" or self.h["cols"] % 4:
            raise ImageError("no result of columns by four")
        g, x = (self.tile_of_stage(head >> shift & 15, first, what) for shift in (16, 20))
        mean, root = (
            None if one == NONE else self.number_of_row(one) for one in (w1 & 255, w1 >> 8 & 255)
        )
        if OPCODES[loads & 255] != "lt.w":
            raise ImageError("weights that are not kept")
        weight = self.kept(weights).view(np.float32).ravel()[: self.h["cols"]]
        with np.errstate(all="ignore"):
            norm = standardized(x, mean, root)
            self.add_norm(place, w1 >> 16, g, norm)
            part = np.array([share], np.uint32).view(np.float32)
            back = norm_gradient(g * weight, norm, part, root, mean is not None)
        addresses = (low | high << 32) + (first + np.arange(self.h["cols"])) * BYTES[what]
        if addresses[0] % (4 * BYTES[what]):
            raise ImageError("four elements that are not aligned")
        self.write(addresses, what, back.astype(np.float32).view(np.uint32))

    def add_norm(self, place: int, numbers: int, g: Array, norm: Array) -> None:
        """To sums that are kept in registers: G · X, and G, unless nobody asks for its sum."""
        added = self.added.setdefault(place, np.zeros((self.h["sums"], self.h["cols"]), np.float32))
        added[numbers & 255] += g * norm
        if numbers >> 8 != NONE:
            added[numbers >> 8] += g

    def kept(self, at: int) -> Array:
        raise NotImplementedError

    def tile_of_stage(self, k: int, first: int, what: str) -> Array:
        """A row of an input that stages have."""
        address, size, at = self.inputs[k]
        places = address + (first + np.arange(self.h["cols"])) * size
        low, high, _, _ = self.staged[at]
        if size != BYTES[what] or places[0] < low or places[-1] + size > high:
            raise ImageError("elements that were not copied")
        if (places[::4] % (4 * size)).any():
            raise ImageError("four elements that are not aligned")
        return self.read(places, what).view(np.float32)

    def number_of_row(self, k: int) -> Array:
        """What an input has of the row."""
        address, size, _ = self.inputs[k]
        if size % (1 << PERIOD_SHIFT) != OF_ROWS + 4:
            raise ImageError("an input that rows have no numbers of")
        row = self.row % (size >> PERIOD_SHIFT or self.h["rows"])
        return self.read(np.array([address + 4 * row]), "32").view(np.float32)

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
