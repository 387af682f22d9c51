"""Functions of angles, and powers: in double, as ``csrc/functions.inc`` has them."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from magjit_dvm.cuda.coefficients import COEFFICIENTS
from magjit_dvm.cuda.ptx import Body, Reg

__all__ = ["acos", "asin", "atan", "cos", "power", "sin", "tables", "tan"]

_INF, _NAN = math.inf, math.nan
_DMAGIC = 1.5 * 2.0**52
_PI = tuple(map(float.fromhex, ("0x1.921fb0p+1", "0x1.5110b4p-21", "0x1.8469898cc517p-47")))
_INVERSE_PI = float.fromhex("0x1.45f306dc9c883p-2")
_PI_2, _PI_2_LO = float.fromhex("0x1.921fb6p+0"), float.fromhex("-0x1.777a5cp-25")
_LARGE, _FIRST_POWER, _POWERS = 2.0**29, 6, 99


@cache
def _two_pi(bits: int) -> int:
    """2π · 2^bits, by Machin's formula."""

    def inverse_tangent(n: int) -> int:
        term = total = (1 << (bits + 32)) // n
        k = 1
        while term:
            term //= -n * n
            k += 2
            total += term // k
        return total

    return (8 * (4 * inverse_tangent(5) - inverse_tangent(239))) >> 32


