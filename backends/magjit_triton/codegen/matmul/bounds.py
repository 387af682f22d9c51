"""Conditions on a product's columns as intervals.

``merged.split([q, k, v])`` leaves conditions such as ``c // 128 - 32 >= 0`` on the column ``c``.
As an interval such a condition is asked once for a whole tile that lies inside or outside of it.
"""

from __future__ import annotations

from typing import Any

import sympy
from sympy.core.relational import Relational

from magjit.plugin.virtual_tensors.indexing import FloorDiv

__all__ = ["interval", "tightened"]


def interval(condition: Any, column: sympy.Symbol, size: sympy.Expr) -> tuple[int, int] | None:
    """From where to where (exclusive) a condition holds; None where it is none of the column alone.

    Args:
        condition: a relation, or a conjunction of them.
        column: 0 <= column < size; a size that is no number gives None.
    """
    if not sympy.sympify(size).is_Integer:
        return None
    first, end = 0, int(size)
    for one in condition.args if isinstance(condition, sympy.And) else (condition,):
        found = _bound(one, column)
        if found is None:
            return None
        first, end = max(first, found[0]), min(end, found[1])
    return (first, end) if first < end else None


def tightened(condition: Any, column: sympy.Symbol, size: sympy.Expr) -> Any:
    """The same condition as at most two comparisons of the column, where it is an interval."""
    found = interval(condition, column, size)
    if found is None:
        return condition
    first, end = found
    parts = []
    if first > 0:
        parts.append(column >= first)
    if end < int(size):
        parts.append(column < end)
    return sympy.And(*parts)


_FAR = 2**62


def _bound(relation: Any, column: sympy.Symbol) -> tuple[int, int] | None:
    if not isinstance(relation, Relational) or relation.rel_op not in ("<", "<=", ">", ">="):
        return None
    rest = sympy.expand(relation.lhs - relation.rhs)
    symbols = [one for one in rest.atoms(FloorDiv, sympy.Symbol) if _is_of(one, column)]
    whole = [one for one in symbols if isinstance(one, FloorDiv)] or symbols
    if len(whole) != 1:
        return None
    unit = int(whole[0].args[1]) if isinstance(whole[0], FloorDiv) else 1
    factor = rest.coeff(whole[0])
    number = rest - factor * whole[0]
    if factor not in (1, -1) or not number.is_Integer:
        return None
    operator, number = relation.rel_op, int(number)
    if factor == -1:  # number - x < 0 is x - number > 0
        operator, number = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}[operator], -number
    # x + number (operator) 0, of integers.
    match operator:
        case "<":
            return -_FAR, -number * unit
        case "<=":
            return -_FAR, (1 - number) * unit
        case ">":
            return (1 - number) * unit, _FAR
        case _:
            return -number * unit, _FAR


def _is_of(expr: sympy.Expr, column: sympy.Symbol) -> bool:
    if isinstance(expr, FloorDiv):
        return bool(expr.args[0] == column and expr.args[1].is_Integer and expr.args[1] > 0)
    return bool(expr == column)
