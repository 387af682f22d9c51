"""Functions for results that are rounded to 16 bits: in float32, as short as that allows.

Each is off by less than 2^-17 of its result, a 32nd of what rounding to float16 may be (the GPU's
2^x, log2 and 1 / x are good to 2^-22), for any float32 that ``LARGEST`` does not except; ``gelu``
by less than 2^-31 more.  Sigmoids below the smallest normal number are 0.  A test asks each of all
65,536 numbers of either dtype.  The names are those of the functions in ``FLOATS``
and ``_short``; ``may_be_short`` of ``support.py`` says where they are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from magjit_dvm.cuda.ptx import Body, Reg

__all__ = ["LARGEST", "SHORT"]

_LOG2E = math.log2(math.e)
_LN2 = math.log(2.0)


def _coefficients(text: str) -> tuple[float, ...]:
    return tuple(float.fromhex(one) for one in text.split())


_OF_TANH = _coefficients("-0x1.553e5ep-2 0x1.07b588p-3")
_OF_LOG = _coefficients("-0x1.ffffe4p-2 0x1.55ff68p-2 -0x1.00b5e6p-2")
_OF_SIN = _coefficients("-0x1.55510ep-3 0x1.1070dep-7 -0x1.84d4e2p-13")
_OF_TAIL = _coefficients(
    "-0x1.ffff82p-1 -0x1.26b6d4p+0 -0x1.d59034p-2 -0x1.b8f644p-5 0x1.13feb6p-7 -0x1.d981dcp-11 "
    "0x1.e14262p-15 -0x1.a9f812p-20"
)
"""log2 of the normal distribution's tail, from 0 to 6.3; further out it falls below 2^-32."""
_PI_HIGH = float(np.uint32(0x40490FDA).view(np.float32))  # of less than 24 bits and below pi
_PI_LOW = math.pi - _PI_HIGH
_MAGIC = 1.5 * 2.0**23


def _ex2(b: Body, x: Reg) -> Reg:
    return b.unary("ex2.approx.ftz.f32", x)


def _inverse(b: Body, x: Reg) -> Reg:
    return b.unary("rcp.approx.ftz.f32", x)


def _exp(b: Body, x: Reg) -> Reg:
    return b.unary("ex2.approx.f32", x * _LOG2E)


def _sigmoid(b: Body, x: Reg) -> Reg:
    return _inverse(b, _ex2(b, x * -_LOG2E) + 1.0)


def _silu(b: Body, x: Reg) -> Reg:
    return x * _sigmoid(b, x)


def _near(b: Body, x: Reg, z: Reg, coefficients: tuple[float, ...]) -> Reg:
    """X · (1 + z · p(z)), which keeps the sign of 0."""
    return x * b.fma(z, b.poly(z, coefficients), 1.0)


def _tanh(b: Body, x: Reg) -> Reg:
    far = b.fma(_inverse(b, _ex2(b, x * (2 * _LOG2E)) + 1.0), -2.0, 1.0)
    return b.where(abs(x) < 0.25, _near(b, x, x * x, _OF_TANH), far)


def _gelu(b: Body, x: Reg) -> Reg:
    """The larger of x and 0, less |x| times the tail beyond |x|."""
    a = abs(b.emit("min.f32", "f", x, b.lift(100.0, "f")))
    tail = _ex2(b, b.poly(a, _OF_TAIL))
    positive = b.emit("max.NaN.f32", "f", x, b.lift(-0.0, "f"))
    return b.fma(-a, tail, positive)


def _gelu_tanh(b: Body, x: Reg) -> Reg:
    """X times the sigmoid of twice what tanh is of."""
    twice = 2 * _LOG2E * math.sqrt(2 / math.pi)
    v = x * b.fma(x * x, -0.044715 * twice, -twice)
    return x * _inverse(b, _ex2(b, v) + 1.0)


def _log_of(b: Body, whole: Reg, less: Reg) -> Reg:
    """The logarithm of ``whole``, which is 1 + ``less``."""
    far = b.unary("lg2.approx.f32", whole) * _LN2
    return b.where(abs(less) < 0.0625, _near(b, less, less, _OF_LOG), far)


def _log(b: Body, x: Reg) -> Reg:
    return _log_of(b, x, x + (-1.0))


def _log1p(b: Body, x: Reg) -> Reg:
    return _log_of(b, x + 1.0, x)


def _angle(b: Body, x: Reg, t: Reg, n: Reg) -> Reg:
    """The sine of x − n · π, its sign turned where t is odd.

    x and n · π are multiples of 2^-22 wherever n is not 0, so that their difference is exact.
    """
    r = b.fma(n, -_PI_LOW, b.fma(n, -_PI_HIGH, x))
    y = _near(b, r, r * r, _OF_SIN)
    return b.bits("xor", b.as_kind(y, "i"), b.bits("shl", b.as_kind(t, "i"), 31), "f")


def _sin(b: Body, x: Reg) -> Reg:
    t = b.fma(x, 1 / math.pi, _MAGIC)
    return _angle(b, x, t, t + (-_MAGIC))


def _cos(b: Body, x: Reg) -> Reg:
    """The nearest odd multiple of π/2 is taken away."""
    t = b.fma(x, 1 / math.pi, -0.5) + (_MAGIC + 1.0)
    return _angle(b, x, t, t + (-_MAGIC - 1.0) + 0.5)


SHORT: dict[str, Callable[[Body, Reg], Reg]] = {
    "exp": _exp,
    "log": _log,
    "log1p": _log1p,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
    "sin": _sin,
    "cos": _cos,
}
"""By the name of the function that they take the place of."""
LARGEST = {"sin_short": 65536.0, "cos_short": 65536.0}
"""Absolute values from which on a tile goes to the function itself."""
