"""Results of operators on fake tensors of symbolic sizes, where no size is in question.

Torch compares the sizes of all operands with one another and with 1, and simplifies expressions for
that: some milliseconds an operator. Where operands lie contiguous in memory, and

- one of them has the shape of all together, of which the others have the same expressions or 1, an
  operator of elements has that shape, and dtype and device as of operands of one element,
- the product of all sizes is the same expression, a view has the sizes that are asked for,

there is nothing to find out and no guard to ask for.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from math import prod
from typing import Any

import sympy
import torch
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

from magjit.plugin.fake_layouts import described, expression, has_symbols, is_plain

__all__ = ["symbolic_result", "symbolic_view"]

aten = torch.ops.aten

_PLAIN = (int, float, bool, complex, str, type(None), torch.dtype)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_MOST = 4096

_kinds: dict[Hashable, tuple[torch.dtype, torch.device] | None] = {}
"""Dtype and device of results, of the last passes over any programs."""


def symbolic_result(
    fake_mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FakeTensor | None:
    """The result; None where torch has to be asked.

    Args:
        fake_mode: of all tensors.
        func: an operator of ATen that changes nothing and does not depend on data.
    """
    if func is aten._unsafe_view.default:
        return symbolic_view(fake_mode, func, args)
    if torch.Tag.pointwise not in func.tags:
        return None
    tensors = _tensors(args, kwargs)
    given = (*args, *kwargs.values())
    if not tensors or not all(type(one) in (FakeTensor, *_PLAIN) for one in given):
        return None
    if not all(map(is_plain, tensors)):
        return None
    shapes = [_expressions(one.size()) for one in tensors]
    whole = _broadcast(shapes)
    if whole not in shapes or not all(map(_is_contiguous, tensors, shapes)):
        return None
    kind = _kind(fake_mode, func, args, kwargs)
    if kind is None:
        return None
    with in_kernel_invocation_manager(fake_mode):
        size = tensors[shapes.index(whole)].size()
        found = torch.empty(size, dtype=kind[0], device="meta")
    return FakeTensor(fake_mode, found, kind[1])


def symbolic_view(fake_mode: FakeTensorMode, func: Any, args: tuple[Any, ...]) -> FakeTensor | None:
    """The same of ``view``, whose result shares memory, and ``_unsafe_view``, where it is new."""
    if func not in _VIEWS:
        return None
    base, sizes = args
    before, after = _expressions(base.size()), _expressions(sizes)
    if not has_symbols((before, after)) or -1 in after or 0 in after:
        return None
    if not is_plain(base) or sympy.expand(prod(before) - prod(after)) != 0:
        return None
    if not _is_contiguous(base, before):
        return None
    with in_kernel_invocation_manager(fake_mode):
        if func is aten.view.default:
            strides = [prod(sizes[at + 1 :]) for at in range(len(sizes))]
            found = aten.as_strided.default(base, sizes, strides, base.storage_offset())
        else:
            found = torch.empty(sizes, dtype=base.dtype, device="meta")
    return FakeTensor(fake_mode, found, base.device)


def _kind(
    fake_mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.dtype, torch.device] | None:
    """Dtype and device of the result of operands of one element."""
    named = tuple((name, _described(one)) for name, one in kwargs.items())
    key = (func, tuple(map(_described, args)), named, torch.get_default_dtype())
    if key not in _kinds:
        if len(_kinds) >= _MOST:
            _kinds.clear()
        few = [_of_one(fake_mode, one) for one in args]
        few_named = {name: _of_one(fake_mode, one) for name, one in kwargs.items()}
        with no_python_dispatcher():
            found = func(*few, **few_named)
        fits = isinstance(found, FakeTensor) and found.layout is torch.strided
        fits = fits and found.dim() == max(one.dim() for one in _tensors(args, kwargs))
        _kinds[key] = (found.dtype, found.device) if fits else None
    return _kinds[key]


def _of_one(fake_mode: FakeTensorMode, operand: Any) -> Any:
    if not isinstance(operand, torch.Tensor):
        return operand
    with in_kernel_invocation_manager(fake_mode):
        found = torch.empty((1,) * operand.dim(), dtype=operand.dtype, device="meta")
    return FakeTensor(fake_mode, found, operand.device)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]


def _expressions(sizes: Iterable[Any]) -> tuple[Any, ...]:
    return tuple([expression(one) for one in sizes])


def _broadcast(shapes: list[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """The shape of all together; None where sizes would have to be compared, or are 0."""
    rank = max(map(len, shapes))
    found: list[Any] = [1] * rank
    for shape in shapes:
        for at, size in enumerate(shape, rank - len(shape)):
            if size == found[at] or size == 1:
                continue
            if found[at] != 1 or size == 0:
                return None
            found[at] = size
    return tuple(found)


def _is_contiguous(tensor: torch.Tensor, sizes: tuple[Any, ...]) -> bool:
    """Whether that follows from the expressions as they are."""
    step: Any = 1
    for size, stride in zip(reversed(sizes), reversed(tensor.stride()), strict=True):
        if size == 1:
            continue
        found = expression(stride)
        if found != step and sympy.expand(found - step) != 0:
            return False
        step = step * size
    return True


def _described(operand: Any) -> Hashable:
    """An operand as far as dtype and device of a result depend on it."""
    if isinstance(operand, torch.Tensor):
        return (operand.dtype, operand.device, operand.dim())
    return described(operand)
