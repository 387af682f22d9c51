"""How many warps of a block compute, besides the one that feeds them: what registers allow."""

from __future__ import annotations

from magjit_dvm.cuda.forms import ADDING, FLAT, GRADIENTS, NORMS, SQUARES
from magjit_dvm.cuda.words import OF_POSITIONS

__all__ = ["OF_GRADIENTS", "OF_SMALL", "WARPS", "WARPS_OF_SQUARES", "each_of", "most_threads"]

WARPS = {64: 11, 32: 15, 24: 15, 16: 19, 8: 19}
"""By R."""
OF_SMALL = {64: 11, 32: 19, 24: 19, 16: 27, 8: 27}
"""The same of kernels that are small: that with adders, which count, and that of norms."""
OF_GRADIENTS = {16: 19, 36: 15}
"""The same of the kernel of norms' gradients, most of whose registers are sums: with more warps, it
would spill them.  Rows have the first R that they fit with."""
WARPS_OF_SQUARES = 19
"""The same of the kernel of squares, for each R: nothing else has as much under way in memory."""


def each_of(form: int) -> tuple[int, ...]:
    """Values of R, each of which has a kernel of its own."""
    others = {FLAT: (8, 16, 32), GRADIENTS: tuple(OF_GRADIENTS), SQUARES: OF_POSITIONS}
    return others.get(form, (8, 16, 24, 32, 64))


def most_threads(each: int, form: int) -> int:
    """Of a block of the kernel for R: with more, registers would not do."""
    others = {GRADIENTS: OF_GRADIENTS, ADDING: OF_SMALL, NORMS: OF_SMALL}
    warps = WARPS_OF_SQUARES if form == SQUARES else others.get(form, WARPS)[each]
    return 32 * (warps + 1)
