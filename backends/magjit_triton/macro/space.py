"""The schedules of a family (TSCompiler §5.1, Figure 5): axes, constraints, a grid to search on.

    Space ::= Axis+ within hard constraints         Axis ::= name, values

*Hard* constraints are those without which a kernel cannot run, or only with spilled registers:
shared memory of a block, registers of a thread.  *Soft* ones say what hardware is made for: whole
vectors along a row of a tile, shapes of the tensor cores' instructions, an even share of the tile
for each warp; what breaks them is left out of the first population and of small spaces, not of the
search.  A schedule is also a point in [0, 1]^axes; ``projected`` is the nearest schedule to a
point.  TMA and specialised warps would be two more axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from magjit_triton.codegen.matmul.configuration import Configuration, Work
from magjit_triton.macro.device import Device

__all__ = ["AXES", "Space"]

AXES: Mapping[str, tuple[int, ...]] = {
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (16, 32, 64, 128, 256),
    "block_k": (32, 64, 128),
    "warps": (4, 8),
    "stages": (2, 3, 4, 5),
    "group_m": (1, 8),
    "split_k": (1, 2, 4, 8),
    "persistent": (0, 1),
}
SMALL_AXES: Mapping[str, tuple[int, ...]] = {
    **AXES,
    "block_n": (32, 64, 128, 256),
    "block_k": (64, 128),
    "stages": (3, 4),
    "group_m": (8,),
    "split_k": (1, 4),
    "persistent": (0, 1),
}
"""For an exhaustive table."""

_REGISTERS_OF_THREAD = 255
_REGISTERS_BESIDE_TILES = 40
_VECTOR = 16


@dataclass(frozen=True)
class Space:
    """The legal schedules of a family on a device.

    Attributes:
        work: what is multiplied.
        device: whose limits hold.
        axes: name → values in order; one place on an axis is one step.
    """

    work: Work
    device: Device
    axes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: AXES)

    @classmethod
    def small(cls, work: Work, device: Device) -> Space:
        """A space that can be measured as a whole."""
        return cls(work, device, SMALL_AXES)

    @property
    def dimensions(self) -> int:
        """How many axes."""
        return len(self.axes)

    # A schedule and its place.

    def configuration(self, values: Sequence[int]) -> Configuration:
        """The schedule with these values of the axes."""
        named: dict[str, Any] = dict(zip(self.axes, values, strict=True))
        programs = self.device.multiprocessors if named.pop("persistent", 0) else 0
        return Configuration(**named, programs=programs)

    def values(self, one: Configuration) -> tuple[int, ...]:
        """A schedule's values of the axes."""
        return tuple(
            int(one.programs > 0) if name == "persistent" else getattr(one, name)
            for name in self.axes
        )

    def encoded(self, one: Configuration) -> tuple[float, ...]:
        """A schedule as a point: each value's place on its axis, from 0 to 1."""
        return tuple(
            values.index(value) / max(1, len(values) - 1)
            for value, values in zip(self.values(one), self.axes.values(), strict=True)
        )

    def projected(self, point: Sequence[float]) -> Configuration:
        """The schedule nearest to a point, legal or not (TSCompiler §5.1, projection)."""
        chosen = []
        for place, values in zip(point, self.axes.values(), strict=True):
            last = len(values) - 1
            chosen.append(values[min(last, max(0, math.floor(place * last + 0.5)))])
        return self.configuration(chosen)

    # Constraints.

    def registers(self, one: Configuration) -> int:
        """A rough number of registers of a thread: sums, tiles on their way, addresses."""
        operands = (one.block_m + self.work.products * one.block_n) * one.block_k
        # On compute capability 9.0 tensor cores read tiles from shared memory.
        held = 0 if self.device.capability >= 90 and one.block_m >= 64 else 0.25
        fragments = held * operands * self.work.dtype.itemsize / 4 / (32 * one.warps)
        return one.accumulators(self.work) + int(fragments) + _REGISTERS_BESIDE_TILES

    def is_legal(self, one: Configuration) -> bool:
        """Whether the hard constraints hold."""
        if one.split_k > 1 and one.programs:
            return False
        return (
            one.is_legal(self.work)
            and one.shared_memory(self.work) <= self.device.shared_per_block
            and self.registers(one) <= _REGISTERS_OF_THREAD
            and 32 * one.warps * self.registers(one) <= self.device.registers
        )

    def broken(self, one: Configuration) -> list[str]:
        """The soft constraints that do not hold, by name."""
        found = []
        if one.block_k * self.work.dtype.itemsize < 4 * _VECTOR:
            found.append("vector")
        if self.device.capability >= 90 and one.block_m >= 64:
            # A group of four warps multiplies 64 rows at once.
            if one.block_m // 64 * 4 < one.warps and one.block_n < 64:
                found.append("tensor core")
        elif one.block_m * one.block_n < 16 * 16 * one.warps:
            found.append("tensor core")
        if one.block_m * one.block_n * self.work.products < 32 * 32 * one.warps // 2:
            found.append("share of a warp")
        return found

    def all(self) -> Iterator[Configuration]:
        """Every legal schedule, in the order of the axes."""
        for values in product(*self.axes.values()):
            one = self.configuration(values)
            if self.is_legal(one):
                yield one

    @cached_property
    def legal(self) -> tuple[Configuration, ...]:
        """Every legal schedule."""
        return tuple(self.all())

    @cached_property
    def aligned(self) -> tuple[Configuration, ...]:
        """Those without a broken soft constraint."""
        return tuple(one for one in self.legal if not self.broken(one))

    def propagated(self, kept: Sequence[Configuration]) -> list[Configuration]:
        """A plain product's schedules for the group around it (TSCompiler §5.3).

        Two products of one left operand have their columns side by side, so that tiles of half the
        width, or with twice the warps, are theirs, too.
        """
        found = list(kept)
        if self.work.products > 1:
            found += [replace(one, block_n=one.block_n // 2) for one in kept if one.block_n > 16]
            found += [replace(one, warps=8) for one in kept]
        return [one for one in dict.fromkeys(found) if self.is_legal(one)]

    # Where a search begins.

    def intensity(self, one: Configuration) -> float:
        """Operations for each byte that a tile reads (Roller's balance of compute and memory)."""
        columns = self.work.products * one.block_n
        read = (one.block_m + columns) * self.work.dtype.itemsize
        return 2.0 * one.block_m * columns / read

    def first_population(self, count: int) -> list[Configuration]:
        """Hardware-aligned schedules that saturate a multiprocessor, tiles of all heights.

        Of each height of a tile those with the most operations a byte and a block's worth of
        loads ahead come first; heights take turns, so that few rows have their schedules, too.
        """
        ranked = sorted(
            self.aligned,
            key=lambda one: (
                one.split_k,
                one.programs,
                one.group_m == 1,
                -min(self.intensity(one), 64.0),
                abs(one.shared_memory(self.work) - self.device.shared_per_block // 2),
                one,
            ),
        )
        rows: dict[int, list[Configuration]] = {}
        for one in ranked:
            rows.setdefault(one.block_m, []).append(one)
        found: list[Configuration] = []
        while rows and len(found) < count:
            for height in sorted(rows, reverse=True):
                found.append(rows[height].pop(0))
                if not rows[height]:
                    del rows[height]
        return found[:count]

    def neighbours(self, one: Configuration) -> list[Configuration]:
        """Legal schedules one step away along one axis."""
        values = self.values(one)
        found = []
        for number, choices in enumerate(self.axes.values()):
            at = choices.index(values[number])
            for step in (at - 1, at + 1):
                if 0 <= step < len(choices):
                    other = (*values[:number], choices[step], *values[number + 1 :])
                    made = self.configuration(other)
                    if self.is_legal(made):
                        found.append(made)
        return found
