"""Virtual tensors: mapping functions instead of copies (VTC §4.1, Definitions 2 and 3).

    Movement ::= shape, Part*           index → (operand, index), what one operator does
    Part     ::= condition → operand [expr, …]  |  condition → fill
    Mapping  ::= shape, Piece*          index → (physical tensor, offset in elements)
    Piece    ::= condition → source + offset    |  condition → fill

Conditions and expressions are over ``index_symbols``; see ``indexing`` for their grammar. For each
index the condition of exactly one part holds. A movement over mappings is a mapping: that is how
chains of operators become one function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from magjit.plugin.virtual_tensors.indexing import (
    At,
    Load,
    Ranges,
    bounds,
    index_symbols,
    is_nonnegative,
    linear_terms,
    numel,
    simplify,
    size_expr,
    substitute,
)

__all__ = [
    "Affine",
    "Mapping",
    "Movement",
    "NotComposable",
    "Part",
    "Piece",
    "VirtualTensor",
    "contiguous_strides",
    "decide",
    "moved",
]

Fill = bool | int | float | complex


class NotComposable(Exception):
    """A chain of operators that no mapping of this grammar describes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Where the elements of a part of a virtual tensor are.

    Attributes:
        condition: over the index; the piece is the part of the tensor for which it holds.
        source: which physical tensor; -1 where the piece has a value instead.
        offset: elements from that tensor's first element, whose address is its ``data_ptr``.
            Index-driven mappings contain ``Load(source, offset)``.
        fill: the value of all elements of the piece, or None.
    """

    condition: Boolean
    source: int
    offset: sympy.Expr
    fill: Fill | None = None

    def __str__(self) -> str:
        what = f"p{self.source}[{self.offset}]" if self.fill is None else repr(self.fill)
        return what if self.condition == sympy.true else f"{what} if {self.condition}"


@dataclass(frozen=True, slots=True)
class Affine:
    """One physical tensor with strides: what ``as_strided`` takes."""

    source: int
    offset: sympy.Expr
    strides: tuple[sympy.Expr, ...]


@dataclass(frozen=True, slots=True)
class Mapping:
    """The mapping function ``F`` of a virtual tensor (Definition 3).

    Attributes:
        shape: of the virtual tensor; ints or sympy expressions over FX's size symbols.
        parts: pieces over ``index_symbols(len(shape))``.
    """

    shape: tuple[sympy.Expr, ...]
    parts: tuple[Piece, ...]

    @classmethod
    def physical(
        cls,
        shape: Sequence[Any],
        strides: Sequence[Any] | None = None,
        offset: Any = 0,
        source: int = 0,
    ) -> Mapping:
        """A tensor with memory of its own: sizes, strides and an offset in elements."""
        sizes = tuple(map(size_expr, shape))
        steps = contiguous_strides(sizes) if strides is None else tuple(map(size_expr, strides))
        place = size_expr(offset)
        for symbol, step in zip(index_symbols(len(sizes)), steps, strict=True):
            place += symbol * step
        return cls(sizes, (Piece(sympy.true, source, place),))

    @property
    def ranges(self) -> Ranges:
        """The index symbols with their sizes."""
        return dict(zip(index_symbols(len(self.shape)), self.shape, strict=True))

    def pieces(self, index: Sequence[sympy.Expr], ranges: Ranges | None = None) -> list[Piece]:
        """The pieces at an index, one expression for each dimension.

        Args:
            index: expressions; each is at least 0 and less than the size of its dimension.
            ranges: what is known of the symbols in ``index``; offsets are simplified by it, and
                pieces that it excludes are left out.
        """
        symbols = index_symbols(len(self.shape))
        found = []
        for part in self.parts:
            condition = substitute(part.condition, symbols, index)
            offset = substitute(part.offset, symbols, index)
            if ranges is not None:
                condition, offset = decide(condition, ranges), simplify(offset, ranges)
            if condition != sympy.false:
                found.append(Piece(condition, part.source, offset, part.fill))
        return found

    def affine(self) -> Affine | None:
        """Offset and strides, where one physical tensor with strides is all there is."""
        if len(self.parts) != 1 or self.parts[0].fill is not None:
            return None
        (piece,) = self.parts
        if piece.condition != sympy.true:
            return None
        symbols = index_symbols(len(self.shape))
        terms = linear_terms(piece.offset)
        offset = terms.pop(sympy.S.One, sympy.S.Zero)
        strides = tuple(terms.pop(symbol, sympy.S.Zero) for symbol in symbols)
        return None if terms else Affine(piece.source, offset, strides)

    def renumbered(self, number: Callable[[int], int]) -> Mapping:
        """The same with other numbers of the physical tensors."""

        def load(source: sympy.Expr, offset: sympy.Expr) -> sympy.Expr:
            return Load(number(int(source)), offset)

        return Mapping(
            self.shape,
            tuple(
                Piece(
                    piece.condition.replace(Load, load),
                    piece.source if piece.fill is not None else number(piece.source),
                    piece.offset.replace(Load, load),
                    piece.fill,
                )
                for piece in self.parts
            ),
        )

    def __str__(self) -> str:
        index = ", ".join(str(symbol) for symbol in index_symbols(len(self.shape)))
        sizes = ", ".join(map(str, self.shape))
        return f"({sizes})[{index}] = " + "; ".join(map(str, self.parts))


@dataclass(frozen=True, slots=True)
class Part:
    """Where a movement takes a part of its result from: an operand's element, or a value."""

    condition: Boolean
    operand: int
    index: tuple[sympy.Expr, ...]
    fill: Fill | None = None


