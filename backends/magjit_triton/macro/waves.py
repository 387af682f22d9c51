"""How long a schedule takes on sizes: waves of tiles (TSCompiler §6), in Python.

    Wave      ::= lone, single, full, steady      each seconds = fixed + per_step * steps
    Library   ::= knots over m, n, k → log2(seconds)
    Candidate ::= tile, splits, persistence, occupancy, Wave
                  and on the library's knots, or nowhere, log2(measured / told by the waves)

The paper's model is ``T_s * ceil(blocks / blocks of a wave)``.  It fails, as the paper says, where
blocks are too few to fill the device; so the time of a wave depends here on how many blocks it
has, between three measured points: one block on the device (*lone*), one on each multiprocessor
(*single*), as many as fit (*full*); each further whole wave takes *steady*.  All are affine in the
number of steps over ``k``.  Bytes that must move are a floor, and splits pay for their sums.

What the waves leave out (what tiles share in the cache, how the memory is crowded, heights that
fill a tile badly) is measured: a time is multiplied by its *residual*, which is exact on the points
of the library's table and linear in the logarithms between them.  That is an addition of ours, not
the paper's.  Beyond the table a residual stays as it is at the end, whereas the library's time goes
on as a line: a trend of times is known to go on, a trend of errors is not.

``csrc/select.c`` computes the same, operation by operation.  The lines between ``# <formula>`` and
``# </formula>`` are shown in the documentation.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from magjit_triton.codegen.matmul.configuration import Configuration

__all__ = ["LIBRARY", "MOST_RESIDUAL", "Affine", "Candidate", "Library", "Model", "Wave"]

LIBRARY = -1
"""The index of the library's kernel."""
MOST_RESIDUAL = 32.0
"""The largest residual, either way, that a model takes."""

_MOST_ELEMENTS = 2**31 - 2**17
_N_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Affine:
    """``fixed + per_step * steps`` seconds."""

    fixed: float
    per_step: float

    def at(self, steps: float) -> float:
        """Seconds of so many steps."""
        return self.fixed + self.per_step * steps

    @classmethod
    def through(cls, first: tuple[float, float], second: tuple[float, float]) -> Affine:
        """Through two points (steps, seconds); never falling."""
        slope = max(0.0, (second[1] - first[1]) / (second[0] - first[0]))
        return cls(max(0.0, first[1] - slope * first[0]), slope)


@dataclass(frozen=True, slots=True)
class Wave:
    """The times of waves; see the module."""

    lone: Affine
    single: Affine
    full: Affine
    steady: Affine

    @classmethod
    def from_json(cls, found: dict[str, dict[str, float]]) -> Wave:
        """What ``as_json`` gave."""
        return cls(**{name: Affine(**found[name]) for name in ("lone", "single", "full", "steady")})

    def as_json(self) -> dict[str, dict[str, float]]:
        """All numbers."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule as the model knows it.

    Attributes:
        configuration: the cut.
        occupancy: blocks of a multiprocessor at a time, at least 1.
        wave: times of waves.
        sum_fixed, sum_each: seconds of the kernel that adds partial sums, and of each of them.
        residuals: on the points of the library's table, in its order, the logarithm to base 2 of
            measured times over those of the waves; none where the waves stand alone.
    """

    configuration: Configuration
    occupancy: int
    wave: Wave
    sum_fixed: float = 0.0
    sum_each: float = 0.0
    residuals: tuple[float, ...] = ()

    def numbers(self) -> list[float]:
        """As the C part takes them."""
        cut, wave = self.configuration, self.wave
        affine = [
            one
            for a in (wave.lone, wave.single, wave.full, wave.steady)
            for one in (a.fixed, a.per_step)
        ]
        tile = [cut.block_m, cut.block_n, cut.block_k, cut.split_k, min(cut.programs, 1)]
        return [*map(float, tile), float(self.occupancy), *affine, self.sum_fixed, self.sum_each]


