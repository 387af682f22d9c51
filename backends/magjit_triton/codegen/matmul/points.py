"""What follows a product, computed at the points of its tiles.

A value is needed at the point at which its tile has it, or half a rotary embedding's head farther:
``cat([-x[..., h:], x[..., :h]])`` reads, at column ``c``, the product's column ``c`` with bit ``h``
flipped.  Both columns are in one tile, so that the tile is exchanged with itself in registers
(``given`` values ``product0_by64``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch.fx import Node

from magjit.plugin.virtual_tensors.indexing import Mod, simplify, substitute
from magjit.plugin.virtual_tensors.mapping import decide
from magjit_triton.codegen.ir import Builder
from magjit_triton.codegen.lowering import Lowering
from magjit_triton.codegen.matmul.products import Places, with_addend

__all__ = [
    "Given",
    "PointLowering",
    "as_given",
    "exchange_of",
    "given_name",
    "pairs_in",
    "rounded_tiles",
]

_MOST_COLUMNS = 256  # of a tile
Index = tuple[sympy.Expr, ...]
Given = Callable[[Builder, int, Index, int, "int | None"], int]
"""From a product's number, a point, the distance to the tile's own point (0, or columns to the
other one of a pair) and a condition to the value there."""


def given_name(number: int, distance: int) -> str:
    """The name of a product's tile, or of that tile with its columns exchanged."""
    return f"product{number}" if not distance else f"product{number}_by{distance}"


def as_given(builder: Builder, number: int, point: Index, distance: int, mask: int | None) -> int:
    """A value that the kernel has in its registers."""
    return builder.emit("given", (), given_name(number, distance), torch.float32)


def pairs_in(builder: Builder) -> int:
    """The columns, aligned, that a tile must have so that all exchanges are inside of it."""
    found = [1]
    for number in builder.live():
        instruction = builder.instructions[number]
        if instruction.op == "given" and "_by" in instruction.attribute:
            found.append(2 * int(instruction.attribute.split("_by")[1]))
    return max(found)


def rounded_tiles(builder: Builder, dtype: torch.dtype) -> bool:
    """Whether products are used only as rounded to a dtype."""
    given = {n for n in builder.live() if builder.instructions[n].op == "given"}
    for number in builder.live():
        instruction = builder.instructions[number]
        rounds = instruction.op == "round_to" and instruction.attribute == dtype
        if given.intersection(instruction.args) and not rounds:
            return False
    stored = {store.value for store in builder.stores if store.dtype != dtype}
    return not given & stored


def exchange_of(point: Index, index: Index, conditions: Sequence[Boolean], ranges: Any) -> int:
    """How far apart two columns are that form a pair, or 0 where that cannot be proved.

    Args:
        point: where a tile has its value.
        index: where one is needed.
        conditions: what holds where it is needed.
        ranges: of the symbols.
    """
    *rows, column = point
    *others, other = index
    shift = sympy.expand(other - column)
    if rows != others or not shift.is_Integer or not column.is_Symbol:
        return 0
    distance = abs(int(shift))
    if not distance or distance & (distance - 1) or 2 * distance > _MOST_COLUMNS:
        return 0
    place = Mod(column, sympy.Integer(2 * distance))
    needed = place < distance if shift > 0 else place >= distance
    return distance if any(_implies(one, needed, ranges) for one in conditions) else 0


def _implies(condition: Boolean, needed: Any, ranges: Any) -> bool:
    parts = condition.args if isinstance(condition, sympy.And) else (condition,)
    return any(_normal(one, ranges) == _normal(needed, ranges) for one in parts)


def _normal(relation: Any, ranges: Any) -> Any:
    """``a < b`` as the pair of what is less and what is not."""
    if not isinstance(relation, sympy.core.relational.Relational):
        return relation
    left, right, strict = relation.lhs, relation.rhs, relation.rel_op
    if strict in (">", ">="):
        left, right, strict = right, left, strict.replace(">", "<")
    return strict, simplify(sympy.expand(left - right), ranges)


@dataclass
class PointLowering(Lowering):
    """Values at the points of a product; what is moved there is where its operand is.

    Attributes:
        places: of the nodes of the group.
        tile: the product's values.
        read: whether a product is rounded to its dtype, as something reads it.
        whole: whether the given values have what is added to products.
    """

    places: Places
    tile: Given = as_given
    read: bool = False
    whole: bool = False
    conditions: list[Boolean] = field(default_factory=list)

    def product(self, node: Node, point: Index, distance: int = 0, mask: int | None = None) -> int:
        """The value of a product, with what is added to it."""
        number = self.places.products.index(node)
        value = self.tile(self.builder, number, point, distance, mask)
        if not self.whole:
            value = with_addend(self, node, value, point, mask)
        return self.rounded(value, node.meta["val"].dtype) if self.read else value

    def _made(self, node: Node, index: Index, mask: int | None) -> int:
        if node not in self.memory:
            if node in self.places.products and index != self.places.point:
                found = self._exchanged(node, index, mask)
                if found is not None:
                    return found
            place, operand = self.places.of(node), self.places.moved.get(node)
            # The same index under another condition is another element.
            if place is not None and operand is not None and place.index == index:
                within = None if place.condition == sympy.true else self.truth(place.condition)
                before = self.places.of(operand)
                if within == mask and before is not None:
                    return self.value(operand, before.index, mask)
        return super()._made(node, index, mask)

    def _exchanged(self, node: Node, index: Index, mask: int | None) -> int | None:
        ranges = self.builder.ranges
        distance = exchange_of(self.places.point, index, self.conditions, ranges)
        return self.product(node, index, distance, mask) if distance else None

    def _part(
        self,
        part: Any,
        operands: Sequence[Node],
        symbols: Sequence[sympy.Symbol],
        index: Index,
        mask: int | None,
    ) -> int:
        condition = decide(substitute(part.condition, symbols, index), self.builder.ranges)
        self.conditions.append(condition)
        try:
            return super()._part(part, operands, symbols, index, mask)
        finally:
            self.conditions.pop()
