"""Squares of two dimensions, for operands that lie in memory across one another.

Where results lie along one dimension in memory and an operand along another, as in ``x + y.t()``,
a line of elements would read the operand with as many accesses as elements.  The space is then
divided into stacks, 64 rows of 32 elements, and these into slices, the 32 R elements of a warp::

    … x down / 64 x across / 32 x 64 / R x R / 4 x 4 x 32

Element 128·j + 32·h + 4·l + i of a slice is in row R / 4·h + j: what a lane has of a column, one
element for each j, is side by side in the operand, 16 bytes in one access.  With R = 32, of 2 bytes
an element, a slice is a square of 32 x 32: 64 bytes of a column in the operand, 64 of a row in all
others.  A request to the L2 cache is for parts of 128 bytes of memory, and these requests, not
bytes, are what limits a slice that is narrow one way.
"""

from __future__ import annotations

from collections.abc import Iterable

from magjit_dvm.cuda.space import Operand, Space
from magjit_dvm.program import NodeKind

__all__ = ["ACROSS", "DOWN", "in_squares", "is_near", "is_transposed"]

DOWN, ACROSS, PARTS = 64, 32, 6
"""Rows and columns of a stack; dimensions that take the place of two."""
_LEAST = 1 << 16
"""Elements from which on squares are worth it; fewer stay in caches."""


def in_squares(space: Space) -> None:
    """Divide the space into squares, if an operand asks for it and the sizes allow it."""
    loads = sorted({node.aux for node in space.program.nodes if node.kind is NodeKind.LOAD})
    inputs = [one for number in loads if (one := space.inputs[number]) is not None]
    if space.reduced or len(space.order) < 2 or space.rows < _LEAST:
        return
    if space.has_positions or space.draws:
        return
    sizes = {one.size for one in (*inputs, *space.outputs)}
    if not sizes <= {2, 4} or not space.outputs:
        return
    across, each = space.order[-1], 64 // max(sizes)
    if space.size[across] % ACROSS:
        return
    fits = all(
        one.strides[across] == one.size and _in_steps(one, space.order[:-1], 4 * one.size)
        for one in space.outputs
    )
    down = next((d for one in inputs if (d := _down(space, one, each)) >= 0), -1)
    if fits and down >= 0:
        _divide(space, down, across, each)


def is_near(space: Space, one: Operand) -> bool:
    """Whether four elements of a row are side by side, and aligned."""
    inner = space.order[-1]
    return one.strides[inner] == one.size and _in_steps(one, space.order[:-1], 4 * one.size)


def is_transposed(space: Space, one: Operand) -> bool:
    """Whether what a lane has of a column is side by side, and aligned."""
    within, others = space.order[-3], [*space.order[:-PARTS], space.order[-1]]
    bytes_a_lane = space.each // 4 * one.size
    return one.strides[within] == one.size and _in_steps(one, others, bytes_a_lane)


def _in_steps(one: Operand, dims: Iterable[int], step: int) -> bool:
    """Whether addresses are multiples of so many bytes wherever one is along these dimensions."""
    step = min(step, 16)
    return one.low % step == 0 and all(one.strides[d] % step == 0 for d in dims)


def _down(space: Space, one: Operand, each: int) -> int:
    """The dimension along which an operand lies in memory, across the results; −1 without one."""
    for d in space.order[:-1]:
        others = [other for other in space.order if other != d]
        lies = one.strides[d] == one.size and space.size[d] % DOWN == 0
        across = one.strides[space.order[-1]] not in (0, one.size)
        if lies and across and _in_steps(one, others, each // 4 * one.size):
            return d
    return -1


def _divide(space: Space, down: int, across: int, each: int) -> None:
    """Dimensions for parts of two; the two keep their sizes, which numbers of elements ask for."""
    rows = each // 4  # of a lane
    parts = (  # of which dimension, its size, its stride in elements of that
        (down, space.size[down] // DOWN, DOWN),
        (across, space.size[across] // ACROSS, ACROSS),
        (down, DOWN // (4 * rows), 4 * rows),
        (down, rows, 1),
        (down, 4, rows),
        (across, ACROSS, 1),
    )
    space.order = [d for d in space.order if d not in (down, across)]
    for d, size, step in parts:
        space.order.append(len(space.size))
        space.size.append(size)
        for one in (*space.inputs, *space.outputs):
            if one is not None:
                one.strides.append(one.strides[d] * step)
    space.each = each
