"""Index arithmetic: integer expressions over the index of a tensor, and what can be proved of them.

    expr ::= integer | size symbol | i0 | i1 | …        (the index: 0 ≤ ik < size of dimension k)
           | expr + expr | expr * expr
           | FloorDiv(expr, expr) | Mod(expr, expr)      (of non-negative operands)
           | Load(source, expr)                          (an element of an index tensor)
           | Wrapped(expr, expr)                         (a negative index counts from the end)

Sizes are ints or sympy expressions over FX's size symbols. Nothing here guesses: a rewrite happens
where it holds for every index in range and every positive value of the symbols.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Mod

__all__ = [
    "At",
    "FloorDiv",
    "Load",
    "Mod",
    "Ranges",
    "Wrapped",
    "bounds",
    "index_symbols",
    "is_nonnegative",
    "linear_terms",
    "numel",
    "simplify",
    "size_expr",
    "substitute",
]

Ranges = MappingType[sympy.Symbol, sympy.Expr]
"""Index symbol → its size: the symbol is at least 0 and less than that."""

_KEPT = 1 << 14
"""How many answers are kept: the layers of a model ask the same, for the same symbols."""


class Load(sympy.Function):
    """``Load(source, offset)``: the element at ``offset`` of physical tensor ``source``.

    Used as an index: an integer of at least 0 that is in range wherever the program is right.
    """

    nargs = (2,)
    is_integer = True


class At(sympy.Function):
    """``At(operand, i0, i1, …)``: an element of an operand of a movement, by its index."""

    is_integer = True


class Wrapped(sympy.Function):
    """``Wrapped(index, size)``: ``index``, or ``index + size`` where ``index`` is negative."""

    nargs = (2,)
    is_integer = True
    is_nonnegative = True


@cache
def index_symbols(dimensions: int) -> tuple[sympy.Symbol, ...]:
    """``i0, i1, …``, one for each dimension."""
    return tuple(sympy.Symbol(f"i{k}", integer=True, nonnegative=True) for k in range(dimensions))


def size_expr(size: Any) -> sympy.Expr:
    """An int, SymInt or expression as an expression."""
    if isinstance(size, torch.SymInt):
        return size.node.expr
    return sympy.sympify(size)


def numel(shape: Sequence[Any]) -> sympy.Expr:
    """The product of the sizes."""
    return sympy.Mul(*(size_expr(size) for size in shape))


def substitute(expr: Any, old: Sequence[sympy.Symbol], new: Sequence[sympy.Expr]) -> Any:
    """All symbols at once, so that ``i0 → i1, i1 → i0`` is an exchange."""
    return expr.xreplace(dict(zip(old, map(sympy.sympify, new), strict=True)))


def linear_terms(expr: sympy.Expr) -> dict[sympy.Expr, sympy.Expr]:
    """``expr`` as a sum: what depends on the index or is opaque → its coefficient.

    The key 1 has the terms of integers and sizes alone.
    """
    terms: dict[sympy.Expr, sympy.Expr] = {}
    for term in sympy.Add.make_args(sympy.expand(expr)):
        factors = sympy.Mul.make_args(term)
        index = sympy.Mul(*(one for one in factors if not _is_size(one)))
        size = sympy.Mul(*(one for one in factors if _is_size(one)))
        terms[index] = terms.get(index, sympy.S.Zero) + size
    return {key: value for key, value in terms.items() if value != 0}


@cache
def _is_size(expr: sympy.Expr) -> bool:
    """Whether an expression is the same for every index."""
    return not expr.has(Load, At, Wrapped) and not any(
        _is_index(symbol) for symbol in expr.free_symbols
    )


def _is_index(symbol: sympy.Symbol) -> bool:
    name = symbol.name
    return bool(name[:1] == "i" and name[1:].isdigit())


@cache
def is_nonnegative(expr: sympy.Expr) -> bool:
    """Whether an expression over sizes is proved to be at least 0, each symbol being in range."""
    if expr.is_number:
        return bool(expr >= 0)
    if expr.is_nonnegative:
        return True
    shifted = {}
    for symbol in expr.free_symbols:
        if symbol.is_positive:
            shifted[symbol] = sympy.Symbol(f"{symbol.name}_less_1", integer=True) + 1
        elif not symbol.is_nonnegative:
            return False
    expanded = sympy.expand(expr.xreplace(shifted))
    for term in sympy.Add.make_args(expanded):
        coefficient, rest = term.as_coeff_Mul()
        powers = rest.as_powers_dict()
        plain = all(
            base.is_Symbol and power.is_Integer and power > 0 for base, power in powers.items()
        )
        if coefficient < 0 or not (rest == 1 or plain):
            return False
    return True


def bounds(expr: sympy.Expr, ranges: Ranges) -> tuple[sympy.Expr | None, sympy.Expr | None]:
    """The least and greatest value over the index range, over sizes; None where not known."""
    low: sympy.Expr | None = sympy.S.Zero
    high: sympy.Expr | None = sympy.S.Zero
    for term, coefficient in linear_terms(expr).items():
        least, most = _atom_bounds(term, ranges)
        if is_nonnegative(-coefficient):
            least, most = most, least
        elif not is_nonnegative(coefficient):
            return None, None
        low = None if low is None or least is None else low + coefficient * least
        high = None if high is None or most is None else high + coefficient * most
    return low, high


def _atom_bounds(term: sympy.Expr, ranges: Ranges) -> tuple[sympy.Expr | None, sympy.Expr | None]:
    if term == 1:
        return sympy.S.One, sympy.S.One
    if term in ranges:
        return sympy.S.Zero, ranges[term] - 1
    if isinstance(term, Mod):
        inner, divisor = term.args
        high = bounds(inner, ranges)[1]
        limit = divisor - 1 if _is_size(divisor) else None
        if high is not None and limit is not None and is_nonnegative(limit - high):
            limit = high
        return sympy.S.Zero, limit
    if isinstance(term, FloorDiv):
        inner, divisor = term.args
        low, high = bounds(inner, ranges)
        if not _is_size(divisor):
            return None, None
        return _least_quotient(low, divisor), _most_quotient(high, divisor)
    if isinstance(term, Wrapped) and _is_size(term.args[1]):
        return sympy.S.Zero, term.args[1] - 1
    return None, None


def _least_quotient(low: sympy.Expr | None, divisor: sympy.Expr) -> sympy.Expr | None:
    if low is None or not is_nonnegative(low):
        return None
    return low // divisor if low.is_Integer and divisor.is_Integer else sympy.S.Zero


def _most_quotient(high: sympy.Expr | None, divisor: sympy.Expr) -> sympy.Expr | None:
    if high is None:
        return None
    if high.is_Integer and divisor.is_Integer:
        return high // divisor
    whole, over = _divide_sizes(high + 1, divisor, constant=False)
    return whole - 1 if over == 0 else None


def simplify(expr: sympy.Expr, ranges: Ranges) -> sympy.Expr:
    """The same value for every index in ``ranges``, with as few divisions as can be proved."""
    symbols = expr.free_symbols
    return _simplified(expr, tuple(pair for pair in ranges.items() if pair[0] in symbols))


@lru_cache(_KEPT)
def _simplified(expr: sympy.Expr, known: tuple[tuple[sympy.Symbol, sympy.Expr], ...]) -> sympy.Expr:
    if not expr.has(FloorDiv, Mod, Load, At, Wrapped):
        return sympy.expand(expr)
    ranges = dict(known)
    if isinstance(expr, FloorDiv):
        return _divide(simplify(expr.args[0], ranges), expr.args[1], ranges)
    if isinstance(expr, Mod):
        return _remainder(simplify(expr.args[0], ranges), expr.args[1], ranges)
    if isinstance(expr, Wrapped):
        index = simplify(expr.args[0], ranges)
        low = bounds(index, ranges)[0]
        return index if low is not None and is_nonnegative(low) else Wrapped(index, expr.args[1])
    if expr.is_Atom:
        return expr
    return _recombine(expr.func(*(simplify(one, ranges) for one in expr.args)))


def _split(
    expr: sympy.Expr, divisor: sympy.Expr, ranges: Ranges
) -> tuple[sympy.Expr, sympy.Expr, bool]:
    """``quotient, rest`` with ``expr == quotient * divisor + rest``; whether 0 ≤ rest < divisor."""
    quotient, rest = sympy.S.Zero, sympy.S.Zero
    for term, coefficient in linear_terms(expr).items():
        whole, over = _divide_sizes(coefficient, divisor, constant=term == 1)
        quotient += whole * term
        rest += over * term
    low, high = bounds(rest, ranges)
    inside = (
        low is not None
        and high is not None
        and is_nonnegative(low)
        and is_nonnegative(divisor - 1 - high)
    )
    return quotient, rest, inside


@lru_cache(_KEPT)
def _divide_sizes(
    coefficient: sympy.Expr, divisor: sympy.Expr, *, constant: bool
) -> tuple[sympy.Expr, sympy.Expr]:
    """``whole, over`` with ``coefficient == whole * divisor + over``."""
    if coefficient.is_Integer and divisor.is_Integer:
        if coefficient % divisor == 0 or constant:
            return coefficient // divisor, coefficient % divisor
        return sympy.S.Zero, coefficient
    if divisor.is_Add:  # Which divides all terms together, or none.
        ratio = sympy.cancel(coefficient / divisor)
        if ratio.is_integer and sympy.denom(ratio) == 1:
            return ratio, sympy.S.Zero
    whole, over = sympy.S.Zero, sympy.S.Zero
    for part in sympy.Add.make_args(sympy.expand(coefficient)):
        ratio = sympy.cancel(part / divisor)
        exact = ratio.is_integer and sympy.denom(ratio) == 1
        whole, over = (whole + ratio, over) if exact else (whole, over + part)
    return whole, over


def _divide(expr: sympy.Expr, divisor: sympy.Expr, ranges: Ranges) -> sympy.Expr:
    quotient, rest, inside = _split(expr, divisor, ranges)
    if inside:
        return quotient
    low = bounds(rest, ranges)[0]
    if low is None or not is_nonnegative(low):
        return FloorDiv(expr, divisor)
    if isinstance(rest, Mod):
        inner, modulus = rest.args
        ratio = _exact_ratio(modulus, divisor)
        if ratio is not None:
            return quotient + _remainder(_divide(inner, divisor, ranges), ratio, ranges)
    scale, upper, _ = _scaled(rest, divisor, ranges)
    if scale is not None:
        return quotient + _divide(upper, _quotient(divisor, scale), ranges)
    return quotient + FloorDiv(rest, divisor)


def _remainder(expr: sympy.Expr, divisor: sympy.Expr, ranges: Ranges) -> sympy.Expr:
    _, rest, inside = _split(expr, divisor, ranges)
    if inside:
        return rest
    low = bounds(rest, ranges)[0]
    if low is None or not is_nonnegative(low):
        return Mod(expr, divisor)
    if isinstance(rest, Mod) and _exact_ratio(rest.args[1], divisor) is not None:
        return _remainder(rest.args[0], divisor, ranges)
    scale, upper, lower = _scaled(rest, divisor, ranges)
    if scale is not None:
        above = _remainder(upper, _quotient(divisor, scale), ranges)
        return _recombine(sympy.expand(scale * above + lower))
    return Mod(rest, divisor)


def _scaled(
    expr: sympy.Expr, divisor: sympy.Expr, ranges: Ranges
) -> tuple[sympy.Expr | None, sympy.Expr, sympy.Expr]:
    """``scale, upper, lower``: ``expr == scale*upper + lower``, ``scale`` dividing the divisor.

    ``0 ≤ lower < scale``, so that a division by ``scale`` leaves ``upper``; None where there is
    no such scale greater than 1.
    """
    for coefficient in linear_terms(expr).values():
        scale = sympy.gcd(coefficient, divisor)
        if scale in (1, divisor):
            continue
        upper, lower, inside = _split(expr, scale, ranges)
        if inside:
            return scale, upper, lower
    return None, expr, sympy.S.Zero


def _quotient(size: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    return sympy.cancel(size / divisor)


def _exact_ratio(size: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
    whole, over = _divide_sizes(size, divisor, constant=False)
    return whole if over == 0 else None


def _recombine(expr: sympy.Expr) -> sympy.Expr:
    """Digits of one number put together: ``m*(x // m) + x % m`` is ``x``."""
    terms = linear_terms(expr)
    digits = [term for term in terms if isinstance(term, Mod)]
    for digit in digits:
        inner, modulus = digit.args
        weight = terms[digit]
        above = sympy.expand(weight * modulus)
        upper = FloorDiv(inner, modulus)
        for term, coefficient in terms.items():
            if sympy.expand(coefficient - above) != 0:
                continue
            if term == upper:
                joined = inner
            elif isinstance(term, Mod) and term.args[0] == upper:
                joined = Mod(inner, modulus * term.args[1])
            else:
                continue
            rest = {key: value for key, value in terms.items() if key not in (digit, term)}
            total = sympy.Add(*(key * value for key, value in rest.items()))
            return _recombine(sympy.expand(total + weight * joined))
    return sympy.expand(expr)
