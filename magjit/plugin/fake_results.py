"""Results of ATen operators on fake tensors, remembered: a network's layers ask the same again.

    FakeResults  ::= key -> layout*
    key          ::= operator, and each operand as its layout or as itself
    layout       ::= sizes, strides, offset, dtype, device, flags

What a fake tensor costs is the way through torch's dispatcher, not the tensor. An operator that
makes new tensors, of which nothing depends on data, makes equal ones of equal operands; the guards
that it asks for are there since the first time. They are made anew at each call, so that no two
results are one object or share memory.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any, NamedTuple

import sympy
import torch
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

__all__ = ["FakeResults", "Layout", "Undescribed", "described", "has_symbols", "layout_of"]

_BY_DATA = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
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


class FakeResults:
    """For one pass over a program, in which no operand's metadata is changed in place.

    Args:
        fake_mode: of all tensors; their sizes may be its symbols.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._fake_mode = fake_mode
        self._found: dict[Hashable, tuple[bool, list[Layout]]] = {}
        self._lasting: dict[Any, bool] = {}
        self._stopped = False

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``func(*args, **kwargs)``, for an operator of ATen."""
        if not self._may_be_remembered(func):
            return func(*args, **kwargs)
        try:
            named = [(name, described(kwargs[name])) for name in kwargs]
            key = (func, tuple(map(described, args)), tuple(named))
            found = self._found.get(key)
        except (Undescribed, TypeError):  # a TypeError: no hash
            return func(*args, **kwargs)
        if found is not None:
            several, layouts = found
            again = [self.made(layout) for layout in layouts]
            return tuple(again) if several else again[0]
        # What the decompositions in Python are for, sizes that are symbols, none of these has.
        with nullcontext() if has_symbols(key) else no_python_dispatcher():
            result = func(*args, **kwargs)
        several = isinstance(result, tuple)
        made = [layout_of(one) for one in (result if several else (result,))]
        layouts = [one for one in made if one is not None]
        if len(layouts) == len(made):
            self._found[key] = several, layouts
        return result

    def _may_be_remembered(self, func: Any) -> bool:
        """Whether the results of an operator are new tensors that follow from layouts."""
        if self._stopped:
            return False
        lasting = self._lasting.get(func)
        if lasting is None:
            schema = func._schema
            if schema.is_mutable:
                self._stopped = True  # perhaps metadata, and other things with it
                return False
            lasting = self._lasting[func] = (
                func.namespace == "aten"
                and _BY_DATA.isdisjoint(func.tags)
                and all(one.alias_info is None for one in schema.returns)
            )
        return lasting

    def made(self, layout: Layout) -> FakeTensor:
        """A new tensor, which is no operator's result: nothing is recorded of it."""
        with in_kernel_invocation_manager(self._fake_mode):
            empty = torch.empty_strided(
                layout.size, layout.stride, dtype=layout.dtype, device="meta"
            )
        return FakeTensor(self._fake_mode, empty, layout.device)


def layout_of(value: Any, *, symbols: bool = False) -> Layout | None:
    """How to make a result again; None where it cannot be, or where its sizes are symbols.

    Args:
        value: of an operator, or of several.
        symbols: whether its sizes may be symbols.
    """
    if type(value) is not FakeTensor or value.layout is not torch.strided:
        return None
    size, stride = tuple(value.size()), tuple(value.stride())
    fixed = all(type(one) is int for one in (*size, *stride))
    plain = not (value.requires_grad or value.is_conj() or value.is_neg())
    plain = plain and value.constant is None  # whose numbers torch knows
    if not ((fixed or symbols) and plain and _size(value.storage_offset()) == 0):
        return None
    # Of what has holes, or repeats elements, the memory is more or less than the sizes say.
    needed = _needed(tuple(map(_size, size)), tuple(map(_size, stride))) * value.dtype.itemsize
    beyond = _size(value.untyped_storage().nbytes()) - needed
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
        sizes = tuple([tuple(map(_size, one)) for one in (value.size(), value.stride())])
        return (sizes, _size(value.storage_offset()), value.dtype, value.device, flags)
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


def _size(size: Any) -> Any:
    return size if type(size) is int else size.node.expr


def has_symbols(operands: Hashable) -> bool:
    """Whether anything of operands that are `described` is an expression."""
    if isinstance(operands, tuple):
        return any(map(has_symbols, operands))
    return isinstance(operands, sympy.Basic)
