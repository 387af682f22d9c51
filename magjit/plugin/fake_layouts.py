"""What a fake tensor is like, as expressions that can be compared."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = [
    "Layout",
    "Undescribed",
    "described",
    "expression",
    "has_symbols",
    "is_plain",
    "layout_of",
]

_ATOMS: frozenset[type] = frozenset(
    {int, float, bool, complex, str, torch.dtype, torch.device, torch.layout}
    | {torch.memory_format, type(None), type(...)}
)


class Layout(NamedTuple):
    """What a new tensor is like."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


class Undescribed(Exception):
    """An operand of which more than the layout may count."""


def is_plain(value: Any) -> bool:
    """Whether it is a fake tensor that is its elements and nothing more."""
    if type(value) is not FakeTensor or value.layout is not torch.strided:
        return False
    more = value.requires_grad or value.is_conj() or value.is_neg()
    return not more and value.constant is None  # or else torch knows its numbers


def layout_of(value: Any, *, symbols: bool = False) -> Layout | None:
    """How to make a result again; None where it cannot be, or where its sizes are symbols.

    Args:
        value: of an operator, or of several.
        symbols: whether its sizes may be symbols.
    """
    if not is_plain(value):
        return None
    size, stride = tuple(value.size()), tuple(value.stride())
    fixed = all(type(one) is int for one in (*size, *stride))
    if not ((fixed or symbols) and expression(value.storage_offset()) == 0):
        return None
    # Of what has holes, or repeats elements, the memory is more or less than the sizes say.
    needed = (
        _needed(tuple(map(expression, size)), tuple(map(expression, stride))) * value.dtype.itemsize
    )
    beyond = expression(value.untyped_storage().nbytes()) - needed
    if (beyond if fixed else sympy.expand(beyond)) != 0:
        return None
    return Layout(size, stride, value.dtype, value.device)


def _needed(size: tuple[Any, ...], stride: tuple[Any, ...]) -> Any:
    """Elements of memory from the first to the last one."""
    if 0 in size:
        return 0
    return 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))


def described(value: Any) -> Hashable:
    """An operand as what counts of it, with expressions for symbols.

    Raises:
        Undescribed: more of it may count.
    """
    kind = type(value)
    if kind is FakeTensor and value.layout is torch.strided:
        flags = (value.requires_grad, value.is_conj(), value.is_neg(), value.constant is None)
        sizes = tuple([tuple(map(expression, one)) for one in (value.size(), value.stride())])
        return (sizes, expression(value.storage_offset()), value.dtype, value.device, flags)
    if isinstance(value, (tuple, list)):
        return (kind, *map(described, value))
    if kind is slice:
        return (kind, *map(described, (value.start, value.stop, value.step)))
    if kind in (torch.SymInt, torch.SymFloat):
        return (kind, value.node.expr)
    if kind in _ATOMS:
        # A number's sign and type count: 0.0 is -0.0 and 1 is True to a dict.
        return (kind, repr(value) if kind in (float, complex) else value)
    raise Undescribed


def expression(size: Any) -> Any:
    """An int, or what a SymInt stands for."""
    return size if type(size) is int else size.node.expr


def has_symbols(operands: Hashable) -> bool:
    """Whether anything of operands that are `described` is an expression."""
    if isinstance(operands, tuple):
        return any(map(has_symbols, operands))
    return isinstance(operands, sympy.Basic)