@dataclass(frozen=True, slots=True)
class Movement:
    """What a data-movement operator does: ``result[x] = operand_j[y]`` (Definition 2).

    Attributes:
        shape: of the result.
        parts: over ``index_symbols(len(shape))``; values of index tensors are ``At``.
    """

    shape: tuple[sympy.Expr, ...]
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, shape: Sequence[Any], index: Sequence[Any], operand: int = 0) -> Movement:
        """A movement of one part."""
        taken = tuple(map(sympy.sympify, index))
        return cls(tuple(map(size_expr, shape)), (Part(sympy.true, operand, taken),))

    def over(self, operands: Sequence[Mapping]) -> Mapping:
        """The result's mapping, given those of the operands over one numbering of sources.

        Raises:
            NotComposable: an index tensor consists of several pieces.
        """
        ranges = dict(zip(index_symbols(len(self.shape)), self.shape, strict=True))
        pieces: list[Piece] = []
        for part in self.parts:
            if part.fill is not None:
                condition = decide(_loaded(part.condition, operands), ranges)
                pieces.append(Piece(condition, -1, sympy.S.Zero, part.fill))
                continue
            index = [simplify(_loaded(one, operands), ranges) for one in part.index]
            for piece in operands[part.operand].pieces(index, ranges):
                condition = sympy.And(_loaded(part.condition, operands), piece.condition)
                pieces.append(
                    Piece(decide(condition, ranges), piece.source, piece.offset, piece.fill)
                )
        return Mapping(self.shape, _merged(pieces, ranges))


def _merged(pieces: Sequence[Piece], ranges: Ranges) -> tuple[Piece, ...]:
    """Pieces that lie in one tensor as if they had never been apart, as one."""
    found: dict[tuple[Any, ...], Boolean] = {}
    for piece in pieces:
        if piece.condition == sympy.false:
            continue
        key = (piece.source, piece.offset, type(piece.fill), piece.fill)
        condition = sympy.Or(found.get(key, sympy.false), piece.condition)
        found[key] = decide(_joined(condition), ranges)
    if len(found) == 1 and _covers(next(iter(found.values())), ranges):
        return tuple(Piece(sympy.true, key[0], key[1], key[3]) for key in found)
    return tuple(Piece(condition, key[0], key[1], key[3]) for key, condition in found.items())


def _joined(condition: Boolean) -> Boolean:
    """``a ≤ x < b`` or ``b ≤ x < c`` as ``a ≤ x < c``, for intervals of one index symbol."""
    if not isinstance(condition, sympy.Or):
        return condition
    intervals = [_interval(one) for one in condition.args]
    if any(one is None for one in intervals):
        return condition
    symbols = {one[0] for one in intervals if one is not None}
    if len(symbols) != 1:
        return condition
    (symbol,) = symbols
    bounds_of = [(one[1], one[2]) for one in intervals if one is not None]
    merged = True
    while merged and len(bounds_of) > 1:
        merged = False
        for one in bounds_of:
            other = next((two for two in bounds_of if two is not one and two[0] == one[1]), None)
            if other is not None and one[1] is not None:
                bounds_of = [two for two in bounds_of if two not in (one, other)]
                bounds_of.append((one[0], other[1]))
                merged = True
                break
    return sympy.Or(*(_within(symbol, low, high) for low, high in bounds_of))


def _within(symbol: sympy.Symbol, low: Any, high: Any) -> Boolean:
    return sympy.And(
        sympy.true if low is None else symbol >= low,
        sympy.true if high is None else symbol < high,
    )


