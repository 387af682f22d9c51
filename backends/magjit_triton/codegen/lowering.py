"""ATen nodes as instructions: the value of a node at an index.

Nothing is stored between the nodes of a kernel: a consumer asks its producer for the value at
an index, and the index goes through movements on the way (VTC §4.1: the mapping of a chain is
the composition of its movements).  ``Unfusible`` is raised where one nest cannot give the value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from torch.fx import Node

from magjit.plugin.virtual_tensors.indexing import (
    At,
    Wrapped,
    index_symbols,
    simplify,
    size_expr,
    substitute,
)
from magjit.plugin.virtual_tensors.mapping import Movement, decide
from magjit_triton.codegen.domain import Domain, same, total
from magjit_triton.codegen.ir import HALVES, Builder, Load, Store, held
from magjit_triton.codegen.layout import Layout, sizes_of
from magjit_triton.codegen.operators import POINTWISE, cast, constant
from magjit_triton.codegen.updates import Update

__all__ = ["Lowering", "Unfusible", "operator_name"]

Index = tuple[sympy.Expr, ...]
Handler = Callable[["Lowering", Node, Index, "int | None"], int]


class Unfusible(Exception):
    """This value cannot be computed inside this kernel."""


def operator_name(node: Node) -> str:
    """``add`` for ``aten.add.Tensor``; empty where the node is no ATen or prims operator."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return ""
    return str(target.overloadpacket.__name__)


