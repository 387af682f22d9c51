"""Device functions that generated kernels call as ``h.NAME``: torch's rules, where Triton's differ.

Importable only where triton is installed.  Under ``TRITON_INTERPRET=1`` the functions of
libdevice, which the interpreter does not have, are numpy's, and bfloat16 is rounded to nearest
(the interpreter truncates).
"""

# What Triton does not compile has to stand in an ``else``; its functions have their own types.
# ruff: noqa: RET505
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import os

import numpy
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

__all__ = ["INTERPRETED"]

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on")


def _numpy_function(function, operands=1):
    from triton.runtime.interpreter import TensorHandle

    def call(*given):
        values = [
            one if isinstance(one, tl.core.tensor) else tl.full((), one, tl.float32)
            for one in given
        ]
        with numpy.errstate(all="ignore"):
            data = function(*(one.handle.data for one in values[:operands]))
        first = values[0]
        dtype = first.dtype.scalar
        data = numpy.asarray(data, dtype=first.handle.data.dtype)
        shape = list(data.shape)
        kind = tl.block_type(dtype, shape) if shape else dtype
        return tl.core.tensor(TensorHandle(data, dtype), kind)

    return call


def _erf(x):
    import torch

    return torch.erf(torch.from_numpy(numpy.ascontiguousarray(x))).numpy().reshape(x.shape)


def _erfc(x):
    import torch

    return torch.erfc(torch.from_numpy(numpy.ascontiguousarray(x))).numpy().reshape(x.shape)


if INTERPRETED:
    exp = _numpy_function(numpy.exp)
    exp2 = _numpy_function(numpy.exp2)
    expm1 = _numpy_function(numpy.expm1)
    log = _numpy_function(numpy.log)
    log2 = _numpy_function(numpy.log2)
    log10 = _numpy_function(numpy.log10)
    log1p = _numpy_function(numpy.log1p)
    sin = _numpy_function(numpy.sin)
    cos = _numpy_function(numpy.cos)
    tan = _numpy_function(numpy.tan)
    asin = _numpy_function(numpy.arcsin)
    acos = _numpy_function(numpy.arccos)
    atan = _numpy_function(numpy.arctan)
    sinh = _numpy_function(numpy.sinh)
    cosh = _numpy_function(numpy.cosh)
    tanh = _numpy_function(numpy.tanh)
    asinh = _numpy_function(numpy.arcsinh)
    acosh = _numpy_function(numpy.arccosh)
    atanh = _numpy_function(numpy.arctanh)
    erf = _numpy_function(_erf)
    erfc = _numpy_function(_erfc)
    sqrt = _numpy_function(numpy.sqrt)
    rsqrt = _numpy_function(lambda x: 1 / numpy.sqrt(x))
    floor = _numpy_function(numpy.floor)
    ceil = _numpy_function(numpy.ceil)
    trunc = _numpy_function(numpy.trunc)
    nearbyint = _numpy_function(numpy.rint)
    pow = _numpy_function(numpy.power, 2)
    atan2 = _numpy_function(numpy.arctan2, 2)
    fmod = _numpy_function(numpy.fmod, 2)
    _divide = _numpy_function(numpy.divide, 2)

    def _nearest(x):
        bits = numpy.ascontiguousarray(x, dtype=numpy.float32).view(numpy.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & numpy.uint32(0xFFFF0000)
        bits = numpy.where(numpy.isnan(x), bits, rounded).astype(numpy.uint32)
        return bits.view(numpy.float32).reshape(numpy.shape(x))

    round_bfloat16 = _numpy_function(_nearest)
else:
    exp = libdevice.exp
    exp2 = libdevice.exp2
    expm1 = libdevice.expm1
    log = libdevice.log
    log2 = libdevice.log2
    log10 = libdevice.log10
    log1p = libdevice.log1p
    sin = libdevice.sin
    cos = libdevice.cos
    tan = libdevice.tan
    asin = libdevice.asin
    acos = libdevice.acos
    atan = libdevice.atan
    sinh = libdevice.sinh
    cosh = libdevice.cosh
    tanh = libdevice.tanh
    asinh = libdevice.asinh
    acosh = libdevice.acosh
    atanh = libdevice.atanh
    erf = libdevice.erf
    erfc = libdevice.erfc
    rsqrt = libdevice.rsqrt
    floor = libdevice.floor
    ceil = libdevice.ceil
    trunc = libdevice.trunc
    nearbyint = libdevice.nearbyint
    pow = libdevice.pow
    atan2 = libdevice.atan2
    fmod = libdevice.fmod

    @triton.jit
    def round_bfloat16(x):
        """To bfloat16 and back."""
        return x.to(tl.bfloat16).to(tl.float32)

    @triton.jit
    def sqrt(x):
        if x.dtype.is_fp64():
            return libdevice.sqrt(x)
        else:
            return tl.sqrt_rn(x)

    @triton.jit
    def _divide(a, b):
        if a.dtype.is_fp64():
            return a / b
        else:
            return tl.div_rn(a, b)


if INTERPRETED:

    def dot(a, b, dtype, precision):
        return tl.dot(a, b, input_precision="ieee")

    def accumulate(a, b, sums, dtype, precision):
        # The interpreter's products of bfloat16 are wrong.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
else:

    @triton.jit
    def dot(a, b, dtype: tl.constexpr, precision: tl.constexpr):
        """Product of two tiles that are held as float32."""
        if dtype == tl.float32:
            return tl.dot(a, b, input_precision=precision)
        else:
            return tl.dot(a.to(dtype), b.to(dtype))

    @triton.jit
    def accumulate(a, b, sums, dtype: tl.constexpr, precision: tl.constexpr):
        """Sums and the product of two tiles, in float32."""
        if dtype == tl.float32:
            return tl.dot(a, b, sums, input_precision=precision)
        else:
            return tl.dot(a.to(dtype), b.to(dtype), sums)


@triton.jit
def halves(x):
    """The left and the right half of a tile's columns."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (rows, 2, columns // 2)), (0, 2, 1)))


@triton.jit
def exchanged(x, distance: tl.constexpr):
    """Column ``c`` with what column ``c ^ distance`` has; ``distance`` is a power of two."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    pairs = tl.reshape(x, (rows, columns // (2 * distance), 2, distance))
    first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(second, first), (0, 1, 3, 2)), (rows, columns))