@dataclass(frozen=True, slots=True)
class Library:
    """The library's times, measured on a grid; between its points the logarithm is linear.

    Attributes:
        m, n, k: rising sizes; one alone where a size is a number.
        seconds: of each m, n and k, in this order, row-major.
    """

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.seconds) != len(self.m) * len(self.n) * len(self.k):
            raise ValueError("a time for each point of the grid")
        for knots in (self.m, self.n, self.k):
            if not knots or any(b <= a for a, b in pairwise(knots)):
                raise ValueError("sizes of a grid rise")

    def times(self, factor: float, less: float = 0.0) -> Library:
        """All times by a factor, and less so many seconds, but for half of a time at most."""
        scaled = (one * factor for one in self.seconds)
        return replace(self, seconds=tuple(max(one - less, one / 2) for one in scaled))

    @property
    def knots(self) -> tuple[list[float], list[float], list[float]]:
        """Logarithms of the sizes."""
        m, n, k = ([math.log2(one) for one in sizes] for sizes in (self.m, self.n, self.k))
        return m, n, k

    @property
    def values(self) -> list[float]:
        """Logarithms of the times."""
        return [math.log2(max(one, 1e-9)) for one in self.seconds]

    @property
    def points(self) -> list[tuple[int, int, int]]:
        """m, n and k of each time."""
        return [(m, n, k) for m in self.m for n in self.n for k in self.k]

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Library:
        """What ``as_json`` gave."""
        return cls(*(tuple(found[name]) for name in ("m", "n", "k", "seconds")))

    def as_json(self) -> dict[str, Any]:
        """All numbers."""
        return asdict(self)


