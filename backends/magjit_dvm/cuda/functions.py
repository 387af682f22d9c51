"""What each instruction does to one element, in PTX.

``elementwise(name, kind)`` gives the body of an instruction over operands ``{a}`` and ``{t}``, with
its result in ``{a}``.  Two kinds of registers: ``f`` has float32 (float16 and bfloat16 are computed
as such), ``i`` has int32 (also uint8, of which words keep the low 8 bits, and bool, 0 or 1).

The functions are those of ``csrc/functions.inc``, whose coefficients they share, but for
exponentials: the GPU has 2^x to 2 ulp.  With ``approximate``, the GPU's own tanh and quotients take
their place, of about 11 and 22 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from magjit_dvm.cuda.angles import acos, asin, atan, cos, power, sin, tables, tan
from magjit_dvm.cuda.coefficients import COEFFICIENTS
from magjit_dvm.cuda.divisions import OF_FLOATS, OF_INTS
from magjit_dvm.cuda.ptx import Body, Reg
from magjit_dvm.cuda.short_functions import SHORT

__all__ = ["FLOATS", "INTS", "elementwise", "is_binary", "tables"]

_LOG2E = float(np.float32(math.log2(math.e)))
_LOG2E_LOW = math.log2(math.e) - _LOG2E
_LN2 = math.log(2.0)
_LN2_HI, _LN2_LO = float.fromhex("0x1.62e4p-1"), float.fromhex("0x1.7f7d1cp-20")
_INF, _NAN = math.inf, math.nan

Function = Callable[[Body, Reg, Reg], Reg]


# -- exponentials --


def _ex2(b: Body, x: Reg) -> Reg:
    return b.unary("ex2.approx.ftz.f32", x)


def _inside(b: Body, x: Reg) -> Reg:
    """e^x where x · log2(e) is finite; 0 where the result is below the smallest normal number.

    What rounding took from 2^high comes back by its logarithm, to |x| · 3e-9 of the result.
    """
    high = x * _LOG2E
    y = _ex2(b, high)
    return b.fma(y, b.fma(high, -_LN2, x), y)


def _exp(b: Body, x: Reg) -> Reg:
    """2^n · 2^f: n is the nearest whole number to x / ln 2, but from −126 to 126; f is the rest.

    n is found within the low bits of a float, from a part of 252 that is kept from 0 to 1.
    """
    part = b.emit("fma.rn.sat.f32", "f", x, b.lift(_LOG2E / 252, "f"), b.lift(0.5, "f"))
    low_bits = b.fma(part, 252.0, 12582913.0)
    n = low_bits + (-12583039.0)
    f = b.fma(x, _LOG2E_LOW, b.fma(x, _LOG2E, -n))
    scale = b.as_kind(b.bits("shl", b.as_kind(low_bits, "i"), 23), "f")
    return _ex2(b, f) * scale


def _exp2(b: Body, x: Reg) -> Reg:
    return b.unary("ex2.approx.f32", x)


def _expm1(b: Body, x: Reg) -> Reg:
    c = _no_less_than(b, _no_more_than(b, x, 90.0), -30.0)
    k = b.unary("cvt.rni.f32.f32", c * _LOG2E)
    r = b.fma(k, -_LN2_LO, b.fma(k, -_LN2_HI, c))
    p = b.fma(r * r, b.poly(r, COEFFICIENTS["expm1"]), r)
    n = b.unary("cvt.rni.s32.f32", k, "i")
    n = b.where(n > 128, b.lift(128, "i"), n)
    s = _power_of_two(b, n + (-1))
    y = b.fma(s, p, s + (-0.5))
    y = y + y
    y = b.where(x > 89.0, _INF, y)
    return b.where(abs(x) < 2.0**-25, x, y)


def _power_of_two(b: Body, n: Reg) -> Reg:
    return b.as_kind(b.bits("shl", n + 127, 23), "f")


def _no_more_than(b: Body, x: Reg, most: float) -> Reg:
    return b.emit("min.NaN.f32", "f", x, b.lift(most, "f"))


def _no_less_than(b: Body, x: Reg, least: float) -> Reg:
    return b.emit("max.NaN.f32", "f", x, b.lift(least, "f"))


def _rcp(b: Body, x: Reg) -> Reg:
    """1 / x of a number of at least 1, to 1 ulp; 0 of what is beyond 2^126."""
    return b.unary("rcp.approx.ftz.f32", x)


def _tanh(b: Body, x: Reg) -> Reg:
    a = abs(x)
    z = a * a
    near = b.fma(a * z, b.poly(z, COEFFICIENTS["tanh"]), a)
    c = _no_more_than(b, a, 10.0)
    far = b.fma(_rcp(b, _inside(b, c + c) + 1.0), -2.0, 1.0)
    return b.magnitude_of(b.where(a < 0.55, near, far), x)


def _sigmoid(b: Body, x: Reg) -> Reg:
    return _rcp(b, _exp(b, -x) + 1.0)


def _silu(b: Body, x: Reg) -> Reg:
    return x * _sigmoid(b, x)


def _erf(b: Body, x: Reg) -> Reg:
    a = abs(x)
    near = b.fma(a, b.poly(a * a, COEFFICIENTS["erf"]), a)
    c = _no_more_than(b, a, 4.0)
    far = 1.0 - _inside(b, b.poly(c + (-1.5), COEFFICIENTS["erfc"]))
    return b.magnitude_of(b.where(a < 1.0, near, far), x)


def _gated(b: Body, x: Reg, q: Reg) -> Reg:
    positive = _no_less_than(b, x, -0.0)
    a = abs(_no_more_than(b, x, 100.0))
    return b.fma(-a, q, positive)


def _gelu(b: Body, x: Reg) -> Reg:
    a = abs(x) * math.sqrt(0.5)
    c = _no_more_than(b, a, 4.0)
    near = b.fma(b.fma(a, b.poly(a * a, COEFFICIENTS["erf"]), a), -0.5, 0.5)
    far = 0.5 * _inside(b, b.poly(c + (-1.5), COEFFICIENTS["erfc"]))
    far = b.where(a > 4.0, 0.0, far)
    return _gated(b, x, b.where(a < 1.0, near, far))


def _gelu_tanh(b: Body, x: Reg) -> Reg:
    return _gated(b, x, _gate_by_tanh(b, x))


def _gate_by_tanh(b: Body, x: Reg) -> Reg:
    """What GELU by tanh multiplies −|x| by."""
    inner = b.fma(x * x, float.fromhex("-0x1.2444f2p-4"), float.fromhex("-0x1.988454p+0"))
    return _gate_at(b, abs(x) * inner)


def _gate_at(b: Body, v: Reg) -> Reg:
    """The sigmoid of what is not above 0; 0 where that is below the smallest normal number."""
    e = _inside(b, _no_less_than(b, v, -100.0))
    return e * _rcp(b, e + 1.0)


# As in csrc/functions.inc.


def _silu_slope(b: Body, x: Reg) -> Reg:
    q = _gate_at(b, -abs(x))
    return b.fma(x, b.fma(-q, q, q), b.where(x < 0.0, q, 1.0 - q))


def _gelu_slope(b: Body, x: Reg) -> Reg:
    below = _exp(b, x * x * -0.5)
    half = b.fma(_erf(b, x * math.sqrt(0.5)), 0.5, 0.5)
    return b.fma(x * (1 / math.sqrt(2 * math.pi)), below, half)


def _gelu_tanh_slope(b: Body, x: Reg) -> Reg:
    q = _gate_by_tanh(b, x)
    s = b.where(x < 0.0, q, 1.0 - q)
    z = b.emit("min.f32", "f", x * x, b.lift(1e6, "f"))
    inner = b.fma(z, float.fromhex("0x1.b6676cp-3"), float.fromhex("0x1.988454p+0"))
    return b.fma(x * b.fma(-q, q, q), inner, s)


def _sinh(b: Body, x: Reg) -> Reg:
    a = abs(x)
    z = a * a
    near = b.fma(a * z, b.poly(z, COEFFICIENTS["sinh"]), a)
    h = _half_exp(b, a)
    return b.magnitude_of(b.where(a < 1.0, near, h - 0.25 / h), x)


def _half_exp(b: Body, a: Reg) -> Reg:
    """e^a / 2, which overflows later than e^a."""
    a = _no_more_than(b, a, 90.0)
    high = a * _LOG2E
    low = b.fma(a, _LOG2E_LOW, b.fma(a, _LOG2E, -high))
    y = b.unary("ex2.approx.f32", high + (-2.0))
    return b.fma(y, low * _LN2, y) * 2.0


def _cosh(b: Body, x: Reg) -> Reg:
    h = _half_exp(b, abs(x))
    return h + 0.25 / h


# -- logarithms --


def _above_root(b: Body, x: Reg) -> Reg:
    return b.as_kind(x, "i") - 0x3F3504F3


def _split(b: Body, x: Reg) -> tuple[Reg, Reg]:
    """F and e of x = 2^e (1 + f)."""
    small = x < 2.0**-126
    y = b.where(small, x * 2.0**23, x)
    i = _above_root(b, y)
    e = b.unary("cvt.rn.f32.s32", b.bits("shr", i, 23), "f") - b.where(
        small, b.lift(23.0, "f"), 0.0
    )
    f = b.as_kind(b.bits("and", i, 0x007FFFFF) + 0x3F3504F3, "f") + (-1.0)
    return f, e


def _log_special(b: Body, x: Reg, y: Reg) -> Reg:
    y = b.where(x < _INF, y, x)
    y = b.where(x < 0.0, _NAN, y)
    return b.where(x.equals(0.0), -_INF, y)


def _log_rest(b: Body, f: Reg) -> Reg:
    ff = f * f
    return b.fma(ff * f, b.poly(f, COEFFICIENTS["log"]), ff * (-0.5))


def _log(b: Body, x: Reg) -> Reg:
    f, e = _split(b, x)
    low = b.fma(e, _LN2_LO, _log_rest(b, f))
    return _log_special(b, x, b.fma(e, _LN2_HI, f + low))


def _log2(b: Body, x: Reg) -> Reg:
    f, e = _split(b, x)
    low = b.fma(f, float.fromhex("0x1.4ae0cp-26"), _log_rest(b, f) * _LOG2E)
    return _log_special(b, x, e + b.fma(f, _LOG2E, low))


def _log10(b: Body, x: Reg) -> Reg:
    f, e = _split(b, x)
    inverse = float.fromhex("0x1.bcb7b2p-2")
    low = b.fma(f, float.fromhex("-0x1.5b235ep-27"), _log_rest(b, f) * inverse)
    low = b.fma(e, float.fromhex("0x1.3509f8p-18"), low)
    y = b.fma(e, float.fromhex("0x1.344p-2"), b.fma(f, inverse, low))
    return _log_special(b, x, y)


def _log1p(b: Body, x: Reg) -> Reg:
    u = 1.0 + x
    i = b.bits("shr", _above_root(b, u), 23)
    s = _power_of_two(b, b.lift(2, "i") - i)
    f = b.fma(s, x * 0.25, b.fma(s, 0.25, -1.0))
    e = b.unary("cvt.rn.f32.s32", i, "f")
    low = b.fma(e, _LN2_LO, _log_rest(b, f))
    y = _log_special(b, u, b.fma(e, _LN2_HI, f + low))
    return b.where(abs(x) < 2.0**-25, x, y)


# -- the rest --


def _op(opcode: str) -> Function:
    def apply(b: Body, a: Reg, t: Reg) -> Reg:
        return b.unary(opcode, a)

    return apply


def _two(opcode: str, swapped: bool = False) -> Function:
    def apply(b: Body, a: Reg, t: Reg) -> Reg:
        return b.emit(opcode, a.kind, *((t, a) if swapped else (a, t)))

    return apply


def _one(function: Callable[[Body, Reg], Reg]) -> Function:
    return lambda b, a, t: function(b, a)


def _flag(b: Body, test: Reg) -> Reg:
    return b.where(test, b.lift(1, "i"), b.lift(0, "i"))


def _compare(how: str) -> Function:
    def apply(b: Body, a: Reg, t: Reg) -> Reg:
        wanted = "neu" if how == "ne" and a.kind == "f" else how
        return _flag(b, b.compare(wanted, a, t))

    return apply


def _tested(test: Callable[[Body, Reg], Reg]) -> Function:
    return lambda b, a, t: _flag(b, test(b, a))


def _sign(b: Body, a: Reg) -> Reg:
    zero, one = b.lift(0, a.kind), b.lift(1, a.kind)
    return b.where(a > zero, one, b.where(a < zero, b.lift(-1, a.kind), zero))


def _to_bfloat(b: Body, a: Reg) -> Reg:
    """Rounded to bfloat16, halves to even."""
    u = b.as_kind(a, "i")
    odd = b.bits("and", b.bits("shr", u, 16), 1)
    rounded = b.bits("and", u + 0x7FFF + odd, -65536)
    return b.where(a.equals(a), b.as_kind(rounded, "f"), a)


def _to_half(b: Body, a: Reg) -> Reg:
    return b.unary("cvt.f32.f16", b.unary("cvt.rn.f16.f32", a, "h"), "f")


def _to_byte(b: Body, a: Reg) -> Reg:
    low = b.unary("cvt.u32.u64", b.unary("cvt.rzi.s64.f32", a, "l"), "i")
    return b.bits("and", low, 255)


# ``sub_exp_small`` is for differences d of at most 0 whose exponentials are stored in 16 bits, or
# summed for what is: it is off by |d| · 2^-24 of the result, which is less than 2^-24; a sum of n,
# by log(n) · 2^-24 of itself.
_COMPARES = {name: _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}

FLOATS: dict[str, Function] = {
    "neg": _one(lambda b, a: -a),
    "abs": _one(lambda b, a: abs(a)),
    "sign": _one(_sign),
    "relu": _one(lambda b, a: b.emit("max.NaN.f32", "f", a, b.lift(0.0, "f"))),
    "reciprocal": _one(lambda b, a: 1.0 / a),
    "sqrt": _op("sqrt.rn.f32"),
    "rsqrt": _op("rsqrt.approx.f32"),
    "exp": _one(_exp),
    "exp2": _one(_exp2),
    "expm1": _one(_expm1),
    "log": _one(_log),
    "log2": _one(_log2),
    "log10": _one(_log10),
    "log1p": _one(_log1p),
    "tanh": _one(_tanh),
    "sigmoid": _one(_sigmoid),
    "erf": _one(_erf),
    "gelu": _one(_gelu),
    "gelu_tanh": _one(_gelu_tanh),
    "silu": _one(_silu),
    "gelu_slope": _one(_gelu_slope),
    "gelu_tanh_slope": _one(_gelu_tanh_slope),
    "silu_slope": _one(_silu_slope),
    "sin": _one(sin),
    "cos": _one(cos),
    "tan": _one(tan),
    "asin": _one(asin),
    "acos": _one(acos),
    "atan": _one(atan),
    "sinh": _one(_sinh),
    "cosh": _one(_cosh),
    "floor": _op("cvt.rmi.f32.f32"),
    "ceil": _op("cvt.rpi.f32.f32"),
    "trunc": _op("cvt.rzi.f32.f32"),
    "round": _op("cvt.rni.f32.f32"),
    "is_finite": _tested(lambda b, a: abs(a) < _INF),
    "is_nan": _tested(lambda b, a: a.differs(a)),
    "is_inf": _tested(lambda b, a: abs(a).equals(_INF)),
    "logical_not": _tested(lambda b, a: a.equals(0.0)),
    "add": _two("add.rn.f32"),
    "sub": _two("sub.rn.f32"),
    "rsub": _two("sub.rn.f32", swapped=True),
    "mul": _two("mul.rn.f32"),
    "div": _two("div.rn.f32"),
    "rdiv": _two("div.rn.f32", swapped=True),
    "minimum": _two("min.NaN.f32"),
    "maximum": _two("max.NaN.f32"),
    "pow": power,
    "rpow": lambda b, a, t: power(b, t, a),
    **OF_FLOATS,
    **_COMPARES,
    "sub_exp": lambda b, a, t: _exp(b, a - t),
    "sub_exp_small": lambda b, a, t: _ex2(b, (a - t) * _LOG2E),
    "sub_square": lambda b, a, t: (a - t) * (a - t),
    **{f"{name}_short": _one(function) for name, function in SHORT.items()},
    # Casts; to the other kind of registers, or to what another dtype can hold.
    "to_half": _one(_to_half),
    "to_bfloat": _one(_to_bfloat),
    "to_int": lambda b, a, t: b.unary("cvt.rzi.s32.f32", a, "i"),
    "to_byte": _one(_to_byte),
    "to_bool": _tested(lambda b, a: a.differs(0.0)),
}
"""By name: of float32."""

INTS: dict[str, Function] = {
    "neg": _one(lambda b, a: -a),
    "abs": _one(lambda b, a: abs(a)),
    "sign": _one(_sign),
    "relu": _one(lambda b, a: b.emit("max.s32", "i", a, b.lift(0, "i"))),
    "logical_not": _tested(lambda b, a: a.equals(0)),
    "bitwise_not": _op("not.b32"),
    "add": _two("add.s32"),
    "sub": _two("sub.s32"),
    "rsub": _two("sub.s32", swapped=True),
    "mul": _two("mul.lo.s32"),
    "minimum": _two("min.s32"),
    "maximum": _two("max.s32"),
    **OF_INTS,
    "shift_left": _two("shl.b32"),
    "shift_right": _two("shr.s32"),
    "bitwise_and": _two("and.b32"),
    "bitwise_or": _two("or.b32"),
    "bitwise_xor": _two("xor.b32"),
    **_COMPARES,
    "to_float": lambda b, a, t: b.unary("cvt.rn.f32.s32", a, "f"),
    "to_bool": _tested(lambda b, a: a.differs(0)),
}
"""By name: of int32."""

_ROUGH: dict[str, Function] = {
    "tanh": _op("tanh.approx.f32"),
    "sigmoid": _one(lambda b, a: b.fma(b.unary("tanh.approx.f32", a * 0.5), 0.5, 0.5)),
    "silu": _one(lambda b, a: a * b.fma(b.unary("tanh.approx.f32", a * 0.5), 0.5, 0.5)),
    "div": _two("div.full.f32"),
    "rdiv": _two("div.full.f32", swapped=True),
    "sqrt": _op("sqrt.approx.f32"),
    "reciprocal": _op("rcp.approx.ftz.f32"),
}
_ROUGH |= {f"{name}_short": _ROUGH[name] for name in ("tanh", "sigmoid", "silu")}


@cache
def elementwise(name: str, kind: str, approximate: bool = False) -> Body:
    """The body of an instruction for registers of a kind.

    Raises:
        KeyError: there is none of this name and kind.
    """
    function = (FLOATS if kind == "f" else INTS)[name]
    if approximate and kind == "f":
        function = _ROUGH.get(name, function)
    body = Body()
    body.result("a", function(body, body.operand("a", kind), body.operand("t", kind)))
    return body


@cache
def is_binary(name: str, kind: str) -> bool:
    """Whether the instruction reads ``{t}``."""
    return any("{t}" in one for line in elementwise(name, kind).lines for one in line[2:])
