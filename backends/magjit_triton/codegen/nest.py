"""From a domain's loops to those of a kernel: order, merging, tiles.

    Nest ::= Axis*                      in the order p, q | r
    Axis ::= name, Dim*                 its dimensions, outermost first, are one linear index

Neighbouring dimensions become one where every address allows it, so that few divisions remain;
the dimension with the shortest steps is innermost; a kernel that reads along one dimension and
writes along another has tiles of both (axes p and q).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import sympy

from magjit.plugin.virtual_tensors.indexing import FloorDiv, Mod, simplify
from magjit_triton.codegen.domain import total
from magjit_triton.codegen.ir import Builder, Dim

__all__ = ["Axis", "Hint", "Nest", "near_step", "nest_of", "row_block"]

Hint = Callable[[sympy.Expr], int]
"""The likely value of a size."""

_TILED_FROM = 16
_ROWS_FROM = 256
_MOST_PADDING = 0.125


@dataclass(frozen=True, slots=True)
class Axis:
    """One linear index of a kernel."""

    name: str
    dims: tuple[Dim, ...]

    @property
    def size(self) -> sympy.Expr:
        """How many steps it has."""
        return total([dim.size for dim in self.dims])


@dataclass
class Nest:
    """The axes, and what each symbol of the domain is in terms of theirs."""

    axes: tuple[Axis, ...]
    swaps: dict[sympy.Symbol, sympy.Expr]
    ranges: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    _known: dict[sympy.Expr, sympy.Expr] = field(default_factory=dict)

    def rewritten(self, expr: sympy.Expr) -> sympy.Expr:
        """An expression over the kernel's own dimensions."""
        if expr not in self._known:
            swapped = expr.xreplace(self.swaps) if self.swaps else expr
            self._known[expr] = simplify(swapped, self.ranges)
        return self._known[expr]

    def axis(self, name: str) -> Axis | None:
        """The axis of a name."""
        return next((one for one in self.axes if one.name == name), None)


def _expressions(builder: Builder) -> Iterator[sympy.Expr]:
    for number in builder.live():
        instruction = builder.instructions[number]
        if instruction.op == "load":
            yield instruction.attribute.offset
        elif instruction.op == "index":
            yield instruction.attribute
    for store in builder.stores:
        yield store.offset


def _addresses(builder: Builder) -> list[sympy.Expr]:
    return [*(load.offset for load in builder.loads()), *(s.offset for s in builder.stores)]


def nest_of(builder: Builder, hint: Hint) -> Nest:
    """The loops of a kernel."""
    by_axis: dict[str, list[Dim]] = {"p": [], "r": []}
    for dim in builder.dims:
        by_axis[dim.axis].append(dim)
    swaps: dict[sympy.Symbol, sympy.Expr] = {}
    ranges = dict(builder.ranges)
    addresses = _addresses(builder)
    reduces = any(builder.instructions[number].op == "reduce" for number in builder.live())
    axes = []
    for name, dims in by_axis.items():
        dims = _ordered(dims, builder, addresses, hint)
        merged = _merged(dims, list(dict.fromkeys(_expressions(builder))), swaps)
        ranges.update({dim.symbol: dim.size for dim in merged})
        if merged or name == "p" or reduces:
            axes.append(Axis(name, tuple(merged)))
    nest = Nest(tuple(axes), swaps, ranges)
    return _tiled(nest, [nest.rewritten(one) for one in addresses], builder, hint)


def _step(expr: sympy.Expr, symbol: sympy.Symbol) -> sympy.Expr | None:
    """The stride of an address along a dimension; None where it is no stride."""
    expanded = sympy.expand(expr)
    step = expanded.coeff(symbol)
    rest = expanded - step * symbol
    return None if symbol in rest.free_symbols or symbol in step.free_symbols else step


def near_step(expr: sympy.Expr, symbol: sympy.Symbol) -> sympy.Expr | None:
    """The stride along a dimension between most neighbours: where it is cut, within a piece."""
    swaps: dict[sympy.Expr, sympy.Expr] = {}
    for one in expr.atoms(FloorDiv, Mod):
        if one.args[0] == symbol and symbol not in one.args[1].free_symbols:
            swaps[one] = symbol if isinstance(one, Mod) else sympy.Integer(0)
    return _step(expr.xreplace(swaps), symbol)


