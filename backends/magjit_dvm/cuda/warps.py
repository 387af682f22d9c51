"""How many warps of a block compute, besides the one that feeds them: what registers allow."""

from __future__ import annotations

from magjit_dvm.cuda.forms import (
    ADDING,
    BATCHED,
    CHUNKED,
    EIGHTH,
    FLAT,
    GRADIENTS,
    HALF,
    LANES,
    NORMS,
    QUARTER,
    READ_ONCE,
    SQUARES,
)
from magjit_dvm.cuda.words import OF_POSITIONS

__all__ = [
    "EACH_OF_ONCE",
    "OF_BATCHES",
    "OF_CHUNKS",
    "OF_GRADIENTS",
    "OF_NARROW_ROWS",
    "OF_SMALL",
    "WARPS",
    "WARPS_OF_SQUARES",
    "each_of",
    "most_threads",
    "part_of_warp",
]

WARPS = {64: 11, 32: 15, 24: 15, 16: 19, 8: 19}
"""By R."""
OF_SMALL = {64: 11, 32: 19, 24: 19, 16: 27, 8: 27}
"""The same of kernels that are small: that with adders, which count, and that of norms."""
OF_GRADIENTS = {16: 19, 36: 15}
"""The same of the kernel of norms' gradients, most of whose registers are sums: with more warps, it
would spill them.  Rows have the first R that they fit with."""
WARPS_OF_SQUARES = 19
"""The same of the kernel of squares, for each R: nothing else has as much under way in memory."""
OF_CHUNKS = {each: OF_SMALL[each] for each in (24, 32, 64)}
"""The same of the kernel of rows in chunks."""
OF_BATCHES = {each: OF_SMALL[each] for each in (16, 24, 32, 64)}
"""The same of that of rows' results in batches."""
EACH_OF_ONCE = 32
"""R of rows that are read once, in chunks."""

OF_NARROW_ROWS = (
    *((32, EIGHTH, 8), (64, EIGHTH, 16), (96, EIGHTH, 24), (128, QUARTER, 16)),
    *((192, QUARTER, 24), (256, QUARTER, 32), (384, HALF, 24), (480, HALF, 32)),
)
"""Of rows up to so many columns, the part of a warp that each has, and R: the largest that leaves
few lanes without elements, since a word takes as long for fewer."""


def part_of_warp(cols: int) -> tuple[int, int] | None:
    """Form and R of rows of so many columns, where each has a part of a warp."""
    return next(((form, each) for most, form, each in OF_NARROW_ROWS if cols <= most), None)


def each_of(form: int) -> tuple[int, ...]:
    """Values of R, each of which has a kernel of its own."""
    others = {
        FLAT: (8, 16, 32),
        SQUARES: OF_POSITIONS,
        GRADIENTS: tuple(OF_GRADIENTS),
        CHUNKED: tuple(OF_CHUNKS),
        BATCHED: tuple(OF_BATCHES),
        READ_ONCE: (EACH_OF_ONCE,),
    }
    if form in LANES:
        return tuple(each for _, other, each in OF_NARROW_ROWS if other == form)
    return others.get(form, (8, 16, 24, 32, 64))


def most_threads(each: int, form: int) -> int:
    """Of a block of the kernel for R: with more, registers would not do."""
    others = {GRADIENTS: OF_GRADIENTS, BATCHED: OF_BATCHES}
    others |= dict.fromkeys((ADDING, NORMS), OF_SMALL)
    others |= dict.fromkeys((CHUNKED, READ_ONCE), OF_CHUNKS)
    warps = WARPS_OF_SQUARES if form == SQUARES else others.get(form, WARPS)[each]
    return 32 * (warps + 1)