@dataclass
class Lowering:
    """Makes the instructions of one kernel.

    Attributes:
        builder: takes the instructions.
        domain: the loop nest.
        memory: nodes that can be read from memory here, and how they lie there.
        movements: operators that only move data → what each does, and its operands.
    """

    builder: Builder
    domain: Domain
    memory: Mapping[Node, Layout]
    movements: Callable[[Node], tuple[Movement, Sequence[Node]] | None]

    def __post_init__(self) -> None:
        self._values: dict[tuple[Node, Index, int | None], int] = {}
        # Nodes that this kernel stores, and the index at which it computes them.
        self.computed: Mapping[Node, Index] = {}
        # Values that the kernel has made in another way.
        self.given: Mapping[tuple[Node, Index], int] = {}

    def value(self, node: Node, index: Index, mask: int | None = None) -> int:
        """The value of a tensor node at an index; read from memory only where ``mask`` holds.

        Raises:
            Unfusible: no instruction of this kernel can give it.
        """
        key = (node, index, mask)
        if key not in self._values:
            self._values[key] = self._made(node, index, mask)
        return self._values[key]

    def store(self, node: Node, index: Index, layout: Layout) -> None:
        """Store a node's value at an index."""
        value = self.value(node, index)
        offset = simplify(layout.offset_at(index), self.builder.ranges)
        self.builder.stores.append(Store(layout.buffer, offset, value, None, layout.dtype))

    def update(self, update: Update, index: Index, layout: Layout, mask: int | None = None) -> None:
        """Store the value of an update at its place in the tensor that it changes."""
        value = self.value(update.value, index, mask)
        (part,) = update.movement.parts
        symbols = index_symbols(len(update.movement.shape))
        place = [substitute(one, symbols, index) for one in part.index]
        place = [self.resolved(one, update.operands, mask) for one in place]
        self._bound(tuple(place), layout.sizes)
        offset = simplify(layout.offset_at(place), self.builder.ranges)
        self.builder.stores.append(Store(layout.buffer, offset, value, mask, layout.dtype))

    def _made(self, node: Node, index: Index, mask: int | None) -> int:
        if (node, index) in self.given:
            return self.given[node, index]
        if node in self.memory:
            return self.load(self.memory[node], index, mask)
        if node in self.computed and self.computed[node] != index:
            raise Unfusible(f"{node} is needed at another point than it is computed at")
        moved = self.movements(node)
        if moved is not None:
            return self._moved(*moved, index, mask)
        if node.target is operator.getitem:
            source, which = node.args
            name = operator_name(source)  # type: ignore[arg-type]
            if name in RESULT_HANDLERS:
                return RESULT_HANDLERS[name](self, source, which, index)  # type: ignore[arg-type]
        name = operator_name(node)
        if name in HANDLERS:
            return HANDLERS[name](self, node, index, mask)
        if name in POINTWISE:
            return self._pointwise(node, index, mask)
        raise Unfusible(f"{node.format_node()} has no lowering")

    def load(self, layout: Layout, index: Index, mask: int | None) -> int:
        """An element of memory, in the dtype in which it is computed."""
        offset = simplify(layout.offset_at(index), self.builder.ranges)
        held_dtype = held(layout.dtype)
        args = () if mask is None else (mask,)
        return self.builder.emit(
            "load", args, Load(layout.buffer, offset, layout.dtype), held_dtype
        )

    def _moved(
        self, movement: Movement, operands: Sequence[Node], index: Index, mask: int | None
    ) -> int:
        symbols = index_symbols(len(movement.shape))
        result: int | None = None
        # The parts exclude each other, so the last one needs no condition of its own to choose.
        for part in reversed(movement.parts):
            condition = substitute(part.condition, symbols, index)
            condition = decide(self.resolved(condition, operands, mask), self.builder.ranges)
            if condition == sympy.false:
                continue
            here = mask
            chosen = None
            if condition != sympy.true:
                chosen = self.truth(condition)
                here = chosen if mask is None else self._both(mask, chosen)
            value = self._part(part, operands, symbols, index, here)
            if result is None or chosen is None:
                result = value
            else:
                dtype = self.builder.instructions[result].dtype
                value = cast(self.builder, value, dtype)
                result = self.builder.emit("where", (chosen, value, result), None, dtype)
        if result is None:
            raise Unfusible("a movement without a part")
        return result

    def _part(
        self,
        part: Any,
        operands: Sequence[Node],
        symbols: Sequence[sympy.Symbol],
        index: Index,
        mask: int | None,
    ) -> int:
        if part.fill is not None:
            dtype = held(operands[0].meta["val"].dtype) if operands else torch.float32
            return constant(self.builder, part.fill, dtype)
        taken = [substitute(one, symbols, index) for one in part.index]
        taken = [self.resolved(one, operands, mask) for one in taken]
        place = tuple(simplify(one, self.builder.ranges) for one in taken)
        self._bound(place, sizes_of(operands[part.operand].meta["val"]))
        return self.value(operands[part.operand], place, mask)

    def _bound(self, place: Index, sizes: Sequence[sympy.Expr]) -> None:
        """An index that was read is less than the size of its dimension."""
        for expr, size in zip(place, sizes, strict=True):
            if expr in self.builder.indirect and self.builder.ranges[expr] == UNKNOWN:
                self.builder.ranges[expr] = size

    def resolved(self, expr: Any, operands: Sequence[Node], mask: int | None) -> Any:
        """``At(operand, index)`` replaced by the value that is there."""
        while expr.has(Wrapped) or expr.has(At):
            inner = [one for one in expr.atoms(At, Wrapped) if not _holds(one)]
            swaps = {one: self._read(one, operands, mask) for one in inner}
            expr = expr.xreplace(swaps)
        return expr

    def _read(self, expr: sympy.Expr, operands: Sequence[Node], mask: int | None) -> sympy.Expr:
        if isinstance(expr, Wrapped):
            number, size = expr.args
            value = self.index_value(number)
            zero = constant(self.builder, 0, torch.int64)
            below = self.builder.emit("lt", (value, zero), None, torch.bool)
            other = self.builder.emit("add", (value, self.index_value(size)), None, torch.int64)
            value = self.builder.emit("where", (below, other, value), None, torch.int64)
            return self.builder.as_index(value, size)
        operand, *index = expr.args
        value = self.value(operands[int(operand)], tuple(index), mask)
        value = cast(self.builder, value, torch.int64)
        return self.builder.as_index(value, UNKNOWN)

    def index_value(self, expr: sympy.Expr) -> int:
        """An index expression as a 64-bit value."""
        if expr in self.builder.indirect:
            return self.builder.indirect[expr]
        return self.builder.emit("index", (), expr, torch.int64)

    def truth(self, condition: Any) -> int:
        """A condition over index expressions as a value."""
        if condition in (sympy.true, sympy.false):
            return constant(self.builder, bool(condition), torch.bool)
        if isinstance(condition, sympy.Not):
            inner = self.truth(condition.args[0])
            return self.builder.emit("logical_not", (inner,), None, torch.bool)
        if isinstance(condition, sympy.And | sympy.Or):
            name = "and" if isinstance(condition, sympy.And) else "or"
            values = [self.truth(one) for one in sorted(condition.args, key=str)]
            result = values[0]
            for value in values[1:]:
                result = self.builder.emit(name, (result, value), None, torch.bool)
            return result
        if isinstance(condition, Relational) and condition.rel_op in _RELATIONS:
            sides = (self.index_value(condition.lhs), self.index_value(condition.rhs))
            return self.builder.emit(_RELATIONS[condition.rel_op], sides, None, torch.bool)
        raise Unfusible(f"condition {condition}")

    def _both(self, left: int, right: int) -> int:
        return self.builder.emit("and", (left, right), None, torch.bool)

    def operand(
        self, value: Any, shape: Sequence[sympy.Expr], index: Index, mask: int | None
    ) -> int:
        """A pointwise operator's operand at the index of its result: broadcast, or a number."""
        if isinstance(value, Node):
            given = value.meta["val"]
            if isinstance(given, torch.Tensor):
                sizes = sizes_of(given)
                first = len(shape) - len(sizes)
                taken = tuple(
                    sympy.Integer(0) if size == 1 else index[first + k]
                    for k, size in enumerate(sizes)
                )
                return self.value(value, taken, mask)
            value = given
        if isinstance(value, torch.SymInt):
            return self.index_value(size_expr(value))
        if isinstance(value, bool | int | float):
            kind = {bool: torch.bool, int: torch.int64, float: torch.float64}[type(value)]
            return constant(self.builder, value, kind)
        raise Unfusible(f"operand {value}")

    def converted(self, value: int, dtype: torch.dtype) -> int:
        """A value in the computation dtype; numbers are made in it at once."""
        instruction = self.builder.instructions[value]
        if instruction.op == "const" and not (
            isinstance(instruction.attribute, float) and not dtype.is_floating_point
        ):
            return constant(self.builder, instruction.attribute, held(dtype))
        return cast(self.builder, value, held(dtype))

    def rounded(self, value: int, dtype: torch.dtype) -> int:
        """A value as one of ``dtype``, as if it had been stored and read again."""
        value = cast(self.builder, value, held(dtype))
        if dtype not in HALVES or self._is_rounded(value, dtype):
            return value
        return self.builder.emit("round_to", (value,), dtype, torch.float32)

    def _is_rounded(self, value: int, dtype: torch.dtype) -> bool:
        """Whether a value is one of ``dtype`` already."""
        instruction = self.builder.instructions[value]
        match instruction.op:
            case "load":
                return bool(instruction.attribute.dtype == dtype)
            case "round_to":
                return bool(instruction.attribute == dtype)
            case "neg" | "abs":
                return self._is_rounded(instruction.args[0], dtype)
            case "where":
                return all(self._is_rounded(one, dtype) for one in instruction.args[1:])
        return False

    def _pointwise(self, node: Node, index: Index, mask: int | None) -> int:
        name = operator_name(node)
        row = POINTWISE[name]
        arguments = node.args[: row.operands]
        computation, result = promoted(arguments, row.promotion)
        shape = sizes_of(node.meta["val"])
        values = [self.operand(one, shape, index, mask) for one in arguments]
        values = [self.converted(one, computation) for one in values]
        alpha = node.kwargs.get("alpha", 1)
        if alpha != 1:
            scale = self.converted(self.operand(alpha, shape, index, mask), computation)
            values[1] = self.builder.emit("mul", (values[1], scale), None, held(computation))
        value = row.make(self.builder, held(computation), values)
        return self.rounded(value, node.meta["val"].dtype if result is None else result)

    def reduce(
        self,
        node: Node,
        source: Node,
        dims: Sequence[int],
        row: Index,
        make: Callable[[int, Index], int],
    ) -> int:
        """Reduce ``make(value of source, index)`` over ``dims`` in the row of this index.

        Args:
            row: the index into the dimensions of ``source`` that are kept.
            make: from a value and its index into ``source`` to the ``reduce`` instruction.
        """
        sizes = sizes_of(source.meta["val"])
        ranges = self.builder.ranges
        kept = tuple(size for k, size in enumerate(sizes) if k not in dims)
        inside = self.domain.reduced_index(tuple(sizes[k] for k in sorted(dims)), ranges)
        expected = self.domain.row_index(kept, ranges)
        if not self.domain.reduced or inside is None or expected is None:
            raise Unfusible(f"{node} is reduced over another nest")
        if not same(row, expected):
            raise Unfusible(f"{node} is needed at another row")
        outer, inner = iter(row), iter(inside)
        index = tuple(next(inner if k in dims else outer) for k in range(len(sizes)))
        return make(self.value(source, index), index)


UNKNOWN = sympy.Integer(2**62)
"""The range of an index of which nothing is known yet."""

_RELATIONS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}

HANDLERS: dict[str, Handler] = {}

RESULT_HANDLERS: dict[str, Callable[[Lowering, Node, int, Index], int]] = {}
"""Operators of several results: from the position of a result and an index to its value."""


def _holds(expr: sympy.Expr) -> bool:
    """Whether another value is read inside of this one."""
    return any(one.has(At, Wrapped) for one in expr.args)


def promoted(arguments: Sequence[Any], promotion: Any) -> tuple[torch.dtype, torch.dtype]:
    """The dtype to compute in, and the result's."""
    from torch._prims_common import elementwise_dtypes

    given = [one.meta["val"] if isinstance(one, Node) else one for one in arguments]
    return elementwise_dtypes(*given, type_promotion_kind=promotion)


def handler(*names: str) -> Callable[[Handler], Handler]:
    """Registers how operators are lowered."""

    def register(function: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = function
        return function

    return register


def element_count(node: Node, dims: Sequence[int]) -> sympy.Expr:
    """How many elements each result of a reduction has."""
    sizes = sizes_of(node.meta["val"])
    return total([sizes[k] for k in dims])
