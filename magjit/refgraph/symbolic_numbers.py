"""Python's arithmetic of numbers, done with sizes that are symbols."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch.utils._sympy.functions import (
    CeilToInt,
    FloatTrueDiv,
    FloorToInt,
    IntTrueDiv,
    RoundToInt,
    ToFloat,
    TruncToInt,
)

from magjit.refgraph.number_values import SYMBOLIC

__all__ = ["SYMBOLS", "is_exact", "on_symbols"]

SYMBOLS = (torch.SymInt, torch.SymFloat)


def is_exact(value: Any) -> bool:
    """Whether the arithmetic of symbols is Python's: that of ints alone."""
    if not isinstance(value, SYMBOLS):
        return type(value) is int
    return isinstance(value, torch.SymInt) and not value.node.expr.has(*_INEXACT)


_INEXACT = (ToFloat, IntTrueDiv, FloatTrueDiv, FloorToInt, CeilToInt, TruncToInt, RoundToInt)


def on_symbols(func: Callable[..., Any], syms: list[Any]) -> Any:
    """The result of a function of sizes; None where it may be another than Python's."""
    if func in (max, min):
        return reduce(SYMBOLIC[func], syms)
    if func in (int, math.floor, math.ceil) and isinstance(syms[0], torch.SymFloat):
        expr = syms[0].node.expr
        ratio = expr.func is IntTrueDiv and all(part.is_integer for part in expr.args)
        # The environment takes the integer part of a ratio for its floor.
        if not ratio or not bool(syms[0] >= 0):
            return None
    return SYMBOLIC.get(func, func)(*syms)