@triton.jit
def div(a, b):
    """IEEE division."""
    return _divide(a, b)


@triton.jit
def sigmoid(x):
    return _divide(1.0 + x * 0, 1.0 + exp(-x))


@triton.jit
def floor_div(a, b):
    """Integer division towards minus infinity."""
    quotient = a // b
    rest = a - quotient * b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def remainder(a, b):
    """Integer remainder with the divisor's sign."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def float_remainder(a, b):
    """Floating-point remainder with the divisor's sign."""
    rest = fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def float_floor_div(a, b):
    """Floating-point division rounded down, as torch's ``div_floor_floating``."""
    rest = fmod(a, b)
    quotient = _divide(a - rest, b)
    quotient = tl.where((rest != 0) & ((b < 0) != (rest < 0)), quotient - 1, quotient)
    lower = floor(quotient)
    lower = tl.where(quotient - lower > 0.5, lower + 1, lower)
    zero = _divide(a, b) * 0
    result = tl.where(quotient != 0, lower, zero)
    return tl.where(b == 0, _divide(a, b), result)


@triton.jit
def maximum(a, b):
    """The greater one, NaN where one is NaN."""
    return tl.where((a != a) | (a > b), a, b)


@triton.jit
def minimum(a, b):
    """The smaller one, NaN where one is NaN."""
    return tl.where((a != a) | (a < b), a, b)


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def both(a, b):
    return a & b


@triton.jit
def first_greatest(value, index, other, other_index):
    """Of two places the one with the greater value; NaN is greatest; of equals the first."""
    nan = value != value
    other_nan = other != other
    better = (nan & (other_nan == 0)) | (value > other)
    equal = (nan & other_nan) | (value == other)
    keep = better | (equal & (index < other_index))
    return tl.where(keep, value, other), tl.where(keep, index, other_index)


@triton.jit
def first_smallest(value, index, other, other_index):
    """Of two places the one with the smaller value; NaN is smallest; of equals the first."""
    nan = value != value
    other_nan = other != other
    better = (nan & (other_nan == 0)) | (value < other)
    equal = (nan & other_nan) | (value == other)
    keep = better | (equal & (index < other_index))
    return tl.where(keep, value, other), tl.where(keep, index, other_index)


@triton.jit
def reduce_maximum(x):
    return tl.reduce(x, 1, maximum)[:, None]


@triton.jit
def reduce_minimum(x):
    return tl.reduce(x, 1, minimum)[:, None]


@triton.jit
def reduce_sum(x):
    return tl.sum(x, 1)[:, None]


@triton.jit
def reduce_product(x):
    return tl.reduce(x, 1, product)[:, None]


@triton.jit
def reduce_any(x):
    return tl.reduce(x.to(tl.int32), 1, either)[:, None] != 0


@triton.jit
def reduce_all(x):
    return tl.reduce(x.to(tl.int32), 1, both)[:, None] != 0


@triton.jit
def reduce_argmax(x, index):
    _, place = tl.reduce((x, index), 1, first_greatest)
    return place[:, None]


@triton.jit
def reduce_argmin(x, index):
    _, place = tl.reduce((x, index), 1, first_smallest)
    return place[:, None]