def _interval(condition: Boolean) -> tuple[sympy.Symbol, Any, Any] | None:
    """``(symbol, low, high)`` of ``low ≤ symbol < high``; None bounds are open."""
    low = high = symbol = None
    for one in sympy.And.make_args(condition):
        if isinstance(one, sympy.Eq) and one.lhs.is_Symbol:
            found, least, most = one.lhs, one.rhs, one.rhs + 1
        elif isinstance(one, sympy.Ge) and one.lhs.is_Symbol:
            found, least, most = one.lhs, one.rhs, None
        elif isinstance(one, sympy.Lt) and one.lhs.is_Symbol:
            found, least, most = one.lhs, None, one.rhs
        else:
            return None
        if symbol not in (None, found):
            return None
        symbol = found
        low, high = (low if least is None else least), (high if most is None else most)
    return None if symbol is None else (symbol, low, high)


def _covers(condition: Boolean, ranges: Ranges) -> bool:
    """Whether a condition holds for every index."""
    if condition == sympy.true:
        return True
    found = _interval(condition)
    if found is None or found[0] not in ranges:
        return False
    _, low, high = found
    whole = high is None or is_nonnegative(high - ranges[found[0]])
    return whole and (low is None or is_nonnegative(-low))


def _loaded(expr: Any, operands: Sequence[Mapping]) -> Any:
    """``At(operand, index)`` as ``Load(source, offset)``."""

    def load(operand: sympy.Expr, *index: sympy.Expr) -> sympy.Expr:
        pieces = operands[int(operand)].pieces(index)
        if len(pieces) != 1 or pieces[0].condition != sympy.true:
            raise NotComposable("an index tensor that consists of several pieces")
        if pieces[0].fill is not None:
            return sympy.sympify(pieces[0].fill)
        return Load(pieces[0].source, pieces[0].offset)

    return expr.replace(At, load) if expr.has(At) else expr


def decide(condition: Boolean, ranges: Ranges) -> Boolean:
    """The condition without what always holds in a range; false where it never does."""
    if isinstance(condition, sympy.And | sympy.Or):
        return condition.func(*(decide(one, ranges) for one in condition.args))
    if isinstance(condition, sympy.Not):
        return sympy.Not(decide(condition.args[0], ranges))
    if not isinstance(condition, Relational):
        return condition
    difference = simplify(condition.gts - condition.lts, ranges) if _ordered(condition) else None
    if difference is None:
        return condition
    low, high = bounds(difference, ranges)
    least = 1 if isinstance(condition, sympy.StrictGreaterThan | sympy.StrictLessThan) else 0
    if low is not None and is_nonnegative(low - least):
        return sympy.true
    if high is not None and is_nonnegative(least - 1 - high):
        return sympy.false
    return condition.func(simplify(condition.lhs, ranges), simplify(condition.rhs, ranges))


def _ordered(condition: Relational) -> bool:
    return isinstance(condition, sympy.Ge | sympy.Gt | sympy.Le | sympy.Lt)


def contiguous_strides(shape: Sequence[Any]) -> tuple[sympy.Expr, ...]:
    """Strides in elements of a dense row-major tensor."""
    sizes = [size_expr(size) for size in shape]
    return tuple(numel(sizes[k + 1 :]) for k in range(len(sizes)))


@dataclass(frozen=True, slots=True)
class VirtualTensor:
    """A mapping and the physical tensors that it points to (Definition 3).

    Attributes:
        mapping: its sources are positions in ``sources``.
        sources: whatever names a physical tensor: nodes of a graph, tensors' ids, names.
    """

    mapping: Mapping
    sources: tuple[Hashable, ...]

    @classmethod
    def physical(
        cls,
        source: Hashable,
        shape: Sequence[Any],
        strides: Sequence[Any] | None = None,
        offset: Any = 0,
    ) -> VirtualTensor:
        """A tensor with memory of its own, as a mapping to itself."""
        return cls(Mapping.physical(shape, strides, offset), (source,))


def moved(movement: Movement, operands: Sequence[VirtualTensor]) -> VirtualTensor:
    """What a movement makes of its operands (§4.1, mapping function composition).

    Raises:
        NotComposable: see ``Movement.over``.
    """
    sources: list[Hashable] = []
    mappings: list[Mapping] = []
    for operand in operands:
        for source in operand.sources:
            if source not in sources:
                sources.append(source)
        places = [sources.index(source) for source in operand.sources]
        mappings.append(operand.mapping.renumbered(places.__getitem__))
    made = movement.over(mappings)
    return VirtualTensor(made, tuple(sources))
