"""Which instructions ATen's elementwise operators are."""

from __future__ import annotations

import torch._prims_common

__all__ = ["BINARY", "COMPARE", "SHIFTS", "UNARY", "Promotion"]

Promotion = torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND

DEFAULT = Promotion.DEFAULT
TO_FLOAT = Promotion.INT_TO_FLOAT

UNARY: dict[str, Promotion] = {
    "abs": DEFAULT,
    "acos": TO_FLOAT,
    "asin": TO_FLOAT,
    "atan": TO_FLOAT,
    "bitwise_not": DEFAULT,
    "ceil": DEFAULT,
    "cos": TO_FLOAT,
    "cosh": TO_FLOAT,
    "erf": TO_FLOAT,
    "exp": TO_FLOAT,
    "exp2": TO_FLOAT,
    "expm1": TO_FLOAT,
    "floor": DEFAULT,
    "log": TO_FLOAT,
    "log10": TO_FLOAT,
    "log1p": TO_FLOAT,
    "log2": TO_FLOAT,
    "neg": DEFAULT,
    "reciprocal": TO_FLOAT,
    "relu": DEFAULT,
    "round": DEFAULT,
    "rsqrt": TO_FLOAT,
    "sigmoid": TO_FLOAT,
    "sign": DEFAULT,
    "silu": DEFAULT,
    "sin": TO_FLOAT,
    "sinh": TO_FLOAT,
    "sqrt": TO_FLOAT,
    "tan": TO_FLOAT,
    "tanh": TO_FLOAT,
    "trunc": DEFAULT,
}
"""``aten.NAME.default(x)``: instructions of the same name; of ints, rounding ones copy."""

BINARY = (
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "fmod",
    "maximum",
    "minimum",
    "mul",
    "pow",
    "remainder",
)
"""``aten.NAME.{Tensor,Scalar,…}(a, b)`` without further arguments: instructions likewise."""

SHIFTS = {
    "__lshift__": "shift_left",
    "__rshift__": "shift_right",
    "bitwise_left_shift": "shift_left",
    "bitwise_right_shift": "shift_right",
}
"""``aten.NAME.{Tensor,Scalar,…}(a, b)`` of ints, and their instructions."""

COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