@cache
def tables() -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Constant memory: of each power of two from 2^6 on, what it is modulo 2π, in two parts.

    The first has 26 bits, so that its products with 24 bits are exact.
    """
    bits, parts = 400, list[float]()
    for power in range(_FIRST_POWER, _FIRST_POWER + _POWERS):
        rest = (1 << (power + bits)) % _two_pi(bits)
        low_bits = max(rest.bit_length() - 26, 0)
        high = rest >> low_bits << low_bits
        parts += [math.ldexp(high, -bits), math.ldexp(rest - high, -bits)]
    return {"mj_powers": np.array(parts)}


def _reduced(b: Body, x: Reg, offset: float, scale: float) -> tuple[Reg, Reg]:
    """X less the nearest k · π / scale, of k − offset integers for sin; and k + magic."""
    wide = b.unary("cvt.f64.f32", x, "d")
    # Of large numbers: their 24 bits times the remainder of the power of two.
    large = abs(x) > _LARGE
    bits = b.as_kind(x, "i")
    power = b.bits("and", b.bits("shr", bits, 23), 255) + (-150 - _FIRST_POWER)
    power = b.emit("max.s32", "i", power, b.lift(0, "i"))
    power = b.emit("min.s32", "i", power, b.lift(_POWERS - 1, "i"))
    at = b.bits("shl", power, 4)
    mantissa = b.bits("or", b.bits("and", bits, 0x007FFFFF), 0x00800000)
    m = b.unary("cvt.rn.f64.s32", mantissa, "d")
    m = b.magnitude_of(m, wide)
    high = m * b.emit("ld.const.f64", "d", Reg(f"[mj_powers+{at.name}]", "d", b))
    second = at + 8
    low = m * b.emit("ld.const.f64", "d", Reg(f"[mj_powers+{second.name}]", "d", b))
    w = b.where(large, high, wide)
    low = b.where(large, low, b.lift(0.0, "d"))
    t = (w + low) * (_INVERSE_PI * scale)
    t = (t + (-offset) if offset else t) + _DMAGIC
    k = t - _DMAGIC
    k = k + offset if offset else k
    k = k * (1.0 / scale) if scale != 1.0 else k
    r = ((w - k * _PI[0]) - k * _PI[1]) - k * _PI[2]
    return r + low, t


def _sin_reduced(b: Body, r: Reg, t: Reg) -> Reg:
    z = r * r
    y = b.fma(r * z, b.poly(z, COEFFICIENTS["sin"]), r)
    sign = b.bits("shl", b.as_kind(t, "l"), 63)
    return b.unary("cvt.rn.f32.f64", b.bits("xor", b.as_kind(y, "l"), sign, "d"), "f")


def _finite_only(b: Body, x: Reg, y: Reg) -> Reg:
    return b.where(abs(x) < _INF, y, _NAN)


def sin(b: Body, x: Reg) -> Reg:
    """X less the nearest multiple of π."""
    r, t = _reduced(b, x, 0.0, 1.0)
    return b.where(x.equals(0.0), x, _finite_only(b, x, _sin_reduced(b, r, t)))


def cos(b: Body, x: Reg) -> Reg:
    """X less the nearest odd multiple of π/2."""
    r, t = _reduced(b, x, 0.5, 1.0)
    return _finite_only(b, x, _sin_reduced(b, r, t + 1.0))


def tan(b: Body, x: Reg) -> Reg:
    """X less the nearest multiple of π/2."""
    r, t = _reduced(b, x, 0.0, 2.0)
    odd = b.unary("cvt.u32.u64", b.as_kind(t, "l"), "i")
    even = b.bits("and", odd, 1).equals(0)
    z = r * r
    s = b.fma(r * z, b.poly(z, COEFFICIENTS["tan_sin"]), r)
    c = b.fma(z, b.poly(z, COEFFICIENTS["tan_cos"]), 1.0)
    y = b.where(even, s, -c) / b.where(even, c, s)
    y = _finite_only(b, x, b.unary("cvt.rn.f32.f64", y, "f"))
    return b.where(x.equals(0.0), x, y)


def atan(b: Body, x: Reg) -> Reg:
    """Above 1, π/2 less that of 1/|x|."""
    a = abs(x)
    big = a > 1.0
    w = b.where(big, 1.0 / a, a)
    z = w * w
    rest = w * z * b.poly(z, COEFFICIENTS["atan"])
    y = b.where(big, _PI_2 - (w + (rest - _PI_2_LO)), w + rest)
    return b.magnitude_of(y, x)


def _arc(b: Body, x: Reg) -> tuple[Reg, Reg, Reg]:
    """Whether |x| > 1/2, the argument w, and asin(w) − w."""
    a = abs(x)
    big = a > 0.5
    z = b.where(big, b.fma(a, -0.5, 0.5), a * a)
    w = b.where(big, b.unary("sqrt.rn.f32", z), a)
    return big, w, w * z * b.poly(z, COEFFICIENTS["asin"])


def asin(b: Body, x: Reg) -> Reg:
    """Above 1/2, π/2 less twice that of √((1 − |x|)/2)."""
    big, w, rest = _arc(b, x)
    y = b.where(big, _PI_2 - 2.0 * (w + (rest - 0.5 * _PI_2_LO)), w + rest)
    return b.magnitude_of(y, x)


def acos(b: Body, x: Reg) -> Reg:
    """In the middle, π/2 less the arc sine."""
    big, w, rest = _arc(b, x)
    outer = 2.0 * (w + rest)
    outer = b.where(x < 0.0, 2.0 * _PI_2 - (outer - 2.0 * _PI_2_LO), outer)
    middle = _PI_2 - (x + (b.magnitude_of(rest, x) - _PI_2_LO))
    return b.where(big, outer, middle)


def power(b: Body, x: Reg, y: Reg) -> Reg:
    """As ``f_pow``: 2^(y log2|x|) in double."""
    w, e = b.unary("cvt.f64.f32", x, "d"), b.unary("cvt.f64.f32", y, "d")
    c = b.where(e > 1e30, 1e30, e)
    c = b.where(c < -1e30, -1e30, c)
    a = abs(w)
    i = b.as_kind(a, "l") - 0x3FE6A09E667F3BCD
    power = b.unary("cvt.rn.f64.s64", b.bits("shr", i, 52), "d")
    m = b.as_kind(b.bits("and", i, 0x000FFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD, "d")
    s = (m + (-1.0)) / (m + 1.0)
    z = s * s
    two = b.fma(z, b.poly(z, COEFFICIENTS["pow_log"]), 2.0) * s
    log = b.fma(two, float.fromhex("0x1.71547652b82fep+0"), power)
    log = b.where(a < _INF, log, a)
    log = b.where(a.equals(0.0), -_INF, log)
    p = c * log
    p = b.where(p > 200.0, 200.0, p)
    p = b.where(p < -200.0, -200.0, p)
    t = p + _DMAGIC
    r = p - (t - _DMAGIC)
    scale = b.as_kind(b.bits("shl", b.as_kind(t, "l") + 1023, 52), "d")
    q = b.fma(b.poly(r, COEFFICIENTS["pow_exp"]), r, 1.0) * scale
    c = b.where(c > 2.0**24, 2.0**24, c)
    c = b.where(c < -(2.0**24), -(2.0**24), c)
    h = c * 0.5
    odd = b.magnitude_of(b.lift(1.0, "d"), w)
    sign = b.where((h + _DMAGIC + (-_DMAGIC)).equals(h), 1.0, odd)
    other = b.where(w < 0.0, b.lift(_NAN, "d"), 1.0)
    other = b.where(a.equals(_INF), 1.0, other)
    q = q * b.where((c + _DMAGIC + (-_DMAGIC)).equals(c), sign, other)
    q = b.where(w.equals(1.0), 1.0, q)
    q = b.where(e.equals(0.0), 1.0, q)
    return b.unary("cvt.rn.f32.f64", q, "f")
