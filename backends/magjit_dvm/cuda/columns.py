"""Columns of a space that has no reductions: elements side by side that have something in common.

What a row has one of is then found once for it, in row registers; without rows, each four elements,
or each, would find it by a division.  ``csrc/cuda_tables.cpp`` does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from magjit_dvm.cuda.machine import Machine
from magjit_dvm.cuda.short_functions import SHORT
from magjit_dvm.cuda.space import Operand, Space
from magjit_dvm.cuda.support import FLOATING
from magjit_dvm.cuda.warps import OF_NARROW_ROWS
from magjit_dvm.cuda.words import BY, MOST_REGISTERS
from magjit_dvm.instructions import DType
from magjit_dvm.program import NodeKind

__all__ = ["columns_without_reductions"]

_LEAST_ROW = 64
"""Columns from which on what shares a position, or a vector, is a row."""
_LEAST_OF_VECTORS, _MOST_OF_VECTOR, _FEW_ELEMENTS = 32, 8192, 1 << 17
"""Columns, if they come by four, from which on what shares several vectors is a row; up to which
what shares any is; and elements below which nothing is gained where they do not."""
_SLICES = (64, 96, 128, 192, 256, 384, 512, 768, 1024)
_SLICES_OF_WARPS = 512
"""Elements of a row that a part of a warp, or a warp, may have; and the fewest of a warp."""
_LEAST_OF_NUMBERS, _LONG_OF_NUMBERS = 16, 16384
"""Columns from which on what shares numbers is a row; for more than so many, a row is a block's,
and pays where at most a quarter of the blocks have nothing to do in the end."""
_FEW_OF_NUMBERS, _FEW_OF_NARROW = 1 << 20, 1 << 22
"""Elements below which that is not so, and of rows that share warps, or share one vector."""


def columns_without_reductions(space: Space, machine: Machine) -> frozenset[int]:
    """Dimensions of columns; none where there are no rows.

    Args:
        space: with places of operands, without an order.
        machine: what it will run on.
    """
    like = space.whole_output
    if like is None:
        return frozenset()
    if space.has_positions:
        return _of_positions(space, like)
    if space.draws:
        return frozenset()
    return _of_vectors(space, like) or _of_numbers(space, like, machine)


def _inner(space: Space, like: Operand) -> Iterator[int]:
    """Dimensions as they lie in memory, from the innermost on, as far as there are no gaps."""
    inner = {stride: d for d, stride in enumerate(like.strides) if d in space.active}
    at = like.size
    while (d := inner.pop(at, -1)) >= 0:
        yield d
        at *= space.size[d]


def _of_positions(space: Space, like: Operand) -> frozenset[int]:
    """What shares a position, or an int64, is a row if it lies side by side."""
    found, cols, at = set[int](), 1, _dims_of_positions(space)
    lines = {node.aux for node in space.program.nodes if node.kind is NodeKind.IOTA}
    for d in _inner(space, like):
        # With positions along them, the innermost alone are columns.
        if d in at or not found.isdisjoint(lines) or (found and d in lines):
            break
        found.add(d)
        cols *= space.size[d]
    rows = len(found) < len(space.active) and cols >= _LEAST_ROW
    return frozenset(found) if rows else frozenset()


def _dims_of_positions(space: Space) -> set[int]:
    """Along which int64 of memory, and what tables are looked up at, varies."""
    found = set[int]()
    for n, node in enumerate(space.program.nodes):
        if node.kind is NodeKind.LOAD and node.dtype is DType.I64:
            found |= space.has[n]
        elif node.kind is NodeKind.INDEX:
            found |= space.has[node.args[0]]
    return found


def _of_vectors(space: Space, like: Operand) -> frozenset[int]:
    """The vectors of columns make rows of these, which blocks keep.

    Of columns that do not come by four, each element would have an address of its own; of others,
    each four.  For one vector of these that pays where rows fill their lanes, and a function is
    computed: memory waits for the others.
    """
    vectors: dict[frozenset[int], dict[int, Operand]] = {}
    for n, node in enumerate(space.program.nodes):
        one = space.inputs[node.aux] if node.kind is NodeKind.LOAD else None
        if one is not None and one.size in (2, 4) and one.low % (4 * one.size) == 0:
            vectors.setdefault(space.has[n], {})[node.aux] = one
    functions = any(node.op in SHORT for node in space.program.nodes)
    count, found, cols = prod(space.size), frozenset[int](), 1
    for d in _inner(space, like):
        found |= {d}
        cols *= space.size[d]
        if cols > _MOST_OF_VECTOR or found == space.active:
            break
        known = vectors.get(found, {}).values()
        along = sum(_is_along(space, one, found, like) for one in known)
        if along and cols % 4 and cols >= _LEAST_ROW:
            return found if count >= _FEW_ELEMENTS else frozenset()
        few = along == 1 and not (functions and cols >= _LEAST_ROW and _fill_lanes(cols))
        if along and cols % 4 == 0 and cols >= _LEAST_OF_VECTORS and not few:
            several = along > 1 and cols > OF_NARROW_ROWS[-1][0]
            fits = count >= (_FEW_OF_NUMBERS if several else _FEW_OF_NARROW)
            return found if fits and _has_such_rows(space, found, like) else frozenset()
    return frozenset()


def _fill_lanes(cols: int) -> bool:
    """Whether some R leaves at most a tenth of the lanes of such rows without elements."""
    slices = [one for one in _SLICES if one >= min(cols, _SLICES_OF_WARPS)]
    return any(10 * cols >= 9 * (-(-cols // one) * one) for one in slices)


def _of_numbers(space: Space, like: Operand, machine: Machine) -> frozenset[int]:
    """What has several numbers for the same elements that lie side by side makes rows of these.

    And what has one, where columns do not come by four.  Only where all else lies in this order.
    """
    program = space.program
    found, cols, numbers = frozenset[int](), 0, set[int]()
    for n, node in enumerate(program.nodes):
        if node.kind is not NodeKind.LOAD or space.has[n] in (frozenset(), space.active):
            continue
        run, length = frozenset[int](), 1
        for d in _inner(space, like):
            if d in space.has[n]:
                break
            run |= {d}
            length *= space.size[d]
        if run:
            numbers.add(node.aux)
            if not found or length < cols:
                found, cols = run, length
    few = _FEW_OF_NARROW if cols <= OF_NARROW_ROWS[-1][0] else _FEW_OF_NUMBERS
    several = len(numbers) > 1 or (len(numbers) == 1 and cols % 4)
    count = prod(space.size)
    fits = several and cols >= _LEAST_OF_NUMBERS and count >= few
    if cols > _LONG_OF_NUMBERS:
        fits = fits and _fill_blocks(count // cols, machine.multiprocessors)
    return found if fits and _has_such_rows(space, found, like) else frozenset()


def _fill_blocks(rows: int, blocks: int) -> bool:
    """Whether three of four blocks have a row, also when the last ones are taken."""
    return 4 * rows >= 3 * (-(-rows // blocks) * blocks)


def _has_such_rows(space: Space, columns: frozenset[int], like: Operand) -> bool:
    """Whether rows of these columns have room for their values, and words; and lie side by side."""
    program, whole = space.program, list(space.outputs)
    for n, node in enumerate(program.nodes):
        if node.kind is NodeKind.COMPUTE:
            kind = "f" if program.nodes[node.args[0]].dtype in FLOATING else "i"
            if f"{kind}.{node.op}" in BY:
                return False
        one = space.inputs[node.aux] if node.kind is NodeKind.LOAD else None
        if one is not None and space.has[n] == space.active:
            whole.append(one)
        elif one is not None and one.size == 1:
            return False
    values = sum(bool(has) and not has & columns for has in space.has)
    full = all(space.has[one.node] == space.active for one in program.outputs)
    along = all(one.size < 8 and _is_along(space, one, columns, like) for one in whole)
    return values <= MOST_REGISTERS and full and along


def _is_along(space: Space, one: Operand, dims: frozenset[int], like: Operand) -> bool:
    """Whether an operand lies in memory along these dimensions as results do."""
    return all(one.strides[d] * like.size == like.strides[d] * one.size for d in dims)
