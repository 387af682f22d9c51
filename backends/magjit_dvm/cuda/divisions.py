"""Quotients and remainders as eager mode rounds them, and powers of ints: see ``functions.py``."""

from __future__ import annotations

import math
from collections.abc import Callable

from magjit_dvm.cuda.ptx import Body, Reg

__all__ = ["OF_FLOATS", "OF_INTS"]

_STEP = 26
"""Bits of a quotient that a turn finds: with the divisor's 24, fewer than a double has."""


def _fmod(b: Body, x: Reg, y: Reg) -> Reg:
    """C's ``fmod``, exact: x less multiples of y · 2^n, n falling by ``_STEP`` in each turn.

    Both are powers of two times whole numbers below 2^24, so that a quotient below 2^27 is farther
    from the next whole number than a double's rounding, and what is left of x is a double.
    """
    rest = b.variable(b.unary("cvt.f64.f32", abs(x), "d"))
    divisor = b.unary("cvt.f64.f32", abs(y), "d")
    divisor = b.where(divisor.equals(0.0), b.lift(1.0, "d"), divisor)
    again = b.loop()
    beyond = _exponent(b, rest) - _exponent(b, divisor) - _STEP
    beyond = b.where(beyond > 0, beyond, b.lift(0, "l"))
    by = b.as_kind(b.as_kind(divisor, "l") + b.bits("shl", beyond, 52), "d")
    quotient = b.unary("cvt.rzi.f64.f64", rest / by)
    b.assign(rest, b.fma(-quotient, by, rest))
    b.again(again, rest >= divisor)
    left = b.unary("cvt.rn.f32.f64", rest, "f")
    whole = b.where(abs(x) < math.inf, abs(x), math.nan)
    left = b.where(abs(y).equals(math.inf), whole, left)
    # A number that is none may have a sign, and so any exponent above.
    left = b.where(abs(y) > 0.0, left, math.nan)
    return b.magnitude_of(left, x)


def _exponent(b: Body, x: Reg) -> Reg:
    return b.bits("shr", b.as_kind(x, "l"), 52)


def _adjusted(b: Body, rest: Reg, y: Reg, value: Reg, by: Reg) -> Reg:
    """``value + by`` where a remainder is not 0, and its sign not that of y."""
    signs = b.bits("xor", b.as_kind(rest, "i"), b.as_kind(y, "i"))
    added = b.where(signs < 0, value + by, value)
    zero = b.lift(0, rest.kind)
    return b.where(rest.differs(zero), added, value)


def _remainder(b: Body, x: Reg, y: Reg) -> Reg:
    rest = _fmod(b, x, y)
    return _adjusted(b, rest, y, rest, y)


def _floor_div(b: Body, x: Reg, y: Reg) -> Reg:
    rest = _fmod(b, x, y)
    quotient = _adjusted(b, rest, y, (x - rest) / y, b.lift(-1.0, "f"))
    floor = b.unary("cvt.rmi.f32.f32", quotient)
    floor = b.where(quotient - floor > 0.5, floor + 1.0, floor)
    plain = x / y
    floor = b.where(quotient.equals(0.0), b.magnitude_of(b.lift(0.0, "f"), plain), floor)
    return b.where(y.equals(0.0), plain, floor)


def _trunc_div_int(b: Body, x: Reg, y: Reg) -> Reg:
    return b.emit("div.s32", "i", x, y)


def _fmod_int(b: Body, x: Reg, y: Reg) -> Reg:
    return x - _trunc_div_int(b, x, y) * y


def _remainder_int(b: Body, x: Reg, y: Reg) -> Reg:
    rest = _fmod_int(b, x, y)
    return _adjusted(b, rest, y, rest, y)


def _floor_div_int(b: Body, x: Reg, y: Reg) -> Reg:
    quotient = _trunc_div_int(b, x, y)
    return _adjusted(b, x - quotient * y, y, quotient, b.lift(-1, "i"))


def _power(b: Body, x: Reg, y: Reg) -> Reg:
    """By squares; to a negative power all is 0 but 1 and −1."""
    one = b.lift(1, "i")
    result, base = b.variable(one), b.variable(x)
    left = b.variable(b.where(y < 0, b.lift(0, "i"), y))
    again = b.loop()
    odd = b.bits("and", left, 1)
    b.assign(result, b.where(odd.differs(0), result * base, result))
    b.assign(base, base * base)
    b.assign(left, b.bits("shr", left, 1))
    b.again(again, left.differs(0))
    sign = b.where(b.bits("and", y, 1).differs(0), b.lift(-1, "i"), one)
    inverse = b.where(x.equals(-1), sign, b.where(x.equals(1), one, b.lift(0, "i")))
    return b.where(y < 0, inverse, result)


Function = Callable[[Body, Reg, Reg], Reg]

OF_FLOATS: dict[str, Function] = {
    "floor_div": _floor_div,
    "fmod": _fmod,
    "remainder": _remainder,
}
OF_INTS: dict[str, Function] = {
    "floor_div": _floor_div_int,
    "trunc_div": _trunc_div_int,
    "fmod": _fmod_int,
    "remainder": _remainder_int,
    "pow": _power,
}
"""By name.  Of an int by 0, what the GPU makes of it, as in eager mode."""
