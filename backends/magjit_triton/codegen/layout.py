"""How a tensor lies in memory.

    Layout ::= buffer, dtype, mapping     index → offset in elements from the buffer's start

A buffer is a name: a graph input, or memory that the program allocates.  Most layouts are strides;
an output of one kernel may also lie inside another tensor (VTC §4.1, output virtual tensors).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import Max

from magjit.plugin.virtual_tensors.indexing import size_expr

__all__ = ["Layout", "dense_strides", "has_gaps", "reach_of", "sizes_of", "strides_for"]


def sizes_of(value: torch.Tensor) -> tuple[sympy.Expr, ...]:
    """The shape as expressions."""
    return tuple(size_expr(size) for size in value.shape)


def strides_of(value: torch.Tensor) -> tuple[sympy.Expr, ...]:
    """The strides as expressions.

    Fake strides count sizes as at least 1; without that, only those of empty tensors change.
    """
    sizes = {size for size in sizes_of(value) if not size.is_Integer}
    found = []
    for stride in map(size_expr, value.stride()):
        swaps = {}
        for largest in stride.atoms(Max):
            rest = set(largest.args) - {sympy.S.One}
            if len(rest) == 1 and len(largest.args) == 2 and rest <= sizes:
                swaps[largest] = rest.pop()
        found.append(stride.xreplace(swaps) if swaps else stride)
    return tuple(found)


def dense_strides(sizes: Sequence[sympy.Expr]) -> tuple[sympy.Expr, ...]:
    """Row-major strides."""
    strides: list[sympy.Expr] = []
    running: sympy.Expr = sympy.Integer(1)
    for size in reversed(sizes):
        strides.append(running)
        running = sympy.expand(running * size)
    return tuple(reversed(strides))


def strides_for(value: torch.Tensor) -> tuple[sympy.Expr, ...]:
    """The strides of a fake tensor where they are dense in some order, else row-major ones."""
    sizes = sizes_of(value)
    strides = strides_of(value)
    if any(size == 0 for size in sizes):
        return strides
    if any(not (one.is_Integer or one.is_Symbol or one.is_Mul or one.is_Add) for one in strides):
        return dense_strides(sizes)
    order = [k for k, size in enumerate(sizes) if size != 1]
    remaining = set(order)
    running: sympy.Expr = sympy.Integer(1)
    while remaining:
        for k in sorted(remaining, reverse=True):
            if sympy.expand(strides[k] - running) == 0:
                running = sympy.expand(running * sizes[k])
                remaining.discard(k)
                break
        else:
            return dense_strides(sizes)
    return strides


def has_gaps(value: torch.Tensor) -> bool:
    """Whether elements have each its own place, of known strides, but do not fill memory."""
    if not all(isinstance(one, int) for one in (*value.shape, *value.stride())):
        return False
    reach, gaps = 1, False
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            gaps = gaps or stride > reach
            reach = (size - 1) * stride + reach
    return gaps


@dataclass(frozen=True, slots=True)
class Layout:
    """Strides into a buffer.

    Attributes:
        buffer: name of the memory.
        dtype: of its elements.
        sizes: of the tensor.
        strides: in elements.
        offset: of the first element.
    """

    buffer: str
    dtype: torch.dtype
    sizes: tuple[sympy.Expr, ...]
    strides: tuple[sympy.Expr, ...]
    offset: sympy.Expr = sympy.S.Zero

    @classmethod
    def of(cls, buffer: str, value: torch.Tensor) -> Layout:
        """A tensor as it is; the buffer begins at its first element."""
        return cls(buffer, value.dtype, sizes_of(value), strides_of(value))

    @classmethod
    def dense(cls, buffer: str, value: torch.Tensor) -> Layout:
        """Memory of its own for a tensor."""
        return cls(buffer, value.dtype, sizes_of(value), strides_for(value))

    def offset_at(self, index: Sequence[Any]) -> sympy.Expr:
        """The offset of an element."""
        result = self.offset
        for expr, stride in zip(index, self.strides, strict=True):
            result = result + expr * stride
        return sympy.expand(result)

    def __str__(self) -> str:
        strides = ", ".join(map(str, self.strides))
        start = "" if self.offset == 0 else f" + {self.offset}"
        return f"{self.buffer}{start} ({strides})"


def reach_of(layout: Layout) -> sympy.Expr:
    """The number of elements from the buffer's first to the tensor's last."""
    result = layout.offset + 1
    for size, stride in zip(layout.sizes, layout.strides, strict=True):
        result = result + (size - 1) * stride
    return sympy.expand(result)
