"""Which nodes are products, and where in a product each element of what follows is computed.

    Place ::= condition, index          of a node, at a point of the product

What follows a product is computed at the product's own points: a place is the index of the element
that belongs to a point, and ``condition`` says for which points there is one.  Rearrangements are
followed forwards by solving their movements for the result's index; ``reshape`` and ``permute``
have the inverse in their rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch.fx import Node

from magjit.plugin.virtual_tensors.indexing import Ranges, index_symbols, simplify, substitute
from magjit.plugin.virtual_tensors.mapping import Movement, decide
from magjit.plugin.virtual_tensors.rules import directions_of
from magjit_triton.codegen.domain import Domain, same, total
from magjit_triton.codegen.graphs import ABSORBED, is_tensor, movement_of
from magjit_triton.codegen.handlers import REDUCTIONS
from magjit_triton.codegen.layout import sizes_of
from magjit_triton.codegen.lowering import HANDLERS, Lowering, operator_name
from magjit_triton.codegen.matmul.bounds import interval, tightened
from magjit_triton.codegen.matmul.configuration import Extent
from magjit_triton.codegen.operators import POINTWISE, constant
from magjit_triton.codegen.updates import Update

__all__ = ["Place", "Places", "extent_of", "is_product", "operands_of", "with_addend"]

aten = torch.ops.aten
Index = tuple[sympy.Expr, ...]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PRODUCTS = (aten.mm.default, aten.bmm.default)
_SUMS = (aten.addmm.default, aten.baddbmm.default)
_MOST_STEPS = 64


def is_product(node: Node, devices: Sequence[str]) -> bool:
    """Whether matmul kernels can compute a node: one dtype with an accumulator in float32."""
    if node.target not in (*_PRODUCTS, *_SUMS) or ABSORBED in node.meta:
        return False
    if len(node.args) != (2 if node.target in _PRODUCTS else 3):
        return False
    if any(not isinstance(one, int | float) for one in node.kwargs.values()):
        return False
    values = [one.meta["val"] for one in (node, *node.all_input_nodes)]
    return all(
        isinstance(value, torch.Tensor)
        and value.dtype == values[0].dtype
        and value.layout == torch.strided
        and value.device.type in devices
        for value in values
    ) and (values[0].dtype in _DTYPES)


def operands_of(node: Node) -> tuple[Node, Node]:
    """What a product multiplies."""
    left, right = node.args[-2:]
    assert isinstance(left, Node) and isinstance(right, Node)
    return left, right


def with_addend(
    lowering: Lowering, node: Node, product: int, point: Index, mask: int | None = None
) -> int:
    """``alpha * product + beta * addend`` where a node is that, in float32; else the product."""
    if node.target not in _SUMS:
        return product
    builder = lowering.builder
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    assert isinstance(alpha, int | float) and isinstance(beta, int | float)
    if alpha != 1:
        product = builder.emit("mul", (product, constant(builder, alpha, torch.float32)))
    if beta == 0:  # What is not a number does not count then.
        return product
    addend = lowering.operand(node.args[0], sizes_of(node.meta["val"]), point, mask)
    if beta != 1:
        addend = builder.emit("mul", (addend, constant(builder, beta, torch.float32)))
    return builder.emit("add", (product, addend))


def extent_of(node: Node, hint: Callable[[sympy.Expr], int]) -> Extent:
    """The likely sizes of a product."""
    left, _ = operands_of(node)
    *batch, m, n = (hint(size) for size in sizes_of(node.meta["val"]))
    return Extent(batch[0] if batch else 1, m, n, hint(sizes_of(left.meta["val"])[-1]))


@dataclass(frozen=True, slots=True)
class Place:
    """Where an element of a node is computed.

    Attributes:
        condition: over the product's dimensions: the points at which there is an element.
        index: of the element; every element has one point.
    """

    condition: Boolean
    index: Index


@dataclass
class Places:
    """The places of nodes at the points of products of one shape.

    Attributes:
        products: the backbone.
        stops: nodes that are read from memory: no element of them is computed here.
        updates: nodes that store into another tensor → what they store.
    """

    products: Sequence[Node]
    stops: Callable[[Node], bool]
    updates: dict[Node, Update] = field(default_factory=dict)

    def __post_init__(self) -> None:
        domain = Domain(sizes_of(self.products[0].meta["val"]))
        self.point = domain.point()
        self.ranges: Ranges = {dim.symbol: dim.size for dim in domain.dims()}
        found = Place(sympy.true, self.point)
        self._known: dict[Node, Place | None] = dict.fromkeys(self.products, found)
        # A node that only moves → what it moves.
        self.moved: dict[Node, Node] = {}

    def of(self, node: Node, steps: int = _MOST_STEPS) -> Place | None:
        """The place of a node; None where it is not made of the products element by element."""
        if node not in self._known:
            self._known[node] = None
            self._known[node] = self._found(node, steps) if steps else None
        return self._known[node]

    def _found(self, node: Node, steps: int) -> Place | None:
        if node.op != "call_function" or not is_tensor(node):
            return None
        if node in self.updates:
            value = self.updates[node].value
            return None if self.stops(value) else self.of(value, steps - 1)
        moved = movement_of(node)
        if moved is not None:
            movement, operands = moved
            return self._moved(node, movement, operands, steps)
        name = operator_name(node)
        if name in REDUCTIONS or not (name in POINTWISE or name in HANDLERS):
            return None
        for one in node.all_input_nodes:
            if is_tensor(one) and not self.stops(one):
                place = self.of(one, steps - 1)
                if place is not None:
                    return self._pointwise(node, one, place)
        return None

    def _pointwise(self, node: Node, operand: Node, place: Place) -> Place | None:
        """Of a result that has an element for each of the operand's."""
        sizes, own = sizes_of(node.meta["val"]), sizes_of(operand.meta["val"])
        first = len(sizes) - len(own)
        if first < 0 or not same(sizes, (*[sympy.S.One] * first, *own)):
            return None
        return Place(place.condition, (*[sympy.S.Zero] * first, *place.index))

    def _moved(
        self, node: Node, movement: Movement, operands: Sequence[Node], steps: int
    ) -> Place | None:
        if len(movement.parts) != 1 or movement.parts[0].condition != sympy.true:
            return None
        (part,) = movement.parts
        if part.fill is not None or self.stops(operands[part.operand]):
            return None
        operand = operands[part.operand]
        place = self.of(operand, steps - 1)
        if place is None:
            return None
        found = self._solved(movement, place) or self._inverse(node, operand, place)
        if found is not None:
            self.moved[node] = operand
        return found

    def _solved(self, movement: Movement, place: Place) -> Place | None:
        """Each dimension of the result is one of the operand's, shifted."""
        (part,) = movement.parts
        symbols = index_symbols(len(movement.shape))
        solved: dict[sympy.Symbol, sympy.Expr] = {}
        condition = place.condition
        for expr, here in zip(part.index, place.index, strict=True):
            symbol = next((one for one in symbols if one in expr.free_symbols), None)
            if symbol is None:
                condition = sympy.And(condition, _equal(here, expr))
                continue
            shift = sympy.expand(expr - symbol)
            if symbol in solved or any(one in shift.free_symbols for one in symbols):
                return None
            solved[symbol] = sympy.expand(here - shift)
        index = []
        for symbol, size in zip(symbols, movement.shape, strict=True):
            if symbol not in solved and size != 1:
                return None
            here = sympy.S.Zero if size == 1 and symbol not in solved else solved[symbol]
            condition = sympy.And(condition, here >= 0, here < size)
            index.append(simplify(here, self.ranges))
        return Place(self.tightened(decide(condition, self.ranges)), tuple(index))

    def tightened(self, condition: Boolean) -> Boolean:
        """A condition, by the columns for which it holds where it is one of columns alone."""
        column = self.point[-1]
        if column not in self.ranges:  # There is one column.
            return condition
        return tightened(condition, column, self.ranges[column])

    def span(self, condition: Boolean) -> tuple[int, int] | None:
        """From where to where a condition holds; None where it is none of columns alone."""
        column = self.point[-1]
        return interval(condition, column, self.ranges[column]) if column in self.ranges else None

    def _inverse(self, node: Node, operand: Node, place: Place) -> Place | None:
        """By the rule of an operator that gives each element of its one operand one place."""
        directions = directions_of(node)
        if directions is None or len(directions.results) != 1 or 0 not in directions.operands:
            return None
        movement = directions.operands[0]
        before, after = sizes_of(operand.meta["val"]), sizes_of(node.meta["val"])
        if len(movement.parts) != 1 or movement.parts[0].condition != sympy.true:
            return None
        if sympy.expand(total(before) - total(after)) != 0:
            return None
        symbols = index_symbols(len(movement.shape))
        taken = (substitute(one, symbols, place.index) for one in movement.parts[0].index)
        return Place(place.condition, tuple(simplify(one, self.ranges) for one in taken))


def _equal(left: sympy.Expr, right: sympy.Expr) -> Boolean:
    difference = sympy.expand(left - right)
    if difference.is_number:
        return sympy.true if difference == 0 else sympy.false
    return sympy.Eq(left, right)