def _ordered(
    dims: Sequence[Dim], builder: Builder, addresses: Sequence[sympy.Expr], hint: Hint
) -> list[Dim]:
    """Shortest steps innermost, by the first store that has the dimensions, then by loads."""
    stores = [store.offset for store in builder.stores]

    def weight(dim: Dim) -> tuple[int, ...]:
        steps = []
        for expr in [*stores, *addresses]:
            step = _step(expr, dim.symbol)
            if step is not None and step != 0:
                steps.append(hint(step))
        return tuple(steps[:1]) or (0,)

    # A dimension that no address steps along stays outermost.
    return sorted(dims, key=lambda dim: -weight(dim)[0] if weight(dim)[0] else -(2**62))


def _merged(
    dims: Sequence[Dim], expressions: Sequence[sympy.Expr], swaps: dict[sympy.Symbol, sympy.Expr]
) -> list[Dim]:
    result: list[Dim] = []
    current = list(expressions)
    for dim in dims:
        if result and all(_joins(expr, result[-1], dim) for expr in current):
            outer = result.pop()
            joined = Dim(dim.symbol, sympy.expand(outer.size * dim.size), dim.axis)
            # The inner symbol is used for both; where they joined, the outer one only scales it.
            change = {outer.symbol: sympy.Integer(0)}
            current = [expr.xreplace(change) for expr in current]
            swaps.update({key: value.xreplace(change) for key, value in swaps.items()})
            swaps.update(change)
            result.append(joined)
        else:
            result.append(dim)
    return result


def _joins(expr: sympy.Expr, outer: Dim, inner: Dim) -> bool:
    if not {outer.symbol, inner.symbol} & expr.free_symbols:
        return True
    far, near = _step(expr, outer.symbol), _step(expr, inner.symbol)
    if far is None or near is None:
        return False
    return bool(sympy.expand(far - near * inner.size) == 0)


def _tiled(nest: Nest, addresses: Sequence[sympy.Expr], builder: Builder, hint: Hint) -> Nest:
    """Tiles of two dimensions where loads run along another one than the stores."""
    rows = nest.axis("p")
    if rows is None or nest.axis("r") is not None or len(rows.dims) < 2:
        return nest
    *others, last = rows.dims
    if hint(last.size) < _TILED_FROM:
        return nest
    crossing = []
    for dim in others:
        across = [
            expr
            for expr in addresses
            if _step(expr, dim.symbol) == 1 and near_step(expr, last.symbol) not in (None, 0, 1)
        ]
        if across and hint(dim.size) >= _TILED_FROM:
            crossing.append(dim)
    if hint(last.size) > 65535 * 32:
        return nest
    if not crossing:
        return _by_rows(nest, rows, addresses, hint)
    inner = crossing[-1]
    rest = tuple(dim for dim in others if dim is not inner)
    axes = (Axis("p", (*rest, inner)), Axis("q", (last,)))
    return Nest(axes, nest.swaps, nest.ranges)


def _by_rows(nest: Nest, rows: Axis, addresses: Sequence[sympy.Expr], hint: Hint) -> Nest:
    """Rows of their own where something is the same along a whole row: it is read once for it."""
    *others, last = rows.dims
    outside = {dim.symbol for dim in others}
    constant = any(
        last.symbol not in expr.free_symbols and outside & expr.free_symbols for expr in addresses
    )
    if not constant or row_block(hint(last.size)) is None:
        return nest
    return Nest((Axis("p", tuple(others)), Axis("q", (last,))), nest.swaps, nest.ranges)


def row_block(size: int) -> int | None:
    """The longest block that cuts a row with little left over."""
    if size < _ROWS_FROM:
        return None
    for block in (1024, 512, 256):
        if -(-size // block) * block <= size * (1 + _MOST_PADDING):
            return block
    return None
