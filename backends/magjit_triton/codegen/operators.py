"""Pointwise ATen operators: which scalar operation each is, and in which dtype it computes.

``POINTWISE`` maps the name of an ATen operator to how torch promotes its operands and the
function that makes its instructions.  ``SCALAR`` maps each scalar operation to Triton text.
Dtype rules are torch's own (``torch._prims_common.elementwise_dtypes``): operands are computed
in the computation dtype, half types in float32, and the result is rounded to its own dtype as
an eager kernel does, so that what is recomputed and what is read back agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND

from magjit_triton.codegen.ir import Builder

__all__ = ["POINTWISE", "SCALAR", "Pointwise", "cast", "constant"]

Make = Callable[[Builder, torch.dtype, Sequence[int]], int]

_FUNCTIONS = [
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "erfc",
]
"""Of one float, under the same name in torch and in ``helpers``."""

# ``h`` is the module of helpers; {0}, {1}, … are the operands.
SCALAR: dict[str, str] = {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "true_div": "h.div({0}, {1})",
    "trunc_div": "{0} // {1}",
    "floor_div": "h.floor_div({0}, {1})",
    "remainder": "h.remainder({0}, {1})",
    "float_floor_div": "h.float_floor_div({0}, {1})",
    "float_remainder": "h.float_remainder({0}, {1})",
    "fmod": "h.fmod({0}, {1})",
    "int_fmod": "{0} % {1}",
    "maximum": "h.maximum({0}, {1})",
    "minimum": "h.minimum({0}, {1})",
    "int_maximum": "tl.maximum({0}, {1})",
    "int_minimum": "tl.minimum({0}, {1})",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "~{0}",
    "logical_not": "{0} == 0",
    "shift_left": "{0} << {1}",
    "shift_right": "{0} >> {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "where": "tl.where({0}, {1}, {2})",
    "floor": "h.floor({0})",
    "ceil": "h.ceil({0})",
    "trunc": "h.trunc({0})",
    "round": "h.nearbyint({0})",
    "sqrt": "h.sqrt({0})",
    "rsqrt": "h.rsqrt({0})",
    "sigmoid": "h.sigmoid({0})",
    **{name: f"h.{name}({{0}})" for name in _FUNCTIONS},
    "pow": "h.pow({0}, {1})",
    "atan2": "h.atan2({0}, {1})",
}


@dataclass(frozen=True, slots=True)
class Pointwise:
    """How an ATen operator computes.

    Attributes:
        promotion: torch's kind of type promotion.
        make: from values in the computation dtype to the result, before it is rounded.
        cost: rough number of scalar instructions.
        operands: how many leading arguments are operands.
    """

    promotion: KIND
    make: Make
    cost: int = 1
    operands: int = 1


def constant(builder: Builder, value: bool | int | float, dtype: torch.dtype) -> int:
    """A number as a value."""
    if dtype == torch.bool:
        value = bool(value)
    elif dtype.is_floating_point:
        value = float(value)
    else:
        value = int(value)
    return builder.emit("const", (), value, dtype)


def cast(builder: Builder, value: int, dtype: torch.dtype) -> int:
    """A value in another dtype of computation."""
    if builder.instructions[value].dtype == dtype:
        return value
    return builder.emit("cast", (value,), dtype, dtype)


def _scalar(name: str, result: torch.dtype | None = None) -> Make:
    def make(builder: Builder, dtype: torch.dtype, values: Sequence[int]) -> int:
        return builder.emit(name, values, None, result or dtype)

    return make


def _by_kind(floating: str, integer: str, boolean: str | None = None) -> Make:
    def make(builder: Builder, dtype: torch.dtype, values: Sequence[int]) -> int:
        name = floating if dtype.is_floating_point else integer
        if dtype == torch.bool and boolean is not None:
            name = boolean
        return builder.emit(name, values, None, dtype)

    return make


def _identity_for_integers(name: str) -> Make:
    def make(builder: Builder, dtype: torch.dtype, values: Sequence[int]) -> int:
        return builder.emit(name, values, None, dtype) if dtype.is_floating_point else values[0]

    return make


def _truth(name: str) -> Make:
    """A logical operator: of operands unequal to zero."""

    def make(builder: Builder, dtype: torch.dtype, values: Sequence[int]) -> int:
        flags = []
        for value in values:
            own = builder.instructions[value].dtype
            if own == torch.bool:
                flags.append(value)
            else:
                zero = constant(builder, 0, own)
                flags.append(builder.emit("ne", (value, zero), None, torch.bool))
        return builder.emit(name, flags, None, torch.bool)

    return make


def _relu(builder: Builder, dtype: torch.dtype, values: Sequence[int]) -> int:
    name = "maximum" if dtype.is_floating_point else "int_maximum"
    return builder.emit(name, (values[0], constant(builder, 0, dtype)), None, dtype)


def _sign(builder: Builder, dtype: torch.dtype, values: Sequence[int]) -> int:
    zero = constant(builder, 0, dtype)
    above = cast(builder, builder.emit("gt", (values[0], zero), None, torch.bool), dtype)
    below = cast(builder, builder.emit("lt", (values[0], zero), None, torch.bool), dtype)
    return builder.emit("sub", (above, below), None, dtype)


def _reciprocal(builder: Builder, dtype: torch.dtype, values: Sequence[int]) -> int:
    return builder.emit("true_div", (constant(builder, 1, dtype), values[0]), None, dtype)


def _square(builder: Builder, dtype: torch.dtype, values: Sequence[int]) -> int:
    return builder.emit("mul", (values[0], values[0]), None, dtype)


def _isnan(builder: Builder, dtype: torch.dtype, values: Sequence[int]) -> int:
    return builder.emit("ne", (values[0], values[0]), None, torch.bool)


def _isinf(builder: Builder, dtype: torch.dtype, values: Sequence[int]) -> int:
    if not dtype.is_floating_point:
        return constant(builder, False, torch.bool)
    size = builder.emit("abs", (values[0],), None, dtype)
    infinity = constant(builder, float("inf"), dtype)
    return builder.emit("eq", (size, infinity), None, torch.bool)


def _compare(name: str) -> Pointwise:
    return Pointwise(KIND.ALWAYS_BOOL, _scalar(name, torch.bool), 1, 2)


_FLOAT = KIND.INT_TO_FLOAT
_SAME = KIND.DEFAULT

POINTWISE: dict[str, Pointwise] = {
    **{name: Pointwise(_FLOAT, _scalar(name), 12) for name in (*_FUNCTIONS, "sigmoid")},
    "sqrt": Pointwise(_FLOAT, _scalar("sqrt"), 4),
    "rsqrt": Pointwise(_FLOAT, _scalar("rsqrt"), 2),
    "reciprocal": Pointwise(_FLOAT, _reciprocal, 4),
    "neg": Pointwise(_SAME, _scalar("neg")),
    "abs": Pointwise(_SAME, _by_kind("abs", "abs")),
    "sign": Pointwise(_SAME, _sign, 3),
    "relu": Pointwise(_SAME, _relu),
    "square": Pointwise(_SAME, _square),
    **{
        name: Pointwise(_SAME, _identity_for_integers(name))
        for name in ("floor", "ceil", "trunc", "round")
    },
    "bitwise_not": Pointwise(_SAME, _by_kind("not", "not", "logical_not")),
    "logical_not": Pointwise(KIND.ALWAYS_BOOL, _scalar("logical_not", torch.bool)),
    "isnan": Pointwise(KIND.ALWAYS_BOOL, _isnan),
    "isinf": Pointwise(KIND.ALWAYS_BOOL, _isinf, 2),
    "add": Pointwise(_SAME, _by_kind("add", "add", "or"), 1, 2),
    "sub": Pointwise(_SAME, _scalar("sub"), 1, 2),
    "mul": Pointwise(_SAME, _by_kind("mul", "mul", "and"), 1, 2),
    "div": Pointwise(_FLOAT, _scalar("true_div"), 4, 2),
    "div.floor": Pointwise(_SAME, _by_kind("float_floor_div", "floor_div"), 8, 2),
    "floor_divide": Pointwise(_SAME, _by_kind("float_floor_div", "floor_div"), 8, 2),
    "remainder": Pointwise(_SAME, _by_kind("float_remainder", "remainder"), 8, 2),
    "fmod": Pointwise(_SAME, _by_kind("fmod", "int_fmod"), 8, 2),
    "atan2": Pointwise(_FLOAT, _scalar("atan2"), 16, 2),
    "maximum": Pointwise(_SAME, _by_kind("maximum", "int_maximum", "or"), 2, 2),
    "minimum": Pointwise(_SAME, _by_kind("minimum", "int_minimum", "and"), 2, 2),
    "bitwise_and": Pointwise(_SAME, _scalar("and"), 1, 2),
    "bitwise_or": Pointwise(_SAME, _scalar("or"), 1, 2),
    "bitwise_xor": Pointwise(_SAME, _scalar("xor"), 1, 2),
    "bitwise_left_shift": Pointwise(_SAME, _scalar("shift_left"), 1, 2),
    "bitwise_right_shift": Pointwise(_SAME, _scalar("shift_right"), 1, 2),
    "logical_and": Pointwise(KIND.ALWAYS_BOOL, _truth("and"), 2, 2),
    "logical_or": Pointwise(KIND.ALWAYS_BOOL, _truth("or"), 2, 2),
    "logical_xor": Pointwise(KIND.ALWAYS_BOOL, _truth("xor"), 2, 2),
    **{name: _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
