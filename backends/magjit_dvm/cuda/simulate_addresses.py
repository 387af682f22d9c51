"""What the interpreter in plain Python reads: by descriptors, by columns, of tables and stages."""

from __future__ import annotations

from typing import Any

import numpy as np

from magjit_dvm.cuda.formats import elements_of, registers_of
from magjit_dvm.cuda.simulate_memory import BYTES, ImageError, Memory
from magjit_dvm.cuda.words import OF_STAGE
from magjit_dvm.philox import FOURS, uniforms

__all__ = ["Addresses"]

Array = Any


class Addresses:
    """Of a word under way: its descriptor, its pointer, the elements of a row's warps."""

    h: dict[str, int]
    program: Array
    each: int
    group: int
    row: int
    w1: int
    pointer: int
    element: Array
    valid: Array
    empty: Array
    F0: int
    y: int
    memories: list[Memory]
    local: Array
    staged: dict[int, Any]
    periods: dict[int, int]
    repeats: dict[int, int]

    def places(self, addresses: Array, size: int, write: bool = False) -> tuple[Memory, Array]:
        for one in self.memories:
            low, high = int(addresses.min()), int(addresses.max()) + size
            if one.address <= low and high <= one.address + len(one.data):
                if write and not one.writable:
                    continue
                return one, (addresses - one.address)[..., None] + np.arange(size)
        raise ImageError("an access out of bounds, or a write to an input")

    def read(self, addresses: Array, what: str) -> Array:
        """Elements at addresses, as registers have them."""
        size = BYTES[what]
        if not addresses.size:
            return np.zeros(0, np.uint32)
        if (addresses % size).any():
            raise ImageError("an element that is not aligned")
        memory, places = self.places(addresses, size)
        return registers_of(memory.data[places], what)

    def write(self, addresses: Array, what: str, values: Array) -> None:
        """Registers to elements at addresses."""
        if not addresses.size:
            return
        if (addresses % BYTES[what]).any():
            raise ImageError("an element that is not aligned")
        memory, places = self.places(addresses, BYTES[what], write=True)
        memory.data[places] = elements_of(values, what)

    def where_valid(self, addresses: Array, what: str) -> Array:
        """A tile of the elements at addresses, one for each that is there; 0 elsewhere."""
        value = np.zeros(self.empty.shape, np.uint32)
        value[self.valid] = self.read(addresses, what)
        return value

    def described(self, elements: Array) -> Array:
        """Addresses through the word's descriptor."""
        at = self.w1 // 16
        rest, addresses = elements.copy(), np.full(elements.shape, self.pointer)
        for k in range(int(self.program[at][0])):
            size, magic, shift = (int(one) for one in self.program[at + 1 + k][:3])
            stride = int(self.program[at + 1 + k][3:].view(np.int32)[0])
            quotient = ((rest * magic >> 32) + rest) >> shift
            addresses = addresses + (rest - quotient * size) * stride
            rest = quotient
        if rest[self.valid].any() if rest.shape == self.valid.shape else rest.any():
            raise ImageError("a descriptor of another space")
        return addresses

    def from_global(self, how: str, what: str) -> Array:
        if what == "at":
            return self.described(self.element).astype(np.uint32)
        if how == "e":
            return self.where_valid(self.described(self.element)[self.valid], what)
        if how in ("n", "t"):
            return self.read(self.of_squares(how, BYTES[what]), what)
        if (self.valid.sum(1) % 4).any():
            raise ImageError("a part of four elements")
        first = self.described(self.element).reshape(self.group, -1, 4)[..., :1]
        size = BYTES[what]
        if how == "v" and (first[self.valid[:, ::4]] % min(4 * size, 16)).any():
            raise ImageError("four elements that are not aligned")
        step = np.arange(4) * (size if how == "v" else 0)
        addresses = (first + step).reshape(self.valid.shape)
        return self.where_valid(addresses[self.valid], what)

    def check_fours(self, addresses: Array, size: int) -> None:
        """Four elements at a time are there as a whole, side by side and aligned."""
        fours = addresses.reshape(self.group, -1, 4)[self.valid[:, ::4]]
        if (self.valid.sum(1) % 4).any():
            raise ImageError("a part of four elements")
        if (np.diff(fours, axis=1) != size).any() or (fours[:, 0] % min(4 * size, 16)).any():
            raise ImageError("four elements that are not side by side, or not aligned")

    def of_squares(self, how: str, size: int) -> Array:
        """Addresses of a whole slice: rows equally far apart, of a lane's columns no space between.

        Lanes, rows and the elements of a row are 128·j + 4·lane + i.
        """
        addresses = self.described(self.element)
        count, *sizes = self.program[self.w1 // 16 :][:4, 0].tolist()
        if not self.valid.all() or count < 6 or sizes != [32, 4, self.each // 4]:
            raise ImageError("a part of a slice, or squares of another size")
        parts = addresses.reshape(self.group, self.each // 4, 32, 4)
        along, step = (parts.swapaxes(1, 3), 4) if how == "n" else (parts, self.each // 4)
        if (np.diff(along, axis=1) != size).any():
            raise ImageError("elements that are not side by side")
        if (along[:, 0] % min(step * size, 16)).any():
            raise ImageError("elements that are not aligned")
        others = np.diff(parts, axis=1 if how == "n" else 3)
        if (others != (others[:, :1] if how == "n" else others[..., :1])).any():
            raise ImageError("elements that are not equally far apart")
        return addresses

    def at_positions(self, addresses: Array, positions: Array) -> Array:
        """Addresses in the word's table, whose first position is at ``addresses``."""
        bound, step = self.program[self.w1 // 16][1:3].tolist()
        if (positions >= bound).any():
            raise IndexError("a position beyond its table")
        return addresses + positions.astype(np.int64) * int(np.uint32(step).view(np.int32))

    def row_at(self, positions: Array) -> Array:
        """Addresses of the row's element at positions that are all one, for each of its warps."""
        return self.at_positions(self.described(np.full(self.group, self.row)), positions)

    def from_table(self, what: str, positions: Array) -> Array:
        """Each element at a position of its own."""
        first = self.described(self.element)[self.valid]
        return self.where_valid(self.at_positions(first, positions[self.valid]), what)

    def row_of_table(self, what: str, positions: Array) -> Array:
        """A row that lies side by side."""
        cols = int(self.program[self.w1 // 16][3])
        first = self.row_at(positions)[:, None] + np.zeros(self.empty.shape, np.int64)
        if cols != self.h["cols"] or (self.valid.sum(1) % 4).any():
            raise ImageError("a row of another table")
        if (first % min(4 * BYTES[what], 16)).any():
            raise ImageError("four elements that are not aligned")
        addresses = first + (self.element - self.row * cols) * BYTES[what]
        return self.where_valid(addresses[self.valid], what)

    def from_columns(self, what: str) -> Array:
        """A vector that all rows share."""
        if self.w1 != self.h["cols"]:
            raise ImageError("a vector of other rows")
        if (self.pointer % (4 * BYTES[what])) != 0:
            raise ImageError("four elements that are not aligned")
        addresses = self.pointer + (self.element - self.row * self.w1) * BYTES[what]
        return self.where_valid(addresses[self.valid], what)

    def drawn(self) -> Array:
        """Random numbers."""
        at = self.w1 // 16
        (count, *key, place), (threads, *_, fours) = self.program[at : at + 2].tolist()
        if count != 1:
            raise ImageError("numbers that are drawn by no descriptor")
        seed = key[0] | key[1] << 32
        drawn = uniforms(self.element.ravel(), seed, place, threads * FOURS + fours)
        return drawn.view(np.uint32).reshape(self.empty.shape)

    def from_row_of_stage(self) -> Array:
        """The row's number of what has been copied."""
        if self.w1 not in self.periods:
            raise ImageError("a stage without this input")
        low, high, size, address = self.staged[self.w1]
        place = np.array([address + self.row * size])
        if not low <= place[0] < high or address & 0xFFFFFFFF != self.F0:
            raise ImageError("an element that was not copied")
        if period := self.periods[self.w1]:
            place = np.array([address + self.row % period * size])
        return self.read(place, OF_STAGE[self.y])

    def from_stage(self, what: str, aligned: bool) -> Array:
        """Elements of what has been copied."""
        if self.w1 not in self.staged:
            raise ImageError("a stage without this input")
        low, high, size, address = self.staged[self.w1]
        if self.w1 in self.periods or size != BYTES[what] or address & 0xFFFFFFFF != self.F0:
            raise ImageError("a load of another input")
        addresses = low + self.local * size
        if aligned and what in ("32", "f16", "bf16", "u8"):
            if (addresses[:, ::4] % (4 * size)).any():
                raise ImageError("four elements that are not aligned")
        inside = self.valid & (addresses + size <= high)
        if (inside != self.valid).any():
            raise ImageError("elements that were not copied")
        if period := self.repeats.get(self.w1, 0) * size:
            addresses = address + (addresses - address) % period
        value = self.empty.copy()
        value[inside] = self.read(addresses[inside], what)
        return value