class Model:
    """The cost model of a family on a device: the reference of ``magjit_triton._select``.

    Args:
        candidates: at least one.
        library: None where it was not measured: then it is chosen only where no other can be.
        multiprocessors: of the device.
        bandwidth: bytes a second of its memory.
        products: of one left operand.
        itemsize: bytes of an element.
        unit: what ``k`` must be a multiple of.
        hedge: by which share a candidate must be faster than the library: the model errs, and the
            library is what users had before.
        hedge_between: the same where n or k is no size of the library's table, at most 1, which
            no candidate meets; None, or less than ``hedge``, is ``hedge``.  An axis of one size
            has all.
        margin: by how many seconds, besides.

    Raises:
        ValueError: residuals are not one for each point of the library's table, or out of range;
            or a hedge or the margin is.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        library: Library | None,
        *,
        multiprocessors: int,
        bandwidth: float,
        products: int = 1,
        itemsize: int = 2,
        unit: int = 128,
        hedge: float = 0.0,
        hedge_between: float | None = None,
        margin: float = 0.0,
    ) -> None:
        if margin < 0.0:
            raise ValueError("a margin is no gain")
        self.candidates = tuple(candidates)
        if library is not None and (hedge or margin):
            library = library.times(1.0 - hedge, margin)
        self.library = library
        self.between = 1.0
        if hedge_between is not None and hedge_between > hedge:
            if hedge_between > 1.0:
                raise ValueError("a hedge is a share")
            self.between = (1.0 - hedge_between) / (1.0 - hedge)
        self.multiprocessors = multiprocessors
        self.bandwidth = bandwidth
        self.products = products
        self.itemsize = itemsize
        self.unit = unit
        points = 0 if library is None else len(library.seconds)
        for one in self.candidates:
            if one.residuals and len(one.residuals) != points:
                raise ValueError("a residual for each point of the library's table")
            if not all(abs(residual) <= MOST_RESIDUAL for residual in one.residuals):
                raise ValueError("a residual is out of range")

    def fits(self, batch: int, m: int, n: int, k: int) -> bool:
        """Whether the kernels can compute these sizes."""
        if min(batch, m, n, k) <= 0 or k % self.unit or n % _N_MULTIPLE:
            return False
        largest = max(float(m) * k, float(n) * k, float(m) * n) * batch
        return largest < _MOST_ELEMENTS

    def grid(self, number: int, batch: int, m: int, n: int, k: int) -> int:
        """How many programs a candidate's product has."""
        one = self.candidates[number]
        tiles = self._tiles(one, batch, m, n)
        most = self.multiprocessors * one.occupancy
        return min(tiles, most) if one.configuration.programs else tiles

    @staticmethod
    def _tiles(one: Candidate, batch: int, m: int, n: int) -> int:
        cut = one.configuration
        return batch * -(-m // cut.block_m) * -(-n // cut.block_n) * cut.split_k

    def seconds(self, number: int, batch: int, m: int, n: int, k: int) -> float:
        """The time of a candidate: what its waves say, corrected by its residuals."""
        told = self.of_waves(number, batch, m, n, k)
        residuals = self.candidates[number].residuals
        if not residuals:
            return told
        residual = 0.0
        for point, weight in self._corners(batch, m, n, k):
            residual += weight * residuals[point]
        return told * math.exp2(residual)

    def _corners(self, batch: int, m: int, n: int, k: int) -> list[tuple[int, float]]:
        """The eight points of the library's table around a shape, and their shares of it."""
        assert self.library is not None
        _, columns, depth = self.library.knots
        (i, u), (j, v), (o, w) = (
            _place(knots, math.log2(float(size)))
            for knots, size in zip(self.library.knots, (batch * m, n, k), strict=True)
        )
        # Beyond the ends a correction is what it is there; an axis of one point has no next one.
        rows, breadths, depths = (
            ((at, 1.0 - inside), (at + (len(knots) > 1), inside))
            for at, knots, inside in (
                (i, self.library.m, min(max(u, 0.0), 1.0)),
                (j, self.library.n, min(max(v, 0.0), 1.0)),
                (o, self.library.k, min(max(w, 0.0), 1.0)),
            )
        )
        return [
            ((row * len(columns) + column) * len(depth) + place, share * breadth * length)
            for row, share in rows
            for column, breadth in breadths
            for place, length in depths
        ]

    # <formula>
    def of_waves(self, number: int, batch: int, m: int, n: int, k: int) -> float:
        """The time of a candidate without residuals."""
        one = self.candidates[number]
        cut, wave = one.configuration, one.wave
        tiles = self._tiles(one, batch, m, n)
        steps = float((-(-k // cut.block_k) + cut.split_k - 1) // cut.split_k)
        processors = self.multiprocessors
        capacity = processors * one.occupancy
        if tiles <= capacity:
            result = self._wave(wave, steps, tiles, capacity)
        else:
            whole = (tiles - 1) // capacity
            tail = tiles - whole * capacity
            full, steady = wave.full.at(steps), wave.steady.at(steps)
            share = self._wave(wave, steps, tail, capacity) / full if full > 0 else 1.0
            result = full + (whole - 1) * steady + steady * share
        columns = float(n) * self.products
        elements = float(m) * k + columns * k + float(m) * n
        result = max(result, batch * elements * self.itemsize / self.bandwidth)
        if cut.split_k > 1:
            sums = batch * float(m) * columns
            result += one.sum_fixed + one.sum_each * (sums * cut.split_k)
        return result

    def _wave(self, wave: Wave, steps: float, tiles: int, capacity: int) -> float:
        single = wave.single.at(steps)
        if tiles <= self.multiprocessors:
            if self.multiprocessors == 1:
                return single
            lone = wave.lone.at(steps)
            return lone + (single - lone) * ((tiles - 1) / (self.multiprocessors - 1))
        full = wave.full.at(steps)
        part = (tiles - self.multiprocessors) / (capacity - self.multiprocessors)
        return single + (full - single) * part

    # </formula>

    def library_seconds(self, batch: int, m: int, n: int, k: int) -> float:
        """The library's time, less the hedges; a batch counts as more rows."""
        if self.library is None:
            return math.inf
        values = self.library.values
        _, columns, depth = self.library.knots
        places = [
            _place(knots, math.log2(float(size)))
            for knots, size in zip(self.library.knots, (batch * m, n, k), strict=True)
        ]
        (i, u), (j, v), (o, w) = places
        hedged = 1.0 if v in (0.0, 1.0) and w in (0.0, 1.0) else self.between

        def along_k(row: int, column: int) -> float:
            at = (row * len(columns) + column) * len(depth) + o
            if len(depth) == 1:
                return values[at]
            return values[at] + (values[at + 1] - values[at]) * w

        def along_n(row: int) -> float:
            first = along_k(row, j)
            return first if len(columns) == 1 else first + (along_k(row, j + 1) - first) * v

        first = along_n(i)
        if len(self.library.m) == 1:
            return hedged * math.exp2(first)
        return hedged * math.exp2(first + (along_n(i + 1) - first) * u)

    def choose(self, batch: int, m: int, n: int, k: int) -> tuple[int, int, float]:
        """The index of the fastest, its programs, and its time; ``LIBRARY`` has no programs."""
        if not self.fits(batch, m, n, k):
            return LIBRARY, 0, 0.0
        best, least = LIBRARY, self.library_seconds(batch, m, n, k)
        for number in range(len(self.candidates)):
            found = self.seconds(number, batch, m, n, k)
            if found < least:
                best, least = number, found
        grid = 0 if best == LIBRARY else self.grid(best, batch, m, n, k)
        return best, grid, least


def _place(knots: Sequence[float], value: float) -> tuple[int, float]:
    """The interval of a value and where in it; beyond the ends the last interval goes on."""
    if len(knots) == 1:
        return 0, 0.0
    at = min(max(bisect_right(knots, value) - 1, 0), len(knots) - 2)
    return at, (value - knots[at]) / (knots[at + 1] - knots[at])
