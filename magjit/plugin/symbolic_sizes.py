"""Sizes as expressions, which of them are equal, and operators called on such shapes.

::

    Value   := Shape | Results | Dim | None      a tensor, several results, a number, unknown
    Shape   := (Dim, ...)
    Results := [Value, ...]
    Dim     := int | sympy expression

What shape propagation (TSCompiler, section 4.1) computes with; the rules are its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from magjit.errors import BackendError
from magjit.plugin.fx_nodes import called_at

__all__ = ["Call", "Dim", "NoRule", "Shape", "Sizes", "Value", "shape_of_value", "show"]

Dim: TypeAlias = "int | sympy.Expr"
Shape: TypeAlias = tuple[Dim, ...]
Value: TypeAlias = Any
Key: TypeAlias = int | str


class NoRule(Exception):
    """Why the shape of a node cannot be computed."""


def shape_of_value(value: Any) -> Value:
    """The ``Value`` of a real or fake tensor, a number, or a list of these; ``None`` for others."""
    if isinstance(value, torch.Tensor):
        return tuple(shape_of_value(size) for size in value.shape)
    if isinstance(value, list | tuple):
        return [shape_of_value(item) for item in value]
    expression = getattr(getattr(value, "node", None), "expr", value)
    if not isinstance(expression, int | float | sympy.Basic):
        return None
    return int(expression) if getattr(expression, "is_Integer", False) else expression


def show(value: Value) -> str:
    """A ``Value`` as a person reads it."""
    if isinstance(value, tuple | list):
        inner = ", ".join(map(show, value))
        return f"[{inner}]" if isinstance(value, tuple) else f"({inner})"
    return "?" if value is None else str(value)


class Sizes:
    """Which sizes are equal, as a union-find over expressions, and what range each has.

    An equation that can be solved for a symbol replaces the symbol; any other makes one
    expression the parent of the other.
    """

    def __init__(self, shape_env: ShapeEnv | None, minimum: int) -> None:
        self.shape_env, self.minimum = shape_env, minimum
        self.united: list[tuple[Dim, Dim]] = []
        self._unknowns: set[sympy.Symbol] = set()
        self._parents: dict[sympy.Expr, sympy.Expr] = {}
        self._canonical: dict[sympy.Expr, Dim] = {}

    def fill(self, node: Node, shape: Sequence[Dim | None]) -> Shape:
        """``shape`` with a symbol for each size that nothing is known of."""
        sign = {"positive": True} if self.minimum > 0 else {"nonnegative": True}
        symbols = [
            sympy.Symbol(f"{node.name}.{i}", integer=True, **sign) for i in range(len(shape))
        ]
        self._unknowns.update(symbols)
        return tuple(s if d is None else d for s, d in zip(symbols, shape, strict=True))

    def canonical(self, value: Value) -> Value:
        """The representatives of all sizes in ``value``."""
        if isinstance(value, tuple | list):
            return type(value)(self.canonical(item) for item in value)
        if not isinstance(value, sympy.Expr):
            return value
        if value not in self._canonical:
            found = value if self.shape_env is None else self.shape_env.simplify(value)
            previous = None
            while found != previous:
                previous, found = found, sympy.sympify(found.xreplace(self._parents))
                found = sympy.expand(found.replace(FloorDiv, _divided))
            self._canonical[value] = int(found) if found.is_Integer else found
        return self._canonical[value]

    def bounds(self, dim: Dim) -> ValueRanges[Any]:
        expression = sympy.sympify(self.canonical(dim))
        known = {} if self.shape_env is None else self.shape_env.var_to_range
        default = ValueRanges(self.minimum, int_oo)
        return bound_sympy(expression, {s: known.get(s, default) for s in expression.free_symbols})

    def never_one(self, dim: Dim) -> bool:
        bounds = self.bounds(dim)
        return bool(bounds.lower > 1 or bounds.upper < 1)

    def at_most(self, a: Dim, b: Dim) -> bool:
        """Whether ``a <= b`` for all sizes."""
        env, relation = self.shape_env, sympy.Le(self.canonical(a), self.canonical(b))
        if self.bounds(b - a).lower >= 0:
            return True
        symbols = relation.free_symbols
        if env is None or not symbols or not symbols <= env.var_to_range.keys():
            return False
        return bool(env._maybe_evaluate_static(relation) == sympy.true)

    def unite(self, a: Dim, b: Dim) -> bool:
        """Take two sizes for equal from now on; false where they cannot be."""
        a, b = self.canonical(a), self.canonical(b)
        difference = sympy.expand(a - b)
        if difference == 0:
            return True
        bounds = self.bounds(difference)
        if bounds.lower > 0 or bounds.upper < 0:
            return False
        self.united.append((a, b))
        child, parent = self._solve(difference.primitive()[1], (a, b))
        stale: dict[sympy.Expr, sympy.Expr] = {}
        if child.is_Symbol:  # Other expressions may hold it, and become equal or solvable.
            stale = {c: p for c, p in self._parents.items() if not c.is_Symbol}
        self._parents = {c: p for c, p in self._parents.items() if c not in stale}
        self._parents[child] = parent
        self._canonical.clear()
        return all(self.unite(c, p) for c, p in stale.items())

    def _solve(self, difference: sympy.Expr, sides: tuple[Dim, Dim]) -> tuple[Any, Any]:
        """What to replace by what: a symbol by its value, or else the longer by the shorter."""

        def preference(symbol: sympy.Symbol) -> tuple[bool, bool, str]:
            return symbol in self._unknowns, symbol in sides, str(symbol)

        for symbol in sorted(difference.free_symbols, key=preference, reverse=True):
            factor = difference.coeff(symbol)
            rest = sympy.expand(difference - factor * symbol)
            if factor in (1, -1) and symbol not in rest.free_symbols:
                return symbol, -factor * rest
        parent, child = sorted(sides, key=lambda side: (not isinstance(side, int), len(str(side))))
        return child, parent


@dataclass(frozen=True, slots=True)
class Call:
    """A node's arguments by the names in its operator's schema, with what is known of them."""

    node: Node
    values: Mapping[Node, Value]
    sizes: Sizes
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schema = getattr(self.node.target, "_schema", None)
        names = [str(at) for at in range(len(self.node.args))]
        if schema is not None:
            self.arguments.update({one.name: one.default_value for one in schema.arguments})
            names = [*self.arguments]
        self.arguments.update(zip(names, self.node.args, strict=False))
        self.arguments.update(self.node.kwargs)

    def fail(self, what: str) -> NoReturn:
        minimum = f"symbols are taken to be at least {self.sizes.minimum}: give `minimum` if not"
        at = f"Shapes do not fit at {self.node.format_node()}"
        raise BackendError(f"{at}: {what}", remedy=minimum, location=called_at(self.node))

    def argument(self, key: Key) -> Any:
        return [*self.arguments.values()][key] if isinstance(key, int) else self.arguments.get(key)

    def value(self, key: Key) -> Value:
        return self._resolved(self.argument(key))

    def _resolved(self, given: Any) -> Value:
        if isinstance(given, list | tuple):
            return [self._resolved(one) for one in given]
        return self.sizes.canonical(self.values.get(given) if isinstance(given, Node) else given)

    def known(self, key: Key) -> Shape | None:
        value = self.value(key)
        return value if isinstance(value, tuple) else None

    def shape(self, key: Key = 0, rank: int | None = None) -> Shape:
        found = self.known(key)
        if found is None:
            raise NoRule(f"operand {key} has no shape")
        if rank not in (None, len(found)):
            self.fail(f"operand {key} has the shape {show(found)}, not {rank} dimensions")
        return found

    def numbers(self, key: Key, count: int = 1) -> list[Dim]:
        """An argument that is a number or a list of them, a single one ``count`` times."""
        value = self.value(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        return listed * count if len(listed) == 1 else listed

    def dims(self, rank: int, key: Key = "dim") -> list[int]:
        return [int(dim) % max(rank, 1) for dim in self.numbers(key)]

    def agree(self, a: Sequence[Dim], b: Sequence[Dim]) -> None:
        for one, other in zip(a, b, strict=False):
            if not self.sizes.unite(one, other):
                self.fail(f"sizes {one} and {other} must be equal")

    def broadcast(self, *shapes: Shape) -> Shape:
        rank = max(map(len, shapes), default=0)
        padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
        return tuple(self._broadcast_sizes(sizes) for sizes in zip(*padded, strict=True))

    def _broadcast_sizes(self, sizes: Sequence[Dim]) -> Dim:
        distinct = [one for one in dict.fromkeys(self.sizes.canonical([*sizes])) if one != 1]
        large = [one for one in distinct if self.sizes.never_one(one)]
        self.agree(large[:1] * len(large), large)
        if len(distinct) > 1 and not large:
            raise NoRule(f"which of the sizes {show(distinct)} are 1 is unknown")
        return (large or distinct or [1])[0]

    def each(self, shape: Sequence[Dim]) -> Value:
        """``shape`` for every result of the operator."""
        results = len(getattr(self.node.target, "_schema").returns)  # noqa: B009
        return tuple(shape) if results == 1 else [tuple(shape)] * results

    def quotient(self, a: Dim, b: Dim) -> Dim:
        """``a // b``, without a division where ``b`` divides ``a`` for all sizes."""
        if b == 0:
            raise NoRule("a size is divided by 0")
        found: Dim = self.sizes.canonical(_divided(a, b))
        return found


def _divided(a: Dim, b: Dim) -> sympy.Expr:
    exact = sympy.cancel(sympy.sympify(a) / b)
    return exact if exact.as_numer_denom()[1] == 1 else FloorDiv(a, b)
