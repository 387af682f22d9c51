"""Which instructions ATen's elementwise operators are: one row each."""

from __future__ import annotations

import torch._prims_common

__all__ = ["BINARY", "COMPARE", "UNARY", "Promotion"]

Promotion = torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND

DEFAULT = Promotion.DEFAULT
TO_FLOAT = Promotion.INT_TO_FLOAT
TO_BOOL = Promotion.ALWAYS_BOOL

UNARY: dict[str, tuple[str, Promotion]] = {
    "abs": ("abs", DEFAULT),
    "acos": ("acos", TO_FLOAT),
    "asin": ("asin", TO_FLOAT),
    "atan": ("atan", TO_FLOAT),
    "bitwise_not": ("bitwise_not", DEFAULT),
    "ceil": ("ceil", DEFAULT),
    "cos": ("cos", TO_FLOAT),
    "cosh": ("cosh", TO_FLOAT),
    "erf": ("erf", TO_FLOAT),
    "exp": ("exp", TO_FLOAT),
    "exp2": ("exp2", TO_FLOAT),
    "expm1": ("expm1", TO_FLOAT),
    "floor": ("floor", DEFAULT),
    "log": ("log", TO_FLOAT),
    "log10": ("log10", TO_FLOAT),
    "log1p": ("log1p", TO_FLOAT),
    "log2": ("log2", TO_FLOAT),
    "neg": ("neg", DEFAULT),
    "reciprocal": ("reciprocal", TO_FLOAT),
    "relu": ("relu", DEFAULT),
    "round": ("round", DEFAULT),
    "rsqrt": ("rsqrt", TO_FLOAT),
    "sigmoid": ("sigmoid", TO_FLOAT),
    "sign": ("sign", DEFAULT),
    "silu": ("silu", DEFAULT),
    "sin": ("sin", TO_FLOAT),
    "sinh": ("sinh", TO_FLOAT),
    "sqrt": ("sqrt", TO_FLOAT),
    "tan": ("tan", TO_FLOAT),
    "tanh": ("tanh", TO_FLOAT),
    "trunc": ("trunc", DEFAULT),
}
"""``aten.NAME.default(x)``; of ints, the rounding ones are copies."""

BINARY: dict[str, tuple[str, Promotion]] = {
    "bitwise_and": ("bitwise_and", DEFAULT),
    "bitwise_or": ("bitwise_or", DEFAULT),
    "bitwise_xor": ("bitwise_xor", DEFAULT),
    "fmod": ("fmod", DEFAULT),
    "maximum": ("maximum", DEFAULT),
    "minimum": ("minimum", DEFAULT),
    "mul": ("mul", DEFAULT),
    "pow": ("pow", DEFAULT),
    "remainder": ("remainder", DEFAULT),
}
"""``aten.NAME.{Tensor,Scalar,…}(a, b)`` without further arguments."""

COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
