"""The loop nest of a kernel, and where in it each tensor's elements are computed.

    Domain ::= shape, reduced dimensions

One point of the nest is an index into ``shape``; a *row* is what is left without the reduced
dimensions.  A tensor whose elements are as many as the points, or as the rows, has one element
at each of them: the one with the same row-major position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from magjit.plugin.virtual_tensors.indexing import FloorDiv, Mod, simplify
from magjit_triton.codegen.ir import Dim

__all__ = ["Domain", "flatten", "same", "total", "unflatten"]

Shape = tuple[sympy.Expr, ...]
Ranges = dict[sympy.Symbol, sympy.Expr]


def total(sizes: Sequence[sympy.Expr]) -> sympy.Expr:
    """The number of elements."""
    result: sympy.Expr = sympy.Integer(1)
    for size in sizes:
        result = sympy.expand(result * size)
    return result


def same(left: Sequence[sympy.Expr], right: Sequence[sympy.Expr]) -> bool:
    """Whether two shapes are proved to be equal."""
    return len(left) == len(right) and all(
        a == b or sympy.expand(a - b) == 0 for a, b in zip(left, right, strict=True)
    )


def flatten(index: Sequence[sympy.Expr], sizes: Sequence[sympy.Expr]) -> sympy.Expr:
    """Row-major position."""
    result: sympy.Expr = sympy.Integer(0)
    for expr, size in zip(index, sizes, strict=True):
        result = result * size + expr
    return sympy.expand(result)


def unflatten(linear: sympy.Expr, sizes: Sequence[sympy.Expr], ranges: Ranges) -> Shape:
    """The index at a row-major position."""
    result: list[sympy.Expr] = []
    outermost = True
    for number, size in enumerate(sizes):
        if size == 1:
            result.append(sympy.Integer(0))
            continue
        expr = FloorDiv(linear, total(sizes[number + 1 :]))
        result.append(simplify(expr if outermost else Mod(expr, size), ranges))
        outermost = False
    return tuple(result)


@dataclass(frozen=True, slots=True)
class Domain:
    """A loop nest.

    Attributes:
        shape: sizes of its dimensions.
        reduced: the dimensions over which a reduction runs; none for a pointwise kernel.
    """

    shape: Shape
    reduced: frozenset[int] = frozenset()

    def dims(self) -> tuple[Dim, ...]:
        """The loops, without those of one step."""
        return tuple(
            Dim(self._symbol(k), size, "r" if k in self.reduced else "p")
            for k, size in enumerate(self.shape)
            if size != 1
        )

    @staticmethod
    def _symbol(number: int) -> sympy.Symbol:
        return sympy.Symbol(f"i{number}", integer=True, nonnegative=True)

    def point(self) -> Shape:
        """The index of a point."""
        return tuple(
            sympy.Integer(0) if size == 1 else self._symbol(k) for k, size in enumerate(self.shape)
        )

    def row_sizes(self) -> Shape:
        """Sizes of the dimensions that are not reduced."""
        return tuple(size for k, size in enumerate(self.shape) if k not in self.reduced)

    def reduced_sizes(self) -> Shape:
        """Sizes of the reduced dimensions."""
        return tuple(size for k, size in enumerate(self.shape) if k in self.reduced)

    def row_index(self, shape: Shape, ranges: Ranges) -> Shape | None:
        """The element of a tensor that belongs to a row; None where they do not match."""
        sizes = self.row_sizes()
        index = tuple(one for k, one in enumerate(self.point()) if k not in self.reduced)
        return self._matched(index, sizes, shape, ranges)

    def reduced_index(self, shape: Shape, ranges: Ranges) -> Shape | None:
        """The index into reduced dimensions of these sizes."""
        sizes = self.reduced_sizes()
        index = tuple(one for k, one in enumerate(self.point()) if k in self.reduced)
        return self._matched(index, sizes, shape, ranges)

    def index_of(self, shape: Shape, ranges: Ranges) -> Shape | None:
        """The element of a tensor that is computed at a point or in a row; None where none is."""
        at_point = self._matched(self.point(), self.shape, shape, ranges)
        if at_point is not None or not self.reduced:
            return at_point
        return self.row_index(shape, ranges)

    @staticmethod
    def _matched(index: Shape, sizes: Shape, shape: Shape, ranges: Ranges) -> Shape | None:
        if same(sizes, shape):
            return index
        if sympy.expand(total(sizes) - total(shape)) != 0:
            return None
        kept = [(one, size) for one, size in zip(index, sizes, strict=True) if size != 1]
        if same([size for _, size in kept], [size for size in shape if size != 1]):
            # Only dimensions of size one came or went.
            taken = iter(kept)
            return tuple(sympy.Integer(0) if s == 1 else next(taken)[0] for s in shape)
        return unflatten(flatten(index, sizes), shape, ranges)

    def __str__(self) -> str:
        parts = [f"{size}{'r' if k in self.reduced else ''}" for k, size in enumerate(self.shape)]
        return f"({', '.join(parts)})"
